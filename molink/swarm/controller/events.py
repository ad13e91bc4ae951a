"""Events that the control plane receives, and actions that it returns."""

from dataclasses import dataclass

from molink.swarm.controller.records import DesiredModel, MemberRecord, PipelineRecord
from molink.wire.messages.instructions import Instruction, PeerInfo
from molink.wire.messages.peer_reports import PeerReport, StageFailed, StageLoaded, StageReady

# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberAddedEvent:
    """A peer has become a member, for the first time or again."""

    member: MemberRecord


@dataclass(frozen=True, slots=True)
class MemberRemovedEvent:
    """A peer has left, or was revoked."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerStoppedEvent:
    """A peer has shut down cleanly; it stays a member."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerDisconnectedEvent:
    """A peer's control connection was lost; it may reconnect."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerReportedEvent:
    """A peer's report; with ``is_new_connection`` it is the first one on its connection."""

    peer: str
    report: PeerReport
    is_new_connection: bool = False


@dataclass(frozen=True, slots=True)
class ConnectionTriedEvent:
    """``source`` has tried to connect to ``target``.

    ``latency`` (one way, in seconds), ``rate`` (bytes/s) and ``loss`` (share of packets) are set if
    measured.
    """

    source: str
    target: str
    succeeded: bool
    latency: float | None = None
    rate: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class StageReportedEvent:
    """A peer reports on its assignment."""

    peer: str
    message: StageLoaded | StageReady | StageFailed


@dataclass(frozen=True, slots=True)
class DesiredStateChangedEvent:
    """The desired state, all models to serve, has changed."""

    models: tuple[DesiredModel, ...]


@dataclass(frozen=True, slots=True)
class TermRaisedEvent:
    """This coordinator continues in a higher term, since another part of the swarm has rejoined."""

    term: int


@dataclass(frozen=True, slots=True)
class RebalanceRequestedEvent:
    """Place all models again as if none were serving."""


@dataclass(frozen=True, slots=True)
class TimePassedEvent:
    """Time has passed. Messages that peers sent in the last ``read_lag`` seconds may be unread."""

    read_lag: float = 0.0


ControllerEvent = (
    MemberAddedEvent
    | MemberRemovedEvent
    | PeerStoppedEvent
    | PeerDisconnectedEvent
    | PeerReportedEvent
    | ConnectionTriedEvent
    | StageReportedEvent
    | RebalanceRequestedEvent
    | DesiredStateChangedEvent
    | TermRaisedEvent
    | TimePassedEvent
)

# --- actions, to be carried out in order --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMessageAction:
    """Send a message to a live peer."""

    peer: str
    message: Instruction


@dataclass(frozen=True, slots=True)
class CommitPipelineAction:
    """Write this record to the state before continuing."""

    pipeline: PipelineRecord


@dataclass(frozen=True, slots=True)
class ReserveEpochAction:
    """Record that this epoch and pipeline id are used; the committed pipeline still serves."""

    pipeline: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AnnouncePeerAction:
    """Record the :class:`PeerInfo` that was sent to other peers."""

    member: PeerInfo


ControllerAction = (
    SendMessageAction | CommitPipelineAction | ReserveEpochAction | AnnouncePeerAction
)
