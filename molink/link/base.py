"""The environment of a link's two ends: timers, connections, and the link's name.

The ends (:mod:`molink.link.out_link`, :mod:`molink.link.in_link`) do no I/O. A worker passes its
event loop and ZeroMQ sockets, the simulator its event queue and simulated connections.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.data_plane import Channel, LinkHello


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> object:
        """Prevent the callback."""


class Timers(Protocol):
    """A clock with callbacks, such as an asyncio event loop."""

    def time(self) -> float:
        """Seconds of a monotonic clock."""
        ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Call at ``when`` seconds of the clock."""
        ...

    def call_soon(self, callback: Callable[[], object], /) -> Timer:
        """Call after other ready callbacks."""
        ...


class OutConnection(Protocol):
    """A connection to the next stage, such as :class:`molink.wire.sockets.client.Client`."""

    @property
    def is_congested(self) -> bool:
        """Whether messages wait for the socket."""

    def start(self) -> None:
        """Start to connect."""

    def send(self, message: DataMessage, payload: Buffer | None = None) -> None:
        """Send; raises :class:`molink.errors.MolinkError` if disconnected or full."""

    def reconnect_now(self) -> None:
        """Replace the connection by a new one."""


@dataclass(frozen=True, slots=True)
class OutConnectionEvents:
    """Callbacks from a connection to its link."""

    on_message: Callable[[DataMessage, memoryview | None], None]
    on_connect: Callable[[], None]
    on_disconnect: Callable[[], None]
    #: The connection is no longer congested.
    on_drained: Callable[[], None]
    #: The next stage's process has ended: its port refuses connections. Called with the reason.
    on_lost: Callable[[str], None]


#: Creates the connection of a channel.
Connect = Callable[[Channel, OutConnectionEvents], OutConnection]


class InConnection(Protocol):
    """The origin of a message, such as :class:`molink.wire.sockets.server.MessageSender`."""

    @property
    def identity(self) -> bytes:
        """Routing id of the connection; :mod:`molink.wire.protocol` tells which of two is newer."""

    @property
    def peer_id(self) -> str:
        """The authenticated peer."""


class LinkServer(Protocol):
    """The part of :class:`molink.wire.sockets.server.Server` that a link needs."""

    def send(self, identity: bytes, message: DataMessage, payload: Buffer | None = None) -> bool:
        """Send an answer on a connection."""

    def report_misbehaviour(self, peer_id: str, reason: str) -> None:
        """Add to the peer's misbehaviour score."""


@dataclass(frozen=True, slots=True)
class LinkName:
    """Identifies the link from stage ``from_stage`` of a pipeline to the next one."""

    pipeline: str
    from_stage: int

    def make_hello(self, epoch: int, channel: Channel) -> LinkHello:
        """Create the first message on a connection."""
        return LinkHello(self.pipeline, epoch, self.from_stage, channel)
