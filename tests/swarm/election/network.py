"""A random network of elections: peers that die, freeze and are partitioned."""

import random

from molink.swarm.election.events import (
    ConnectionLostEvent,
    CoordinatorHeardEvent,
    CoordinatorStartedEvent,
    ElectionTimePassedEvent,
    FollowLeaderAction,
    MembershipChangedEvent,
    PeerAnsweredEvent,
    PeerTimedOutEvent,
    QueryLeaderAction,
    RaiseTermAction,
    StartCoordinatorAction,
    StepDownAction,
)
from molink.swarm.election.leader_election import LeaderElection

KEY = "k" * 40

STEP = 0.1


class Network:
    """Peers with coordinators; any peer may be dead, frozen or partitioned."""

    def __init__(self, seed: int, peers: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.order = tuple(f"p{n}" for n in range(peers))
        self.peers = {me: self._start(me) for me in self.order}
        self.dead: set[str] = set()
        self.frozen: dict[str, float] = {}
        self.part = dict.fromkeys(self.order, 0)
        #: Messages in flight: (time, receiver, event).
        self.mail: list[tuple[float, str, object]] = []
        #: Coordinator of each peer's session, and term of each running coordinator.
        self.session: dict[str, str] = {}
        self.runs: dict[str, int] = {}
        #: Leader of each term.
        self.led: dict[int, str] = {}

    @property
    def membership(self) -> MembershipChangedEvent:
        return MembershipChangedEvent(self.order, (0, 1))

    def _start(self, me: str) -> LeaderElection:
        return LeaderElection(
            me,
            self.now,
            membership=self.membership,
            leader=self.order[0],
        )

    def reaches(self, one: str, other: str) -> bool:
        return (
            self.part[one] == self.part[other]
            and other not in self.dead
            and other not in self.frozen
        )

    def kill(self, who: str) -> None:
        self.dead.add(who)
        self.runs.pop(who, None)
        self.session.pop(who, None)

    def restart(self, who: str) -> None:
        self.dead.discard(who)
        before = self.peers[who]
        leader, term = before.leader, before.term
        self.peers[who] = LeaderElection(
            who, self.now, membership=self.membership, term=term, leader=leader
        )

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += STEP
            for who in [one for one, thaw in self.frozen.items() if thaw <= self.now]:
                del self.frozen[who]
            due = [letter for letter in self.mail if letter[0] <= self.now]
            self.mail = [letter for letter in self.mail if letter[0] > self.now]
            for _, who, event in due:
                if who in self.frozen:
                    self.mail.append((self.now + STEP, who, event))
                elif who not in self.dead:
                    self.tell(who, event)
            for who in self.order:
                if who not in self.dead and who not in self.frozen:
                    self.listen(who)
                    self.tell(who, ElectionTimePassedEvent())

    def listen(self, who: str) -> None:
        leader = self.session.get(who)
        if leader is None:
            return
        if leader in self.runs and self.reaches(who, leader):
            self.tell(who, self.heartbeat(leader))
        elif self.part[who] == self.part[leader] and leader not in self.frozen:
            del self.session[who]
            self.tell(who, ConnectionLostEvent())

    def heartbeat(self, leader: str) -> CoordinatorHeardEvent:
        return CoordinatorHeardEvent(self.runs[leader], leader)

    def tell(self, who: str, event: object) -> None:
        for decision in self.peers[who].handle(event, self.now):  # type: ignore[arg-type]
            match decision:
                case QueryLeaderAction(other):
                    self.ask(who, other)
                case FollowLeaderAction(leader):
                    self.session[who] = leader
                case StepDownAction():
                    self.runs.pop(who, None)
                case RaiseTermAction(term):
                    assert self.led.setdefault(term, who) == who, "two lead in one term"
                    self.runs[who] = term
                case StartCoordinatorAction(term):
                    assert self.led.setdefault(term, who) == who, "two lead in one term"
                    self.runs.pop(who, None)
                    self.mail.append((self.now + 0.5, who, ("run", term)))
        if isinstance(event, tuple):
            raise AssertionError

    def ask(self, who: str, other: str) -> None:
        view = self.peers[who].build_view(self.now)
        delay = self.random.uniform(0.05, 0.4)
        if self.reaches(who, other):
            self.tell_later(delay / 2, other, PeerAnsweredEvent(who, view))
            self.tell_later(delay, who, ("answer", other))
        else:
            self.tell_later(1.0, who, PeerTimedOutEvent(other))

    def tell_later(self, delay: float, who: str, event: object) -> None:
        self.mail.append((self.now + delay, who, event))

    def leaders(self) -> set[str]:
        return {
            one.leader
            for who, one in self.peers.items()
            if who not in self.dead and one.role in ("follower", "leader")
        }


class Postman(Network):
    """Network whose messages may be evaluated on arrival."""

    def tell(self, who: str, event: object) -> None:
        match event:
            case ("run", int(term)):
                self.runs[who] = term
                event = CoordinatorStartedEvent(term, KEY, ("h:1",))
            case ("answer", str(other)):
                if self.reaches(who, other):
                    event = PeerAnsweredEvent(other, self.peers[other].build_view(self.now))
                else:
                    event = PeerTimedOutEvent(other)
        super().tell(who, event)
