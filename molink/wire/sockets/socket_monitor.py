"""Monitors a socket's connections: libzmq's events, and bounds of unread data."""

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

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

#: Seconds between checks of received bytes at low and high traffic (at 1 Gbps that is 6 MB and 1
#: MB), and the bytes per check that count as high.
_QUIET_INTERVAL = 0.05
_BUSY_INTERVAL = 0.01
_BUSY = 256 << 10
#: Seconds before a failed thread restarts, so that it doesn't spin on a permanent fault.
_RESTART_PAUSE = 0.1
#: Changes reported before other callbacks run.
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
    """A connection event."""

    #: A server has accepted a TCP connection, and the handshake starts.
    ACCEPTED = "accepted"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    #: The other end's authenticator doesn't know this key.
    REFUSED = "refused"
    #: The handshake broke off: wrong server key, no molink there, or timeout.
    FAILED = "failed"
    #: Much unread data has arrived, so the socket should be read.
    WAITING = "waiting"
    #: A connection was cut because of too much unread data.
    OVERRUN = "overrun"


_CHANGES: dict[int, SocketChange] = {
    zmq.EVENT_ACCEPTED: SocketChange.ACCEPTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: SocketChange.CONNECTED,
    zmq.EVENT_DISCONNECTED: SocketChange.DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: SocketChange.REFUSED,
}


class SocketMonitor:
    """Reports a socket's connection events and bounds its unread data.

    The context's :class:`MonitorThread` reads events and checks connections, so that neither waits
    for a busy event loop. Close the monitor before the socket.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        backlog: UnreadBytes,
        on_change: Callable[[SocketChange], None],
        on_open: Callable[[int], None] | None = None,
    ) -> None:
        """``on_change`` is called on the caller's event loop.

        ``on_open`` gets the descriptor of each TCP connection that a client has opened, before the
        handshake, in the monitor's thread. The descriptor belongs to libzmq and may already be
        closed.
        """
        self._backlog = backlog
        self._on_change = on_change
        self._on_open = on_open
        self._loop = asyncio.get_running_loop()
        self._changes: deque[SocketChange] = deque()
        self._closed = False
        #: Connections that were cut but have not ended yet.
        self._ending: list[OpenConnection] = []
        #: Parties whose cut connections were logged.
        self._logged: set[str] = set()
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        # Unique, since libzmq may release an address only after its object is gone.
        address = f"inproc://molink.monitor.{secrets.token_hex(8)}"
        self._socket.monitor(address, _EVENTS)
        #: Socket on which libzmq reports events; only the thread reads it.
        self.events = self._pair(address)
        #: Set once the thread no longer uses this object.
        self.ended = threading.Event()
        self._interval, self._checked_at = _QUIET_INTERVAL, 0.0
        self._thread = MonitorThread.of_context(socket.context)
        self._thread.add_monitor(self)

    def close(self) -> None:
        """Stop watching and reporting."""
        self._closed = True
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._thread.remove_monitor(self)

    def _pair(self, address: str) -> "zmq.Socket[bytes]":
        events: zmq.Socket[bytes] = zmq.Context.shadow(self._socket.context).socket(zmq.PAIR)
        # With a bound, libzmq's I/O thread would wait here, and block all connections.
        events.set(zmq.RCVHWM, 0)
        events.linger = 0
        events.connect(address)
        return events

    # --- on the event loop -----------------------------------------------------------------------

    def _report_changes(self) -> None:
        for _ in range(_CHANGE_BATCH):
            if self._closed or not self._changes:
                return
            try:
                self._on_change(self._changes.popleft())
            except Exception:
                logger.exception("a change of a connection")
        self._loop.call_soon(self._report_changes)

    # --- the thread ------------------------------------------------------------------------------

    def read_events(self) -> bool:
        """Handle waiting events; ``False`` after the last one."""
        for _ in range(_CHANGE_BATCH):
            try:
                frames = self.events.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            number, value = _EVENT.unpack(frames[0])
            if number == zmq.EVENT_MONITOR_STOPPED:
                return False
            self._on_event(number, value)
        return True

    def end(self) -> None:
        """Release the thread's resources."""
        self.events.close()
        self.ended.set()

    def check_connections(self, now: float) -> float | None:
        """Check connections if due; return the seconds until the next check, if any."""
        watched = self._backlog.connections
        if not watched and not self._ending:
            return None
        if now - self._checked_at >= self._interval:
            self._checked_at = now
            self._interval = self._check_unread(watched)
        return max(0.0, self._checked_at + self._interval - now)

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
        """Check connections and cut those beyond bounds; returns seconds until the next check."""
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
                reason = "too much unread data or too many connections"
                logger.warning(
                    "cutting a connection of %s at %s: %s", excess.party, excess.remote[0], reason
                )
            self._report(SocketChange.OVERRUN)
        return _BUSY_INTERVAL if came > _BUSY else _QUIET_INTERVAL

    def _report(self, change: SocketChange) -> None:
        self._changes.append(change)
        if len(self._changes) == 1:
            # The loop may have ended without closing this object.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._report_changes)


class MonitorThread:
    """Serves all socket monitors of a ZeroMQ context; runs while there are any."""

    #: Threads by context; there is one context, since libzmq has one authenticator per context.
    _of_context: ClassVar["weakref.WeakKeyDictionary[zmq.Context[Any], MonitorThread]"] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added: list[SocketMonitor] = []
        self._count = 0
        self._thread: threading.Thread | None = None
        self._wake_socket: socket.socket | None = None

    @classmethod
    def of_context(cls, context: "zmq.Context[Any]") -> "MonitorThread":
        """Return the thread of a context."""
        return cls._of_context.setdefault(context, cls())

    def add_monitor(self, monitor: SocketMonitor) -> None:
        """Serve ``monitor`` until its socket's events end."""
        with self._lock:
            self._count += 1
            self._added.append(monitor)
            if self._wake_socket is not None:
                self._wake_socket.send(b"+")
                return
            self._wake_socket, heard = socket.socketpair()
            self._wake_socket.send(b"+")
            self._thread = threading.Thread(
                target=self._run, args=(heard,), name="molink-monitor", daemon=True
            )
            self._thread.start()

    def remove_monitor(self, monitor: SocketMonitor) -> None:
        """Wait until ``monitor`` is no longer used; the last one ends the thread."""
        monitor.ended.wait()
        with self._lock:
            self._count -= 1
            if self._count or self._thread is None or self._wake_socket is None:
                return
            thread, wake_socket = self._thread, self._wake_socket
            self._thread = self._wake_socket = None
        wake_socket.close()
        thread.join()

    def _run(self, heard: socket.socket) -> None:
        served: dict[zmq.Socket[bytes], SocketMonitor] = {}
        with heard:
            while not self._served_until_closed(heard, served):
                # If nobody read events, libzmq's I/O thread would block forever.
                time.sleep(_RESTART_PAUSE)

    def _served_until_closed(
        self, heard: socket.socket, served: "dict[zmq.Socket[bytes], SocketMonitor]"
    ) -> bool:
        """Serve until the last monitor is removed; ``False`` if an error ended it earlier."""
        try:
            self._serve(heard, served)
        except zmq.ContextTerminated:
            for monitor in (*served.values(), *self._pop_added()):
                monitor.end()
        except Exception:
            logger.exception("the socket monitors failed; restarting them")
            return False
        return True

    def _serve(
        self, heard: socket.socket, served: "dict[zmq.Socket[bytes], SocketMonitor]"
    ) -> None:
        poller = zmq.Poller()
        poller.register(heard, zmq.POLLIN)
        for events in served:
            poller.register(events, zmq.POLLIN)
        pause: float | None = None
        while True:
            for ready, _ in poller.poll(None if pause is None else math.ceil(pause * 1000)):
                monitor = served.get(ready)
                if monitor is None:
                    if not heard.recv(_CHANGE_BATCH):
                        return
                    for added in self._pop_added():
                        served[added.events] = added
                        poller.register(added.events, zmq.POLLIN)
                elif not monitor.read_events():
                    poller.unregister(ready)
                    served.pop(ready).end()
            now = time.monotonic()
            pauses = [monitor.check_connections(now) for monitor in served.values()]
            pause = min((one for one in pauses if one is not None), default=None)

    def _pop_added(self) -> list[SocketMonitor]:
        with self._lock:
            added, self._added = self._added, []
        return added
