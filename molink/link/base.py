"""What the two ends of a link are given: timers, channels, and whose link it is.

The ends (:mod:`molink.link.out_link`, :mod:`molink.link.in_link`) do no I/O. A worker gives them
its event loop and ZeroMQ sockets, the simulator its agenda and simulated channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from molink.wire.messages.codec import Buffer, DataMessage
from molink.wire.messages.data_plane import Channel, LinkHello


class Timer(Protocol):
    """A callback that is to come."""

    def cancel(self) -> object:
        """Don't call it."""


class Timers(Protocol):
    """A clock that calls back; an asyncio event loop is one."""

    def time(self) -> float:
        """Seconds of a monotonic clock."""
        ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Call at ``when`` seconds of that clock."""
        ...

    def call_soon(self, callback: Callable[[], object], /) -> Timer:
        """Call once others have had their turn, at once otherwise."""
        ...


class OutConnection(Protocol):
    """A connection to the next stage; :class:`molink.wire.sockets.client.Client` is one."""

    @property
    def is_congested(self) -> bool:
        """Whether messages wait for the socket."""

    def start(self) -> None:
        """Begin to connect."""

    def send(self, message: DataMessage, payload: Buffer | None = None) -> None:
        """Send; raises :class:`molink.errors.MolinkError` if that can't be."""

    def reconnect_now(self) -> None:
        """Give up the connection for a new one."""


@dataclass(frozen=True, slots=True)
class OutConnectionEvents:
    """What a channel calls its link with."""

    on_message: Callable[[DataMessage, memoryview | None], None]
    on_connect: Callable[[], None]
    on_disconnect: Callable[[], None]
    #: A channel that was ``congested`` no longer is.
    on_drained: Callable[[], None]
    #: Nobody listens any more where the next stage did: its process has ended. Told with why.
    on_lost: Callable[[str], None]


#: Makes the connection of a channel.
Connect = Callable[[Channel, OutConnectionEvents], OutConnection]


class InConnection(Protocol):
    """Where a message came from; :class:`molink.wire.sockets.server.MessageSender` is one."""

    @property
    def identity(self) -> bytes:
        """The connection to answer on; :mod:`molink.wire.protocol` says which of two is later."""

    @property
    def peer_id(self) -> str:
        """The peer that it is authorised as."""


class LinkServer(Protocol):
    """The part of :class:`molink.wire.sockets.server.Server` that a link needs."""

    def send(self, identity: bytes, message: DataMessage, payload: Buffer | None = None) -> bool:
        """Answer on a connection."""

    def report_misbehaviour(self, peer_id: str, reason: str) -> None:
        """Count a misdeed."""


@dataclass(frozen=True, slots=True)
class LinkName:
    """Which link it is: that of stage ``from_stage`` of a pipeline to the next one."""

    pipeline: str
    from_stage: int

    def make_hello(self, epoch: int, channel: Channel) -> LinkHello:
        """What its connections begin with."""
        return LinkHello(self.pipeline, epoch, self.from_stage, channel)
