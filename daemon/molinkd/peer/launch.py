"""What a daemon is started for, and what it tells whoever started it."""

import contextlib
import sys
from collections.abc import Callable
from typing import BinaryIO, Literal

import msgspec

from molink.wire.messages.instructions import PendingPairing
from molink.wire.messages.peer_reports import TransferState
from molinkd.peer.settings import Settings

#: Runs a daemon: its order on standard input, its events on standard output.
DAEMON_COMMAND = (sys.executable, "-P", "-m", "molinkd.peer")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The order to run a daemon: ``up`` runs the coordinator here too, ``join`` doesn't."""

    #: The state folder.
    home: str
    settings: Settings
    role: Literal["up", "join"]
    #: What to serve: a name or a folder. ``None`` is for ``up`` what it served last or the demo
    #: model, and for ``join`` nothing: the swarm has a model already.
    model: str | None = None
    #: Whether ``up`` makes a token for the next PC.
    invite: bool = True
    #: The pasted token of ``join``; ``None`` returns to the remembered swarm.
    token: str | None = None
    #: For a further device of a PC: the peer that is the PC's own, which has the endpoint.
    pc: str = ""


class DaemonEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Something that whoever started the daemon wants to know."""


class ModelFoundEvent(DaemonEvent, frozen=True, kw_only=True, tag="serving"):
    """The model that ``up`` has been asked to serve."""

    model: str
    path: str
    #: Whether it sees images too, which aren't served.
    has_vision: bool = False


class DaemonStartedEvent(DaemonEvent, frozen=True, kw_only=True, tag="listening"):
    """The daemon is up; its endpoint answers."""

    name: str
    swarm: str
    endpoint: str
    control_port: int
    pid: int


class InvitationCreatedEvent(DaemonEvent, frozen=True, kw_only=True, tag="invitation"):
    """A join token for so many other PCs."""

    token: str
    uses: int = 1
    #: Whether PCs on this network can also join without it.
    discovery: bool = False


class PairingsChangedEvent(DaemonEvent, frozen=True, kw_only=True, tag="knocks"):
    """All PCs that ask to be let in now; again whenever they are others."""

    pairings: tuple[PendingPairing, ...]


class StageStatusChangedEvent(DaemonEvent, frozen=True, kw_only=True, tag="stage"):
    """What this peer's stages are doing, in one line."""

    text: str


class TransfersChangedEvent(DaemonEvent, frozen=True, kw_only=True, tag="transfers"):
    """How far the files are that come to this PC; twice a second, and with none at the end."""

    transfers: tuple[TransferState, ...] = ()


class ModelReadinessChangedEvent(DaemonEvent, frozen=True, kw_only=True, tag="ready"):
    """Whether requests for a model can be served."""

    model: str
    ready: bool


class ModelUnavailableEvent(DaemonEvent, frozen=True, kw_only=True, tag="not-served"):
    """Why requests for a model can't be served; again whenever that is another reason."""

    model: str
    reason: str


class ProblemReportedEvent(DaemonEvent, frozen=True, kw_only=True, tag="trouble"):
    """Something a person may have to see to; the daemon goes on."""

    text: str


class DaemonEndedEvent(DaemonEvent, frozen=True, kw_only=True, tag="ended"):
    """The daemon can't go on. ``code`` is the exit code."""

    code: int
    text: str


AnyDaemonEvent = (
    ModelFoundEvent
    | DaemonStartedEvent
    | InvitationCreatedEvent
    | PairingsChangedEvent
    | StageStatusChangedEvent
    | TransfersChangedEvent
    | ModelReadinessChangedEvent
    | ModelUnavailableEvent
    | ProblemReportedEvent
    | DaemonEndedEvent
)
Announce = Callable[[AnyDaemonEvent], None]


def read_event(stream: BinaryIO) -> object | None:
    """The next event of a daemon; lines that are none are passed over."""
    for line in iter(lambda: stream.readline(65536), b""):
        with contextlib.suppress(msgspec.MsgspecError):
            event: AnyDaemonEvent = msgspec.json.decode(line, type=AnyDaemonEvent)
            return event
    return None
