"""Who is a member, who is there, and what each of those has been told of the others."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from molink.swarm.controller.events import Announce, Decision, SendMessage
from molink.swarm.controller.records import MemberRecord
from molink.wire.messages.instructions import (
    Instruction,
    Member,
    MemberGone,
    Notice,
    Route,
    RouteGone,
    Welcome,
)
from molink.wire.messages.reports import PeerReport

#: A peer that hasn't reported for this long, in seconds, is gone until it does again.
SESSION_TIMEOUT = 3.0
#: What a coordinator has not read yet counts as said for this long, in seconds: one that never gets
#: through has to find out too who is gone.
MAX_BEHIND = 10.0
#: A peer whose connection has broken has this long for another one, in seconds.
RECONNECT_TIMEOUT = 0.5
#: The devices of one PC are gone together: who has been silent for this long, in seconds, when
#: another of them is lost.
TOGETHER = 1.0
#: So many reports in a row that show other routes than the peer was told: they came to nothing.
MAX_ASTRAY = 6
#: So many reports in a row that show a pipeline that is no more: the peer hasn't heard that.
MAX_STALE = 4
#: A header has to hold sixteen stages' addresses: more than these few of a peer aren't passed on.
MAX_ADDRESSES = 3


@dataclass(slots=True)
class PeerSession:
    """A peer that is there: its last report, when that came, and what it has been told."""

    report: PeerReport
    seen: float
    #: When its connection broke; ``None`` once it has reported again.
    cut: float | None = None
    members: dict[str, Member] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)
    #: Reports in a row that show other routes than those.
    astray: int = 0
    notice: str = ""
    #: Pipelines that reports show though there are none such: in how many reports in a row.
    stale: dict[str, int] = field(default_factory=dict)

    def find_stale(self, known: Collection[str]) -> list[str]:
        """Pipelines that the peer has to be told again are no more: none of ``known``."""
        shown = {pipeline for pipeline, _, _ in self.report.routes or ()}
        self.stale = {one: self.stale.get(one, 0) + 1 for one in sorted(shown.difference(known))}
        return [one for one, reports in self.stale.items() if reports % MAX_STALE == 0]

    def find_astray(self) -> None:
        """Forget what the peer was told of routes if its reports go on showing something else.

        What an earlier coordinator has said may be read late, after the words of this one.
        """
        shown = self.report.routes
        told = {(route.pipeline, route.epoch, route.ready) for route in self.routes.values()}
        self.astray = 0 if shown is None or told <= set(shown) else self.astray + 1
        if self.astray >= MAX_ASTRAY:
            self.routes.clear()
            self.astray = 0


class Registry:
    """Members in the order of joining, and the sessions of those that are there.

    What a peer has to know is compared with what it has been told, so a late joiner, a peer that
    comes back and one that was there all along are the same case.
    """

    def __init__(self, swarm: str, members: Iterable[MemberRecord]) -> None:
        self._swarm = swarm
        #: Only those whose standing is ``member``.
        self.members: dict[str, MemberRecord] = {
            member.peer: member for member in members if member.standing == "member"
        }
        #: Keys are members.
        self.sessions: dict[str, PeerSession] = {}
        #: Of so many seconds not all is heard that peers have said, see :class:`Tick`.
        self._behind = 0.0
        #: Whether somebody may have to be told of a member.
        self._news = False

    def name(self, peer: str) -> str:
        """What people call a peer."""
        member = self.members.get(peer)
        return member.name if member is not None else peer

    def live(self, peer: str) -> bool:
        """Whether the peer has a session."""
        return peer in self.sessions

    def add(self, member: MemberRecord) -> None:
        """A peer has joined."""
        known = self.members.get(member.peer)
        if known is not None:
            member = replace(member, announced=known.announced)
        self.members[member.peer] = member
        self._news = True

    def remove(self, peer: str) -> list[Decision]:
        """A peer is no member any more: everybody drops it."""
        if self.members.pop(peer, None) is None:
            return []
        self.sessions.pop(peer, None)
        for session in self.sessions.values():
            session.members.pop(peer, None)
        return self.broadcast(MemberGone(peer=peer))

    def report(self, peer: str, report: PeerReport, fresh: bool, now: float) -> list[Decision]:
        """Take a member's report; greets it if its session begins."""
        decisions: list[Decision] = []
        session = self.sessions.get(peer)
        if session is None or fresh:
            self.sessions[peer] = PeerSession(report, now)
            self._news = True
            decisions.append(SendMessage(peer, Welcome(swarm=self._swarm, peer=peer)))
        else:
            session.report, session.seen, session.cut = report, now, None
            session.find_astray()
        member = self.members[peer]
        told = Member(
            peer=peer,
            name=report.name,
            public_key=member.public_key,
            addresses=report.addresses[:MAX_ADDRESSES],
            control_port=report.control_port,
            models=report.models,
            pc=report.pc,
        )
        if told != member.announced:
            self.members[peer] = replace(member, name=report.name, announced=told)
            self._news = True
            decisions.append(Announce(told))
        return decisions

    def heard(self, behind: float) -> None:
        """All is heard but what peers have said in the last ``behind`` seconds."""
        self._behind = min(behind, MAX_BEHIND)

    def silence(self, session: PeerSession, now: float) -> float:
        """For how long a peer has said nothing, in seconds, as far as it would have been heard."""
        return now - self._behind - session.seen

    def silent(self, now: float) -> list[str]:
        """Peers whose session has timed out."""
        return [
            peer
            for peer, session in self.sessions.items()
            if self.silence(session, now) > SESSION_TIMEOUT
        ]

    def disconnected(self, peer: str, now: float) -> None:
        """The connection on which the peer reported is no more."""
        session = self.sessions.get(peer)
        if session is not None and session.cut is None:
            session.cut = now

    def cut_off(self, now: float, doubted: Callable[[str, PeerSession], bool]) -> list[str]:
        """Peers that have not connected again in time; at once those that are ``doubted`` too."""
        return [
            peer
            for peer, session in self.sessions.items()
            if session.cut is not None
            and (now - session.cut >= RECONNECT_TIMEOUT or doubted(peer, session))
        ]

    def pc(self, peer: str) -> str:
        """The peer that speaks for the PC: another one if ``peer`` is a further device of it."""
        member = self.members.get(peer)
        told = member.announced if member is not None else None
        pc = told.pc if told is not None else ""
        return pc if pc in self.members else peer

    def lost_with(self, peers: Collection[str], now: float) -> list[str]:
        """Devices that are gone if ``peers`` are: of the same PCs, and as silent."""
        pcs = {self.pc(peer) for peer in peers}
        return [
            peer
            for peer, session in self.sessions.items()
            if peer not in peers
            and self.pc(peer) in pcs
            and (session.cut is not None or self.silence(session, now) > TOGETHER)
        ]

    def drop(self, peer: str) -> None:
        """End a session; the peer stays a member."""
        self.sessions.pop(peer, None)

    def broadcast(self, message: Instruction) -> list[Decision]:
        """Tell everybody who is there."""
        return [SendMessage(peer, message) for peer in self.sessions]

    def publish_members(self) -> list[Decision]:
        """Tell everybody what they don't know yet of the others."""
        if not self._news:
            return []
        self._news = False
        all_members = {peer: _describe(member) for peer, member in self.members.items()}
        decisions: list[Decision] = []
        for peer, session in self.sessions.items():
            for other, member in all_members.items():
                if other != peer and session.members.get(other) != member:
                    session.members[other] = member
                    decisions.append(SendMessage(peer, member))
        return decisions

    def publish_route(self, route: Route) -> list[Decision]:
        """Tell everybody a route that they don't know yet."""
        decisions: list[Decision] = []
        for peer, session in self.sessions.items():
            if session.routes.get(route.pipeline) != route:
                session.routes[route.pipeline], session.astray = route, 0
                decisions.append(SendMessage(peer, route))
        return decisions

    def notify(self, peer: str, text: str) -> list[Decision]:
        """Tell the person at a peer what they don't know yet; empty: that is over."""
        session = self.sessions[peer]
        if session.notice == text:
            return []
        session.notice = text
        return [SendMessage(peer, Notice(text=text))]

    def end_route(self, pipeline: str) -> list[Decision]:
        """Tell everybody that a pipeline is no more."""
        for session in self.sessions.values():
            session.routes.pop(pipeline, None)
        return self.broadcast(RouteGone(pipeline=pipeline))

    def end_stale_routes(self, peer: str, known: Collection[str]) -> list[Decision]:
        """Tell a peer of pipelines that ended while it had no session: all but those ``known``."""
        stale = self.sessions[peer].find_stale(known)
        return [SendMessage(peer, RouteGone(pipeline=pipeline)) for pipeline in stale]

    def holders(self, model: str) -> tuple[str, ...]:
        """Peers that are there and can serve every file of a model, in the order of joining."""
        return tuple(
            peer
            for peer in self.members
            if peer in self.sessions and model in self.sessions[peer].report.models
        )


def _describe(member: MemberRecord) -> Member:
    """What others are told of a member; one that has never reported has no addresses yet."""
    return member.announced or Member(
        peer=member.peer,
        name=member.name,
        public_key=member.public_key,
        addresses=(),
        control_port=0,
    )
