"""The options that a daemon is started with, and the events that it emits."""

import contextlib
import sys
from collections.abc import Callable
from typing import Annotated, BinaryIO, Literal

import msgspec

from molink.wire.messages.instructions import PendingPairing
from molink.wire.messages.peer_reports import TransferState
from molinkd.peer.settings import Settings

#: Runs a daemon: :class:`Launch` on standard input, events on standard output.
DAEMON_COMMAND = (sys.executable, "-P", "-m", "molinkd.peer")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a daemon: ``up`` may also lead the swarm, ``join`` enters an existing one."""

    #: The state folder.
    home: str
    settings: Settings
    role: Literal["up", "join"]
    #: Model name or folder. ``None`` means the last or the demo model for ``up``, and no model for
    #: ``join``.
    model: str | None = None
    #: How many PCs may join with the token that ``up`` announces; 0: none is created.
    invite: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: Token of ``join``; ``None`` returns to the stored swarm.
    token: str | None = None
    #: For an additional device: id of the PC's primary peer, which has the API.
    pc: str = ""


class DaemonEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """An event of a daemon, for the process that started it."""


class ModelFoundEvent(DaemonEvent, frozen=True, kw_only=True, tag="serving"):
    """``up`` has found the model to serve."""

    model: str
    path: str
    #: Whether the model would take more than text, of which molink can't compute the rest.
    is_text_only: bool = False
    #: Names of its adapters.
    adapters: tuple[str, ...] = ()


class DaemonStartedEvent(DaemonEvent, frozen=True, kw_only=True, tag="listening"):
    """The daemon runs and its API answers."""

    name: str
    swarm: str
    endpoint: str
    control_port: int
    pid: int


class SwarmOpenedEvent(DaemonEvent, frozen=True, kw_only=True, tag="opened"):
    """``up`` has asked the swarm to serve its model; other PCs can join."""

    #: Whether PCs on this network find the swarm and can pair with it by a code.
    discovery: bool = False
    #: A token for ``Launch.invite`` PCs.
    token: str = ""


class PairingsChangedEvent(DaemonEvent, frozen=True, kw_only=True, tag="pairings"):
    """All pending pairing requests, whenever they change."""

    pairings: tuple[PendingPairing, ...]


class StageStatusChangedEvent(DaemonEvent, frozen=True, kw_only=True, tag="stage"):
    """State of this peer's stages, in one line."""

    text: str


class TransfersChangedEvent(DaemonEvent, frozen=True, kw_only=True, tag="transfers"):
    """Transfers to this PC, twice a second, and none at the end."""

    transfers: tuple[TransferState, ...] = ()


class ModelReadinessChangedEvent(DaemonEvent, frozen=True, kw_only=True, tag="ready"):
    """Whether a model accepts requests."""

    model: str
    ready: bool


class ModelUnavailableEvent(DaemonEvent, frozen=True, kw_only=True, tag="not-served"):
    """Why a model accepts no requests, whenever the reason changes."""

    model: str
    reason: str


class ProblemReportedEvent(DaemonEvent, frozen=True, kw_only=True, tag="problem"):
    """A problem that may need a person's attention; the daemon keeps running."""

    text: str


class DaemonEndedEvent(DaemonEvent, frozen=True, kw_only=True, tag="ended"):
    """The daemon has failed with the exit code ``code``."""

    code: int
    text: str


AnyDaemonEvent = (
    ModelFoundEvent
    | DaemonStartedEvent
    | SwarmOpenedEvent
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
    """The next event of a daemon; other lines are skipped."""
    for line in iter(lambda: stream.readline(65536), b""):
        with contextlib.suppress(msgspec.MsgspecError):
            event: AnyDaemonEvent = msgspec.json.decode(line, type=AnyDaemonEvent)
            return event
    return None
