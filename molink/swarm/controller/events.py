"""What happens to the control plane, and what it decides to do about it."""

from dataclasses import dataclass

from molink.swarm.controller.records import DesiredModel, MemberRecord, PipelineRecord
from molink.wire.messages.instructions import Instruction, PeerInfo
from molink.wire.messages.peer_reports import PeerReport, StageFailed, StageLoaded, StageReady

# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberAddedEvent:
    """A peer has become a member (again)."""

    member: MemberRecord


@dataclass(frozen=True, slots=True)
class MemberRemovedEvent:
    """A peer left, or was revoked."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerStoppedEvent:
    """A peer has stopped in good order; it stays a member."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerDisconnectedEvent:
    """The connection on which a peer reported is no more. It may come back."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerReportedEvent:
    """A peer's report. ``is_new_connection``: it came over a connection that wasn't known
    before."""

    peer: str
    report: PeerReport
    is_new_connection: bool = False


@dataclass(frozen=True, slots=True)
class ConnectionTriedEvent:
    """Peer ``source`` has tried to connect to ``target``.

    One-way ``latency`` in seconds and ``rate`` in bytes/s, if they were measured.
    """

    source: str
    target: str
    succeeded: bool
    latency: float | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class StageReportedEvent:
    """A peer reports on its assignment."""

    peer: str
    message: StageLoaded | StageReady | StageFailed


@dataclass(frozen=True, slots=True)
class DesiredStateChangedEvent:
    """Another desired state: all models that are to be served."""

    models: tuple[DesiredModel, ...]


@dataclass(frozen=True, slots=True)
class TermRaisedEvent:
    """This coordinator goes on in a higher term: another part of the swarm comes back."""

    term: int


@dataclass(frozen=True, slots=True)
class RebalanceRequestedEvent:
    """All models are to be placed anew, as if nothing served them."""


@dataclass(frozen=True, slots=True)
class TimePassedEvent:
    """Time has passed.

    ``read_lag``: what peers have said in the last so many seconds may not have been heard yet.
    """

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

# --- decisions, to be carried out in the order given --------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMessageAction:
    """Tell a live peer."""

    peer: str
    message: Instruction


@dataclass(frozen=True, slots=True)
class CommitPipelineAction:
    """Write this to the state before going on."""

    pipeline: PipelineRecord


@dataclass(frozen=True, slots=True)
class ReserveEpochAction:
    """Write down that this epoch, and this name of a pipeline, have been used.

    What serves stays the committed one: this one is made beside it.
    """

    pipeline: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AnnouncePeerAction:
    """Remember what the others are told of a member."""

    member: PeerInfo


ControllerAction = (
    SendMessageAction | CommitPipelineAction | ReserveEpochAction | AnnouncePeerAction
)
