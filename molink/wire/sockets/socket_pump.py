"""Reads and sends a socket's messages on the event loop without a future per frame.

``zmq.asyncio`` creates a future for each frame and polls the socket's events several times, which
took a fifth of a worker's event loop time in ring steps of a small model.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from molink.wire.sockets.unread_bytes import UnreadBytes, wire_size

#: Messages (or surplus frames) read before other callbacks run: 16 messages of 256 KB take some ms,
#: 256 empty frames less.
_MAX_READS = 16
_MAX_FRAMES = 256

# Plain numbers, since zmq's enum flags are slow.
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
_SEND_FLAGS = int(zmq.DONTWAIT)
_SEND_MORE_FLAGS = int(zmq.DONTWAIT | zmq.SNDMORE)


class SocketPump:
    """Delivers received messages and sends what the socket can take, on the event loop's thread.

    libzmq's descriptor signals only once that something may have changed, and any use of the socket
    may consume the signal. Therefore events are polled until there are none, and again after each
    sent message.
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
        """``take`` gets the first ``max_frames`` frames of a message and their total number.

        Surplus frames are freed one by one, since a peer can send any number. ``on_room`` is called
        once sending is possible again, ``on_failed`` with an error of the socket or of ``take``,
        which stops reading. ``backlog`` counts what is read per TCP connection. The caller connects
        and closes the socket; see :meth:`check_unread`.
        """
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        self._max_frames = max_frames
        self._on_frames = take
        self._on_writable = on_room
        self._on_failed = on_failed
        self._backlog = backlog
        #: Events for which the socket is watched.
        self._wanted = _POLLIN
        #: The message being read: its kept frames, and its number of frames so far.
        self._frames: list[zmq.Frame] = []
        self._parts = 0
        #: Its bytes on the wire so far.
        self._nbytes = 0
        #: A ROUTER puts a routing id before each message.
        self._routes = self._socket.get(zmq.TYPE) == zmq.ROUTER
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._run)
        #: Whether a poll of the events is scheduled.
        self._checks = False
        #: Last time when nothing was left to read.
        self._emptied = self._loop.time()
        self._closed = False
        self._check_unread_soon()

    def close(self) -> None:
        """Stop using the socket. Call it before closing the socket."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)

    def send_parts(self, parts: Sequence[Any]) -> bool:
        """Send a message now; ``False`` if the socket can't take it.

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
        """When nothing was left to read, on the loop's clock; ``None`` if nothing is left now."""
        if not self._checks:
            if not self._events() & _POLLIN:
                return None
            self._check_unread_soon()
        return self._emptied

    def _events(self) -> int:
        return int(self._socket.get(zmq.EVENTS)) & self._wanted

    def check_unread(self) -> None:
        """Poll after another use of the socket, which may have consumed the signal."""
        if not self._checks:
            self._check_unread_soon()

    def _check_unread_soon(self) -> None:
        self._checks = True
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._checks = True
        try:
            for _ in range(_MAX_READS):
                if self._closed:  # the callback may have closed it
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
        """Read the next message, or some frames of one with very many."""
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
        """Count a whole message."""
        try:
            descriptor = int(last.get("__fd"))
            # Only a listening socket knows the other end's authenticated id.
            user = str(last.get("User-Id")) if self._routes else ""
        except zmq.ZMQError:
            return  # a transport within this process
        identity = first.bytes if self._routes else b""
        backlog.on_delivered(descriptor, nbytes, identity, user)
