"""What :mod:`molink.swarm.election.leader_election` is told, and what it decides."""

from dataclasses import dataclass

from molink.wire.messages.election import LeaderView

# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoordinatorHeardEvent:
    """The coordinator that this peer is connected to has spoken, in this term.

    ``leader`` is the peer on whose PC it runs; empty for one without a daemon.
    """

    term: int
    leader: str


@dataclass(frozen=True, slots=True)
class ConnectionLostEvent:
    """The connection to the coordinator is lost."""


@dataclass(frozen=True, slots=True)
class MembershipChangedEvent:
    """All members in the order of succession, and the replica (term, revision) that is held."""

    order: tuple[str, ...]
    replica: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PeerAnsweredEvent:
    """A peer has said whom it follows, as an answer or with a question of its own."""

    peer: str
    view: LeaderView


@dataclass(frozen=True, slots=True)
class PeerTimedOutEvent:
    """A peer that was asked can't be reached, or doesn't answer."""

    peer: str


@dataclass(frozen=True, slots=True)
class CoordinatorStartedEvent:
    """The coordinator of this PC runs, as :class:`StartCoordinatorAction` asked for, in that term
    or a higher one."""

    term: int
    coordinator_key: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CoordinatorFailedEvent:
    """The coordinator of this PC can't be started, or doesn't stay."""


@dataclass(frozen=True, slots=True)
class ResignedEvent:
    """This daemon ends in good order."""


@dataclass(frozen=True, slots=True)
class ElectionTimePassedEvent:
    """Time has passed."""


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


# --- decisions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueryLeaderAction:
    """Ask a peer whom it follows; :class:`PeerAnsweredEvent` or :class:`PeerTimedOutEvent` has to
    come of it."""

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
    """Run the coordinator here, in this term, or start it again if it runs already.

    ``lost_leader`` is the peer that led until now and can't be reached; empty if there is none.
    """

    term: int
    lost_leader: str = ""


@dataclass(frozen=True, slots=True)
class RaiseTermAction:
    """The coordinator here goes on in this term; none of its connections is lost."""

    term: int


@dataclass(frozen=True, slots=True)
class StepDownAction:
    """End the coordinator that runs here: another one leads."""


ElectionAction = (
    QueryLeaderAction
    | FollowLeaderAction
    | StartCoordinatorAction
    | RaiseTermAction
    | StepDownAction
)
