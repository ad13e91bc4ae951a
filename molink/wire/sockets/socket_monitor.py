"""What libzmq tells about the connections of a socket, and the watch over them."""

import asyncio
import contextlib
import logging
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

import zmq
import zmq.asyncio

from molink.wire.sockets.tcp_info import (
    bytes_received,
    bytes_unread,
    cut_connection,
    remote_address,
)
from molink.wire.sockets.unread_bytes import SUSPECT_BYTES, OpenConnection, UnreadBytes

logger = logging.getLogger(__name__)

#: Seconds between two looks at how much each connection has sent while little comes, and while much
#: does: at 1 Gbps that is 6 MB and 1 MB. Much is so many bytes from one look to the next.
_QUIET_INTERVAL = 0.05
_BUSY_INTERVAL = 0.01
_BUSY = 256 << 10
#: Seconds before a thread that failed goes on, so that a lasting fault keeps no core busy.
_RESTART_PAUSE = 0.1
#: Changes that are told before others on the event loop get their turn.
_CHANGE_BATCH = 64

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
    | zmq.EVENT_MONITOR_STOPPED
    | _HANDSHAKE_FAILED
)


class SocketChange(Enum):
    """An event of a connection."""

    #: TCP only: a server has accepted a connection and the handshake begins.
    ACCEPTED = "accepted"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    #: The other side's gatekeeper doesn't know our key.
    REFUSED = "refused"
    #: The handshake broke off: wrong server key, no molink there, or too slow.
    FAILED = "failed"
    #: Much has come and wasn't read: the socket should be looked at.
    WAITING = "waiting"
    #: We have ended a connection that sent more than is read of it.
    OVERRUN = "overrun"


_CHANGES: dict[int, SocketChange] = {
    zmq.EVENT_ACCEPTED: SocketChange.ACCEPTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: SocketChange.CONNECTED,
    zmq.EVENT_DISCONNECTED: SocketChange.DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: SocketChange.REFUSED,
}


class SocketMonitor:
    """The connection events of one socket, and the bounds of what its connections send.

    A thread of its own reads the events and looks at the connections, so that neither waits for a
    busy event loop. Close it before the socket.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        backlog: UnreadBytes,
        on_change: Callable[[SocketChange], None],
        on_open: Callable[[int], None] | None = None,
    ) -> None:
        """``on_change`` is called on the event loop of the caller.

        ``on_open`` is told the descriptor of each TCP connection that a client has opened, in the
        monitor's thread. The handshake comes after that. The descriptor is libzmq's: it may be gone
        already.
        """
        self._backlog = backlog
        self._on_change = on_change
        self._on_open = on_open
        self._loop = asyncio.get_running_loop()
        self._changes: deque[SocketChange] = deque()
        self._closed = False
        #: Connections that were cut, until they have ended.
        self._ending: list[OpenConnection] = []
        #: Parties whose connections were cut, as they were logged.
        self._logged: set[str] = set()
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        # Never twice: libzmq may let go of an address after the object that had it is gone.
        address = f"inproc://molink.monitor.{secrets.token_hex(8)}"
        self._socket.monitor(address, _EVENTS)
        self._events = self._pair(address)
        self._thread = threading.Thread(target=self._run, name="molink-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; nothing more is told."""
        self._closed = True
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._thread.join()

    def _pair(self, address: str) -> "zmq.Socket[bytes]":
        events: zmq.Socket[bytes] = zmq.Context.shadow(self._socket.context).socket(zmq.PAIR)
        # With a bound libzmq's I/O thread would wait here for us, and all connections with it.
        events.set(zmq.RCVHWM, 0)
        events.linger = 0
        events.connect(address)
        return events

    # --- on the event loop -------------------------------------------------------------------

    def _report_changes(self) -> None:
        for _ in range(_CHANGE_BATCH):
            if self._closed or not self._changes:
                return
            try:
                self._on_change(self._changes.popleft())
            except Exception:
                logger.exception("a change of a connection")
        self._loop.call_soon(self._report_changes)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        with self._events:
            while not self._watched_out():
                # Nobody to read the events, and libzmq's I/O thread would wait for ever.
                time.sleep(_RESTART_PAUSE)

    def _watched_out(self) -> bool:
        """Watch until the end; ``False`` if that failed before."""
        try:
            self._watch()
        except zmq.ContextTerminated:
            pass
        except Exception:
            logger.exception("the monitor of a socket failed; starting it again")
            return False
        return True

    def _watch(self) -> None:
        looked_at, interval, timeout = time.monotonic(), _QUIET_INTERVAL, 0
        while True:
            watched = self._backlog.connections
            wanted = int(interval * 1000) if watched or self._ending else -1
            if wanted != timeout:
                timeout = wanted
                self._events.set(zmq.RCVTIMEO, timeout)
            with contextlib.suppress(zmq.Again):
                frames = self._events.recv_multipart()
                number, value = _EVENT.unpack(frames[0])
                if number == zmq.EVENT_MONITOR_STOPPED:
                    return
                self._on_event(number, value)
            if time.monotonic() - looked_at >= interval:
                interval = self._check_unread(watched)
                looked_at = time.monotonic()

    def _on_event(self, number: int, value: int) -> None:
        if number in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
            other_end = remote_address(value)
            if other_end is not None:
                self._backlog.on_opened(value, other_end)
        elif number == zmq.EVENT_DISCONNECTED:
            self._backlog.on_closed(value)
        if number != zmq.EVENT_CONNECTED:
            self._report(_CHANGES.get(number, SocketChange.FAILED))
        elif self._on_open is not None:
            self._on_open(value)

    def _check_unread(self, watched: list[OpenConnection]) -> float:
        """Look at the connections, and cut what has to be; when to look again, in seconds."""
        counts, came = [], 0
        for connection in watched:
            count = bytes_received(connection.descriptor)
            if count is None:
                continue
            if count - connection.delivered > SUSPECT_BYTES:
                count -= bytes_unread(connection.descriptor)
            counts.append((connection, count))
            came += count - connection.received
        if self._backlog.on_counted(counts):
            self._report(SocketChange.WAITING)
        self._ending = [
            each for each in self._ending if cut_connection(each.descriptor, each.remote)
        ]
        while (excess := self._backlog.find_excess()) is not None:
            if not cut_connection(excess.descriptor, excess.remote):
                self._backlog.on_closed(excess.descriptor)
                continue
            self._ending.append(excess)
            if excess.party not in self._logged:
                self._logged.add(excess.party)
                reason = "it sends more than is read of it, or connects too often"
                logger.warning(
                    "%s at %s loses a connection: %s", excess.party, excess.remote[0], reason
                )
            self._report(SocketChange.OVERRUN)
        return _BUSY_INTERVAL if came > _BUSY else _QUIET_INTERVAL

    def _report(self, change: SocketChange) -> None:
        self._changes.append(change)
        if len(self._changes) == 1:
            # The loop may have ended without closing us.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._report_changes)
