"""Members, their sessions, and the information sent to each live peer about the others."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from molink.swarm.controller.events import AnnouncePeerAction, ControllerAction, SendMessageAction
from molink.swarm.controller.records import MemberRecord
from molink.util.timeouts import TIMEOUTS, SilenceLimit
from molink.wire.messages.instructions import (
    Instruction,
    Notice,
    PeerInfo,
    PeerRemoved,
    Route,
    RouteRemoved,
    Welcome,
)
from molink.wire.messages.peer_reports import PeerReport

#: Maximum seconds without a report, after which a peer counts as lost until it reports again.
PEER_TIMEOUT = TIMEOUTS.peer
#: Maximum seconds of silence that unread messages excuse, since an overloaded coordinator must also
#: detect losses.
MAX_READ_LAG = 10.0
#: Consecutive reports with other routes after which the routes are sent to a peer again.
MAX_ROUTE_MISMATCHES = 6
#: Consecutive reports that list an ended pipeline after which the peer is told again.
MAX_STALE_REPORTS = 4
#: Maximum addresses passed on per peer, since a header must hold those of sixteen stages.
MAX_ADDRESSES = 3


@dataclass(slots=True)
class PeerSession:
    """A live peer: its last report, and the information sent to it."""

    report: PeerReport
    last_seen: float
    silence_limit: SilenceLimit
    #: When its connection broke; ``None`` if it has reported again.
    disconnected_at: float | None = None
    members: dict[str, PeerInfo] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)
    #: Number of consecutive reports that show other routes.
    route_mismatches: int = 0
    notice: str = ""
    #: Number of consecutive reports that show each ended pipeline.
    stale_pipelines: dict[str, int] = field(default_factory=dict)

    def find_stale(self, known: Collection[str]) -> list[str]:
        """Return the pipelines not in ``known`` whose end the peer must be told again."""
        shown = {pipeline for pipeline, _, _ in self.report.routes or ()}
        self.stale_pipelines = {
            one: self.stale_pipelines.get(one, 0) + 1 for one in sorted(shown.difference(known))
        }
        return [
            one for one, reports in self.stale_pipelines.items() if reports % MAX_STALE_REPORTS == 0
        ]

    def check_routes(self) -> None:
        """Clear the record of routes sent to the peer if its reports keep showing other ones.

        The peer may read messages of an earlier coordinator after this one's.
        """
        reported = self.report.routes
        sent = {(route.pipeline, route.epoch, route.is_ready) for route in self.routes.values()}
        self.route_mismatches = (
            0 if reported is None or sent <= set(reported) else self.route_mismatches + 1
        )
        if self.route_mismatches >= MAX_ROUTE_MISMATCHES:
            self.routes.clear()
            self.route_mismatches = 0


class Registry:
    """Members in joining order, and the sessions of live ones.

    What a peer must know is compared with what it was sent, so late joiners, returning peers and
    peers that were always present are handled alike.
    """

    def __init__(self, swarm: str, members: Iterable[MemberRecord]) -> None:
        self._swarm = swarm
        #: Only peers whose standing is ``member``.
        self.members: dict[str, MemberRecord] = {
            member.peer: member for member in members if member.standing == "member"
        }
        #: Keys are members.
        self.sessions: dict[str, PeerSession] = {}
        #: Silence limits by peer. They outlive sessions, since a session may have ended too early.
        self._silence_limits: dict[str, SilenceLimit] = {}
        #: See :class:`TimePassedEvent`.
        self._read_lag = 0.0
        #: Whether a peer may need information about a member.
        self._members_changed = False

    def name_of(self, peer: str) -> str:
        """Return the display name of a peer."""
        member = self.members.get(peer)
        return member.name if member is not None else peer

    def is_live(self, peer: str) -> bool:
        """Whether the peer has a session."""
        return peer in self.sessions

    def all_live(self, peers: Iterable[str]) -> bool:
        """Whether all these peers have a session."""
        return all(peer in self.sessions for peer in peers)

    def add_member(self, member: MemberRecord) -> None:
        """Add a peer that has joined."""
        known = self.members.get(member.peer)
        if known is not None:
            member = replace(member, announced=known.announced)
        self.members[member.peer] = member
        self._members_changed = True

    def remove_member(self, peer: str) -> list[ControllerAction]:
        """Remove a member; all other peers drop it."""
        if self.members.pop(peer, None) is None:
            return []
        self.sessions.pop(peer, None)
        self._silence_limits.pop(peer, None)
        for session in self.sessions.values():
            session.members.pop(peer, None)
        return self.broadcast_message(PeerRemoved(peer=peer))

    def record_report(
        self, peer: str, report: PeerReport, fresh: bool, now: float
    ) -> list[ControllerAction]:
        """Record a member's report; welcome it if its session begins."""
        decisions: list[ControllerAction] = []
        limit = self._silence_limits.setdefault(peer, SilenceLimit(PEER_TIMEOUT))
        session = self.sessions.get(peer)
        if fresh:
            limit.restart()
        limit.on_heard(now)
        if session is None or fresh:
            self.sessions[peer] = PeerSession(report, now, limit)
            self._members_changed = True
            decisions.append(SendMessageAction(peer, Welcome(swarm=self._swarm, peer=peer)))
        else:
            session.report, session.last_seen, session.disconnected_at = report, now, None
            session.check_routes()
        member = self.members[peer]
        info = PeerInfo(
            peer=peer,
            name=report.name,
            public_key=member.public_key,
            addresses=report.addresses[:MAX_ADDRESSES],
            control_port=report.control_port,
            models=report.models,
            primary_peer=report.primary_peer,
        )
        if info != member.announced:
            self.members[peer] = replace(member, name=report.name, announced=info)
            self._members_changed = True
            decisions.append(AnnouncePeerAction(info))
        return decisions

    def set_read_lag(self, read_lag: float) -> None:
        """Set how many seconds of messages may be unread."""
        self._read_lag = min(read_lag, MAX_READ_LAG)

    def silence_of(self, session: PeerSession, now: float) -> float:
        """Return the seconds for which a peer has been silent, apart from unread messages."""
        return now - self._read_lag - session.last_seen

    def find_silent(self, now: float) -> list[str]:
        """Return the peers whose session has timed out."""
        return [
            peer
            for peer, session in self.sessions.items()
            if self.silence_of(session, now) > session.silence_limit.seconds
        ]

    def mark_disconnected(self, peer: str, now: float) -> None:
        """Record that the peer's control connection was lost."""
        session = self.sessions.get(peer)
        if session is not None and session.disconnected_at is None:
            session.disconnected_at = now

    def find_disconnected(
        self, now: float, doubted: Callable[[str, PeerSession], bool]
    ) -> list[str]:
        """Return the peers that did not reconnect in time; ``doubted`` peers have no time."""
        return [
            peer
            for peer, session in self.sessions.items()
            if session.disconnected_at is not None
            and (now - session.disconnected_at >= TIMEOUTS.peer_reconnect or doubted(peer, session))
        ]

    def primary_peer(self, peer: str) -> str:
        """Return the primary peer of the PC; ``peer`` may be a further device of it."""
        member = self.members.get(peer)
        info = member.announced if member is not None else None
        pc = info.primary_peer if info is not None else ""
        return pc if pc in self.members else peer

    def find_co_located(self, peers: Collection[str], now: float) -> list[str]:
        """Return other devices of the same PCs that are lost with ``peers``: disconnected or silent
        ones.
        """
        pcs = {self.primary_peer(peer) for peer in peers}
        return [
            peer
            for peer, session in self.sessions.items()
            if peer not in peers
            and self.primary_peer(peer) in pcs
            and (
                session.disconnected_at is not None
                or self.silence_of(session, now) > TIMEOUTS.co_located_peer
            )
        ]

    def drop_session(self, peer: str) -> None:
        """End a session; the peer stays a member."""
        self.sessions.pop(peer, None)

    def broadcast_message(self, message: Instruction) -> list[ControllerAction]:
        """Send a message to every live peer."""
        return [SendMessageAction(peer, message) for peer in self.sessions]

    def publish_members(self) -> list[ControllerAction]:
        """Send each live peer what it does not know yet about the others."""
        if not self._members_changed:
            return []
        self._members_changed = False
        all_members = {peer: _peer_info(member) for peer, member in self.members.items()}
        decisions: list[ControllerAction] = []
        for peer, session in self.sessions.items():
            for other, member in all_members.items():
                if other != peer and session.members.get(other) != member:
                    session.members[other] = member
                    decisions.append(SendMessageAction(peer, member))
        return decisions

    def publish_route(self, route: Route) -> list[ControllerAction]:
        """Send a route to every live peer that does not know it yet."""
        decisions: list[ControllerAction] = []
        for peer, session in self.sessions.items():
            if session.routes.get(route.pipeline) != route:
                session.routes[route.pipeline], session.route_mismatches = route, 0
                decisions.append(SendMessageAction(peer, route))
        return decisions

    def notify_user(self, peer: str, text: str) -> list[ControllerAction]:
        """Show a notice to the user of a peer if it is new; an empty text clears it."""
        session = self.sessions[peer]
        if session.notice == text:
            return []
        session.notice = text
        return [SendMessageAction(peer, Notice(text=text))]

    def end_route(self, pipeline: str) -> list[ControllerAction]:
        """Tell every peer that a pipeline has ended."""
        for session in self.sessions.values():
            session.routes.pop(pipeline, None)
        return self.broadcast_message(RouteRemoved(pipeline=pipeline))

    def end_stale_routes(self, peer: str, known: Collection[str]) -> list[ControllerAction]:
        """Tell a peer about pipelines not in ``known`` that ended while it had no session."""
        stale = self.sessions[peer].find_stale(known)
        return [SendMessageAction(peer, RouteRemoved(pipeline=pipeline)) for pipeline in stale]

    def find_holders(self, model: str) -> tuple[str, ...]:
        """Return the live peers that serve every file of a model, in joining order."""
        return tuple(
            peer
            for peer in self.members
            if peer in self.sessions and model in self.sessions[peer].report.models
        )


def _peer_info(member: MemberRecord) -> PeerInfo:
    """Return the information for other peers about a member; without addresses if it never
    reported.
    """
    return member.announced or PeerInfo(
        peer=member.peer,
        name=member.name,
        public_key=member.public_key,
        addresses=(),
        control_port=0,
    )
