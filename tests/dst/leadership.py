"""A daemon's part in the election, and its coordinator process, like ``molinkd``."""

from collections import deque
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from molink.swarm.election.events import (
    ConnectionLostEvent,
    CoordinatorHeardEvent,
    CoordinatorStartedEvent,
    ElectionEvent,
    ElectionTimePassedEvent,
    FollowLeaderAction,
    MembershipChangedEvent,
    PeerAnsweredEvent,
    PeerTimedOutEvent,
    QueryLeaderAction,
    RaiseTermAction,
    ReportMisbehaviourAction,
    StartCoordinatorAction,
    StepDownAction,
)
from molink.swarm.election.leader_election import LeaderElection
from molink.swarm.election.replica import decode_replica
from molink.wire.messages.election import LeaderHeartbeat, LeaderView
from tests.dst.coordinator import Coordinator, Disk
from tests.dst.network import Listener

if TYPE_CHECKING:
    from tests.dst.daemon import Daemon

#: Port on which daemons listen for each other.
CONTROL = 5467
STEP_INTERVAL = 0.5
#: Seconds in which a peer must answer, and in which a coordinator must end.
ANSWER, GRACE = 1.0, 5.0
#: Seconds until a coordinator continues in a higher term: writing it to disk is slow.
RAISING = (0.001, 0.1, 1.0)


@dataclass(frozen=True)
class Membership:
    """The coordinator as a peer knows it."""

    term: int
    leader: str
    key: str
    #: The PC's name.
    address: str


class Leadership:
    """One daemon's part in electing the leader."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._peer = peer = daemon.peer
        self._rng = Random(daemon.world.seed * 7001 + daemon.pid)
        self.coordinator: Coordinator | None = None
        self._deeds: deque[StartCoordinatorAction | StepDownAction] = deque()
        self._busy = False
        self._raised = 0
        #: Number of the last decision about the local process.
        self._deed = 0
        member, known = peer.membership, self._membership()
        self.election = LeaderElection(
            peer.id,
            daemon.time(),
            membership=known,
            term=max(member.term, known.replica[0]),
            leader=member.leader,
        )
        network = daemon.world.network
        self._listener = Listener(network, daemon, CONTROL, peer.id, lambda *_: None, self.admits)

    def start(self) -> None:
        """Look for the leader."""
        self._step()

    def _step(self) -> None:
        self._daemon.running()
        self._on_event(ElectionTimePassedEvent())
        self._daemon.later(STEP_INTERVAL, self._step)

    def orphan(self) -> None:
        """The daemon died: its coordinator reads the end of its pipe."""
        if self.coordinator is not None:
            self.coordinator.later(0.01, self.coordinator.die)

    # --- events ------------------------------------------------------------------------------

    def on_heartbeat(self, message: LeaderHeartbeat) -> bool:
        """Process a coordinator's heartbeat; returns whether to obey it."""
        term, leader = message.term, message.leader
        self._on_event(CoordinatorHeardEvent(term, leader, message.lease, message.verify_key))
        if not self.election.obeys(term, leader):
            return False
        self._remember(term=self.election.term, leader=self.election.leader)
        return True

    def on_disconnected(self) -> None:
        """The connection to the coordinator is lost."""
        self._on_event(ConnectionLostEvent())

    def on_replica(self, data: Any) -> None:
        """The coordinator has sent its state. Known entries of the log stay."""
        known = self._peer.replica.log
        found = decode_replica(data, known)
        if found.term > self.election.term:
            return  # its heartbeat comes first
        self._peer.replica = replace(found, log=known.merge_log(found.log))
        self._on_event(self._membership())

    def _membership(self) -> MembershipChangedEvent:
        held = self._peer.replica
        order = held.order or (self._peer.id,)
        return MembershipChangedEvent(order, held.version, held.log.branches)

    def on_view(self, event: PeerAnsweredEvent) -> None:
        """A peer states whom it follows."""
        if self.admits(event.peer):
            self._on_event(event)

    def admits(self, user: str) -> bool:
        """Whether a peer may ask."""
        return user in self._daemon.book.peers

    def _on_event(self, event: ElectionEvent) -> None:
        role, daemon = self.election.role, self._daemon
        for decision in self.election.handle(event, daemon.time()):
            match decision:
                case QueryLeaderAction(peer):
                    self._ask(peer)
                case FollowLeaderAction():
                    self._remember(
                        term=decision.term,
                        leader=decision.leader,
                        key=decision.coordinator_key,
                        address=decision.addresses[0],
                    )
                    daemon.session.follow_coordinator()
                case RaiseTermAction(term):
                    self._raised = term
                    if self.coordinator is not None:
                        seconds = self._rng.choice(RAISING)
                        self.coordinator.later(seconds, self.coordinator.raise_term, term)
                    self._remember(term=term)
                case ReportMisbehaviourAction(peer, reason):
                    daemon.world.monitor.misbehaves(daemon, peer, reason)
                case StartCoordinatorAction() | StepDownAction():
                    if isinstance(decision, StepDownAction) and self.election.role == "follower":
                        daemon.world.monitor.steps_down(daemon, self.election.leader)
                    self._deeds.append(decision)
                    self._act()
        if self.election.role != role:
            daemon.world.note(f"{daemon} {self.election.story[-1]}")

    def _remember(self, **changes: Any) -> None:
        self._peer.membership = replace(self._peer.membership, **changes)

    # --- questions ---------------------------------------------------------------------------

    def _ask(self, peer: str) -> None:
        """Ask a peer over a new connection, with a timeout."""
        daemon, network = self._daemon, self._daemon.world.network
        pc = daemon.world.pc_of(peer)
        view = self.election.build_view(daemon.time())
        open_ = [True]

        def end(event: ElectionEvent) -> None:
            if open_:
                open_.clear()
                self._on_event(event)

        def arrive() -> None:
            other = daemon.world.daemons.get(pc)
            if not open_ or other is None or not network.reaches(daemon, (pc.name, CONTROL)):
                if pc.up and other is None and not network.broken(daemon.pc, pc):
                    daemon.later(network.latency, end, PeerTimedOutEvent(peer))
                return
            if other.leadership.admits(self._peer.id):
                other.run(answer, other)

        def answer(other: "Daemon") -> None:
            liars = daemon.world.liars
            asked = liars.view_of(daemon, other, view)
            other.leadership.on_view(PeerAnsweredEvent(self._peer.id, asked))
            said: LeaderView = other.leadership.election.build_view(other.time())
            said = liars.view_of(other, daemon, said)
            if not network.broken(pc, daemon.pc):
                delay = network.delay(pc, daemon.pc, self._rng)
                daemon.later(delay, end, PeerAnsweredEvent(peer, said))

        delay = 5.0 * network.delay(daemon.pc, pc, self._rng)
        network.event_queue.schedule_at(network.event_queue.now + delay, arrive)
        daemon.later(ANSWER, end, PeerTimedOutEvent(peer))

    # --- leading -----------------------------------------------------------------------------

    def _act(self) -> None:
        """Start and stop the coordinator as decided, one after the other."""
        if self._busy or not self._deeds:
            return
        self._busy = True
        self._deed += 1
        deed, before = self._deeds.popleft(), self.coordinator
        self.coordinator = None
        if before is None or not before.alive:
            self._daemon.later(0.0, self._ended, deed)
            return
        before.later(0.05, before.die)
        self._daemon.later(GRACE if before.frozen else 0.1, self._ended, deed, before)

    def _ended(
        self, deed: StartCoordinatorAction | StepDownAction, before: Coordinator | None = None
    ) -> None:
        if before is not None:
            before.die()
        if isinstance(deed, StartCoordinatorAction):
            seconds = self._rng.uniform(0.2, 0.8)
            self._daemon.later(seconds, self._led, deed)
        else:
            self._busy = False
            self._act()

    def _led(self, deed: StartCoordinatorAction) -> None:
        coordinator = self._start(deed.term, deed.lost_leader)
        self._busy = False
        self._on_event(
            CoordinatorStartedEvent(coordinator.term, coordinator.key, (self._daemon.pc.name,))
        )
        self._act()

    def _start(self, term: int, lost: str) -> Coordinator:
        peer = self._peer
        if peer.disk is None:
            peer.disk = Disk.restored(peer.replica)
        else:
            log = peer.disk.log.merge_log(peer.replica.log)
            if peer.disk.version < peer.replica.version:
                peer.disk = Disk.restored(replace(peer.replica, log=log))
            elif log.digest != peer.disk.log.digest:
                peer.disk.put_log(log)
        daemon = self._daemon
        coordinator = Coordinator(daemon.world, daemon.pc, peer.id, peer.disk, term, lost)
        self.coordinator = coordinator
        deed = self._deed
        coordinator.on_death.append(lambda: daemon.later(0.3, self._retry_raise, term, deed))
        return coordinator

    def _retry_raise(self, term: int, deed: int) -> None:
        """Restart a coordinator that ended by itself."""
        if deed == self._deed and not self._busy and self.coordinator is not None:
            self._start(max(term, self._raised), "")
