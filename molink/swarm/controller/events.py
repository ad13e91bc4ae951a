"""What happens to the control plane, and what it decides to do about it."""

from dataclasses import dataclass

from molink.swarm.controller.records import Desired, MemberRecord, PipelineRecord
from molink.wire.messages.instructions import Instruction, Member
from molink.wire.messages.reports import PeerReport, StageFailed, StageLoaded, StageReady

# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberAdded:
    """A peer has become a member (again)."""

    member: MemberRecord


@dataclass(frozen=True, slots=True)
class MemberRemoved:
    """A peer left, or was revoked."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Departed:
    """A peer has stopped in good order; it stays a member."""

    peer: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection on which a peer reported is no more. It may come back."""

    peer: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A peer's report. ``fresh``: it came over a connection that wasn't known before."""

    peer: str
    report: PeerReport
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Tried:
    """Peer ``by`` has tried to connect to ``to``.

    One-way ``latency`` in seconds and ``rate`` in bytes/s, if they were measured.
    """

    by: str
    to: str
    ok: bool
    latency: float | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class StageSaid:
    """A peer reports on its assignment."""

    peer: str
    message: StageLoaded | StageReady | StageFailed


@dataclass(frozen=True, slots=True)
class Serve:
    """Another desired state: all models that are to be served."""

    models: tuple[Desired, ...]


@dataclass(frozen=True, slots=True)
class TermRaised:
    """This coordinator goes on in a higher term: another part of the swarm comes back."""

    term: int


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """All models are to be placed anew, as if nothing served them."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed.

    ``behind``: what peers have said in the last so many seconds may not have been heard yet.
    """

    behind: float = 0.0


Event = (
    MemberAdded
    | MemberRemoved
    | Departed
    | Disconnected
    | Reported
    | Tried
    | StageSaid
    | Rebalanced
    | Serve
    | TermRaised
    | Tick
)

# --- decisions, to be carried out in the order given --------------------------------------------


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Tell a live peer."""

    peer: str
    message: Instruction


@dataclass(frozen=True, slots=True)
class Commit:
    """Write this to the state before going on."""

    pipeline: PipelineRecord


@dataclass(frozen=True, slots=True)
class Reserve:
    """Write down that this epoch, and this name of a pipeline, have been used.

    What serves stays the committed one: this one is made beside it.
    """

    pipeline: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Remember what the others are told of a member."""

    member: Member


Decision = SendMessage | Commit | Reserve | Announce
