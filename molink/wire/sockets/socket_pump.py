"""The messages of one socket, read and sent on the event loop without a future for each frame.

``zmq.asyncio`` makes a future for each frame and looks at the socket's events several times for it:
a fifth of what a worker's event loop did in a ring step of a small model.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from molink.wire.sockets.unread_bytes import UnreadBytes, wire_size

#: Messages read, or frames of one that is too long, before others on the event loop get their
#: turn: 16 messages of 256 KB take some ms, 256 empty frames less.
_MAX_READS = 16
_MAX_FRAMES = 256

# Plain numbers: the flags of zmq are enums of Python's, and slow.
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
_SEND_FLAGS = int(zmq.DONTWAIT)
_SEND_MORE_FLAGS = int(zmq.DONTWAIT | zmq.SNDMORE)


class SocketPump:
    """Hands over every message that comes, and sends what the socket can take.

    All happens on the event loop's thread. libzmq's descriptor says only once that something may
    have changed, and any use of the socket may be what notices it. So the socket's events are
    looked at until there are none, and again after each message that is sent.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        max_frames: int,
        take: Callable[[list[zmq.Frame], int], None],
        on_room: Callable[[], None],
        on_failed: Callable[[Exception], None],
        backlog: UnreadBytes | None = None,
    ) -> None:
        """``take`` is given the first ``max_frames`` of a message, and how many it had in all.

        Frames beyond these are freed one by one: a member can send a message of any number of
        parts. ``on_writable`` is called once something can be sent again that could not be.
        ``on_failed`` is told of an error of the socket or of ``take``; nothing is read any more.
        ``backlog`` is told what is read of each TCP connection. The socket is the caller's to
        close, and to connect; see :meth:`check_unread`.
        """
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        self._max_frames = max_frames
        self._on_frames = take
        self._on_writable = on_room
        self._on_failed = on_failed
        self._backlog = backlog
        #: What the socket is watched for.
        self._wanted = _POLLIN
        #: The message that is being read: frames, and how many there were so far.
        self._frames: list[zmq.Frame] = []
        self._parts = 0
        #: Its bytes on the wire so far.
        self._nbytes = 0
        #: A ROUTER puts the routing id before each message.
        self._routes = self._socket.get(zmq.TYPE) == zmq.ROUTER
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._run)
        #: Whether the events will be looked at anyway.
        self._checks = False
        #: When nothing was left to be read.
        self._emptied = self._loop.time()
        self._closed = False
        self._check_unread_soon()

    def close(self) -> None:
        """Leave the socket alone. To be called before it is closed."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)

    def send(self, parts: Sequence[Any]) -> bool:
        """Send a message at once; ``False`` if the socket can't take it now.

        Raises:
            zmq.ZMQError: anything but a full or unconnected socket.
        """
        try:
            for part in parts[:-1]:
                self._socket.send(part, _SEND_MORE_FLAGS)
            self._socket.send(parts[-1], _SEND_FLAGS)
        except zmq.Again:
            self._wanted |= _POLLOUT
            return False
        finally:
            if not self._checks and self._events():
                self._check_unread_soon()
        return True

    @property
    def unread_since(self) -> float | None:
        """When nothing was left to be read, on the loop's clock; ``None``: so it is now."""
        if not self._checks:
            if not self._events() & _POLLIN:
                return None
            self._check_unread_soon()
        return self._emptied

    def _events(self) -> int:
        return int(self._socket.get(zmq.EVENTS)) & self._wanted

    def check_unread(self) -> None:
        """The socket was used otherwise (connected, say): that may have noticed what came."""
        if not self._checks:
            self._check_unread_soon()

    def _check_unread_soon(self) -> None:
        self._checks = True
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        """Do what can be done now."""
        self._checks = True
        try:
            for _ in range(_MAX_READS):
                if self._closed:  # perhaps by what was just handed over
                    return
                events = self._events()
                if not events:
                    self._checks = False
                    self._emptied = self._loop.time()
                    if self._backlog is not None:
                        self._backlog.on_drained()
                    return
                if events & _POLLOUT:
                    self._wanted = _POLLIN
                    self._on_writable()
                if events & _POLLIN:
                    self._read()
        except Exception as error:
            self.close()
            self._on_failed(error)
        else:
            self._check_unread_soon()

    def _read(self) -> None:
        """The next message, or a part of one that has very many frames: all of them are there."""
        for _ in range(_MAX_FRAMES):
            frame = self._socket.recv(_SEND_FLAGS, copy=False)
            self._parts += 1
            if self._parts <= self._max_frames:
                self._frames.append(frame)
            if self._parts > 1 or not self._routes:
                self._nbytes += wire_size(len(frame))
            if not frame.more:
                frames, parts, nbytes = self._frames, self._parts, self._nbytes
                self._frames, self._parts, self._nbytes = [], 0, 0
                if self._backlog is not None:
                    self._count(self._backlog, frames[0], frame, nbytes)
                self._on_frames(frames, parts)
                return

    def _count(self, backlog: UnreadBytes, first: zmq.Frame, last: zmq.Frame, nbytes: int) -> None:
        """A whole message was read."""
        try:
            descriptor = int(last.get("__fd"))
            # Only who listens asks others who they are.
            user = str(last.get("User-Id")) if self._routes else ""
        except zmq.ZMQError:
            return  # a transport within this process
        identity = first.bytes if self._routes else b""
        backlog.on_delivered(descriptor, nbytes, identity, user)
