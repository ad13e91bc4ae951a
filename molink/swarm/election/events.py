"""Events and actions of :mod:`molink.swarm.election.leader_election`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from molink.wire.messages.election import LeaderView, Lease

# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoordinatorHeardEvent:
    """The coordinator that this peer is connected to sent a heartbeat in this term.

    It runs on the PC of the peer ``leader``; empty for one without a daemon. The ``verify_key``
    checks its leases.
    """

    term: int
    leader: str
    lease: Lease | None = None
    verify_key: str = ""


@dataclass(frozen=True, slots=True)
class ConnectionLostEvent:
    """The connection to the coordinator is lost."""


@dataclass(frozen=True, slots=True)
class MembershipChangedEvent:
    """All members in the order in which they become leader, and the version of this peer's replica.

    ``branches`` maps members to their branch, which has one vote; other members are their own
    branch.
    """

    order: tuple[str, ...]
    replica: tuple[int, int]
    branches: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerAnsweredEvent:
    """A peer stated which leader it follows, in an answer or in a query of its own."""

    peer: str
    view: LeaderView


@dataclass(frozen=True, slots=True)
class PeerTimedOutEvent:
    """A queried peer is unreachable or did not answer."""

    peer: str


@dataclass(frozen=True, slots=True)
class CoordinatorStartedEvent:
    """The coordinator of this PC runs as requested, in this term or a higher one."""

    term: int
    coordinator_key: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CoordinatorFailedEvent:
    """The coordinator of this PC failed to start, or exited."""


@dataclass(frozen=True, slots=True)
class ResignedEvent:
    """This daemon shuts down."""


@dataclass(frozen=True, slots=True)
class ElectionTimePassedEvent:
    """The periodic timer fired."""


ElectionEvent = (
    CoordinatorHeardEvent
    | ConnectionLostEvent
    | MembershipChangedEvent
    | PeerAnsweredEvent
    | PeerTimedOutEvent
    | CoordinatorStartedEvent
    | CoordinatorFailedEvent
    | ResignedEvent
    | ElectionTimePassedEvent
)


# --- actions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueryLeaderAction:
    """Ask a peer which leader it follows; it answers or times out."""

    peer: str


@dataclass(frozen=True, slots=True)
class FollowLeaderAction:
    """Connect to the coordinator that runs at ``leader``."""

    leader: str
    term: int
    coordinator_key: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartCoordinatorAction:
    """Start the coordinator on this PC in this term, or restart it.

    ``lost_leader`` is the unreachable previous leader, if there is one.
    """

    term: int
    lost_leader: str = ""


@dataclass(frozen=True, slots=True)
class RaiseTermAction:
    """Continue in this term with the coordinator on this PC; connections are kept."""

    term: int


@dataclass(frozen=True, slots=True)
class StepDownAction:
    """Stop the coordinator on this PC, since another peer leads."""


@dataclass(frozen=True, slots=True)
class ReportMisbehaviourAction:
    """A peer keeps naming terms beyond its branch's budget."""

    peer: str
    reason: str


ElectionAction = (
    QueryLeaderAction
    | FollowLeaderAction
    | StartCoordinatorAction
    | RaiseTermAction
    | StepDownAction
    | ReportMisbehaviourAction
)
