"""What libzmq tells about the connections of a socket."""

import struct
from collections.abc import AsyncIterator, Callable
from enum import Enum

import zmq
import zmq.asyncio

_EVENT = struct.Struct("=HI")

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | _HANDSHAKE_FAILED
)


class Change(Enum):
    """An event of a connection."""

    #: TCP only: a server has accepted a connection and the handshake begins.
    ACCEPTED = "accepted"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    #: The other side's gatekeeper doesn't know our key.
    REFUSED = "refused"
    #: The handshake broke off: wrong server key, no molink there, or too slow.
    FAILED = "failed"


_CHANGES = {
    zmq.EVENT_ACCEPTED: Change.ACCEPTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Change.CONNECTED,
    zmq.EVENT_DISCONNECTED: Change.DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Change.REFUSED,
}


class Monitor:
    """The connection events of one socket. Close it before the socket."""

    def __init__(
        self, socket: zmq.asyncio.Socket, on_open: Callable[[int], None] | None = None
    ) -> None:
        """``on_open`` is told the descriptor of each TCP connection that a client has opened.

        The handshake comes after that. The descriptor is libzmq's: it may be gone already.
        """
        self._socket = socket
        self._on_open = on_open
        self._events = socket.get_monitor_socket(_EVENTS)

    async def changes(self) -> AsyncIterator[Change]:
        """Every change, for as long as the socket lives."""
        while True:
            frames = await self._events.recv_multipart()
            number, value = _EVENT.unpack(frames[0])
            if number == zmq.EVENT_CONNECTED:
                if self._on_open is not None:
                    self._on_open(value)
                continue
            yield _CHANGES.get(number, Change.FAILED)

    def close(self) -> None:
        """Stop watching."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._events.close(linger=0)
