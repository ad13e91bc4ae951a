"""The server socket: one ROUTER with one reader, and access control of its messages."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio

from molink.errors import MolinkError, PortInUse, RequestError, UsageError, WireError
from molink.wire.messages.codec import MAX_FRAMES, Buffer, Codec
from molink.wire.messages.control_plane import ErrorReply
from molink.wire.sockets.create_socket import bind_socket, create_server
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.message_queues import Inbox, Outbox
from molink.wire.sockets.misbehaviour import MisbehaviourScore
from molink.wire.sockets.socket_monitor import SocketChange, SocketMonitor
from molink.wire.sockets.socket_pump import SocketPump
from molink.wire.sockets.unread_bytes import UnreadBytes
from molink.wire.sockets.zap import ZapAuthenticator

logger = logging.getLogger(__name__)

M = TypeVar("M")

#: Seconds between retries on a full connection, which at 100 Mbps sends 64 KB meanwhile.
_FLUSH_INTERVAL = 0.005
#: Seconds to wait for pending replies before all connections are closed to drop one peer.
_CLOSE_DELAY = 0.05
#: First and maximum seconds until a just released port is bound again.
_REBIND_FIRST, _REBIND_MAX = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class MessageSender:
    """The origin of a message: the connection to answer on, and the authenticated peer."""

    identity: bytes
    peer_id: str


#: Handles a message. A plain function runs at once; a coroutine runs in the peer's inbox, one at a
#: time, concurrently with other peers. Its errors are returned as :class:`ErrorReply` if the
#: message has a ``ref``.
Handler = Callable[[MessageSender, M, memoryview | None], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of a peer's inbox and a connection's outbox."""

    inbox_messages: int = 256
    inbox_bytes: int = 8 << 20
    outbox_messages: int = 4096
    outbox_bytes: int = 8 << 20


@dataclass(slots=True)
class ServerCounters:
    """Counters of a server."""

    received: int = 0
    sent: int = 0
    #: Invalid messages: wrong number of frames, too long, undecodable.
    malformed: int = 0
    #: Messages from peers that are not allowed (any more), or may not send this message.
    forbidden: int = 0
    #: Messages dropped because the sender's inbox was full.
    overflowed: int = 0
    #: Messages to closed connections.
    unroutable: int = 0
    #: Messages dropped because the receiver's outbox was full.
    congested: int = 0
    #: Internal errors of the handler.
    failures: int = 0
    #: Accepted TCP connections, and those with a successful handshake.
    accepted: int = 0
    admitted: int = 0
    #: Peers blocked for misbehaviour.
    blocked: int = 0
    #: Connections cut because of too much unread data.
    overrun: int = 0
    rebuilds: int = 0

    @property
    def unauthenticated(self) -> int:
        """Connections that were refused, broke off, or are still in their handshake."""
        return max(0, self.accepted - self.admitted)


class Server(Generic[M]):
    """Receives messages of allowed peers and replies on their connections."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        codec: Codec[M],
        authenticator: ZapAuthenticator,
        handler: Handler[M],
        *,
        permits: Callable[[str, M], bool] | None = None,
        on_blocked: Callable[[str, str], None] | None = None,
        on_disconnect: Callable[[], None] | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        """``permits(peer_id, message)`` restricts what peers may send.

        ``on_blocked(peer_id, reason)`` is called when a peer is blocked for misbehaviour,
        ``on_disconnect()`` is called when any connection has ended; libzmq doesn't report which.
        """
        self._context = context
        self._keys = keys
        self._codec = codec
        self._authenticator = authenticator
        self._handler = handler
        self._asynchronous = inspect.iscoroutinefunction(handler)
        self._permits = permits
        self._on_blocked = on_blocked
        self._on_disconnect = on_disconnect
        self._limits = limits or ServerLimits()
        self.counters = ServerCounters()
        self._misbehaviour = MisbehaviourScore()
        self._inboxes: dict[str, Inbox] = {}
        self._outboxes: dict[bytes, Outbox] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._pump: SocketPump | None = None
        self._monitor: SocketMonitor | None = None
        self._rebuilding: asyncio.Task[None] | None = None
        self._flushing: asyncio.TimerHandle | None = None
        self._host = ""
        self.port = 0
        self._closed = False

    # --- lifecycle -------------------------------------------------------------------------------

    def bind(self, host: str, ports: tuple[int, int], option: str = "--port") -> int:
        """Listen on the first free port of ``ports`` (half-open) and start to read.

        Raises:
            PortInUse: none is free; names ``option``.
            UsageError: ``host`` is not an address of this PC.
            zmq.ZMQError: for example, the process has no descriptor left.
        """
        socket = create_server(self._context, self._keys, ipv6=":" in host)
        monitor: SocketMonitor | None = None
        try:
            backlog = UnreadBytes()
            monitor = SocketMonitor(socket, backlog, self._on_change)
            self.port = bind_socket(socket, host, ports, option)
        except (MolinkError, zmq.ZMQError):
            if monitor is not None:
                monitor.close()
            socket.close()
            raise
        self._host = host
        self._socket, self._monitor = socket, monitor
        self._pump = SocketPump(
            socket, MAX_FRAMES + 1, self._on_frames, _nothing, self._failed_to_read, backlog
        )
        return self.port

    async def close(self) -> None:
        """Stop listening and drop waiting messages."""
        self._closed = True
        if self._rebuilding is not None:
            self._rebuilding.cancel()
            await asyncio.gather(self._rebuilding, return_exceptions=True)
        await self._unbind()
        inboxes, self._inboxes = self._inboxes, {}
        await asyncio.gather(*(inbox.close() for inbox in inboxes.values()))

    def drop_peer(self, peer_id: str) -> None:
        """Revoke a peer: ignore its messages and cut its connections.

        libzmq consults ZAP only during handshakes, so the socket is recreated on the same port
        after earlier replies have been sent. Other peers reconnect within a fraction of a second.
        """
        self._authenticator.deny_peer(peer_id)
        self._rebuild_soon()

    @property
    def is_behind(self) -> float:
        """Seconds for which received data has not been fully read; 0 if it has."""
        since = None if self._pump is None else self._pump.unread_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    # --- sending ---------------------------------------------------------------------------------

    def send(self, identity: bytes, message: M, payload: Buffer | None = None) -> bool:
        """Send on the connection ``identity``; never blocks.

        Returns:
            ``False`` if the connection is gone or full.

        Raises:
            WireError: the message exceeds its bounds.
        """
        parts: list[object] = [identity, *self._codec.encode(message, payload)]
        waiting = self._outboxes.get(identity)
        if waiting is None:
            sent = self._try_send(parts)
            if sent is not None:
                return sent
            waiting = self._outboxes[identity] = Outbox(
                self._limits.outbox_messages, self._limits.outbox_bytes
            )
        if not waiting.add_message(parts, 0 if payload is None else memoryview(payload).nbytes):
            self.counters.congested += 1
            return False
        self._flush_soon()
        return True

    def _try_send(self, parts: list[object]) -> bool | None:
        """Send now; return whether it succeeded, or ``None`` if the connection is full."""
        try:
            if self._pump is not None:
                if not self._pump.send_parts(parts):
                    return None
                self.counters.sent += 1
                return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                logger.warning("can't send: %s", error)
        self.counters.unroutable += 1
        return False

    def _flush_soon(self) -> None:
        if self._flushing is None and self._outboxes:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(_FLUSH_INTERVAL, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        for identity, waiting in list(self._outboxes.items()):
            while waiting:
                sent = self._try_send(waiting.peek_message())
                if sent is None:
                    break
                if sent:
                    waiting.pop_message()
                else:
                    waiting.drop_messages()
            if not waiting:
                del self._outboxes[identity]
        self._flush_soon()

    # --- receiving -------------------------------------------------------------------------------

    def _on_frames(self, frames: list[zmq.Frame], parts: int) -> None:
        peer_id = _peer_id_of(frames[-1])
        if not self._authenticator.is_allowed(peer_id):
            self.counters.forbidden += 1
            return
        identity = frames[0].bytes
        try:
            # An identity chosen by a peer could replace another peer's.
            if not identity.startswith(b"\0") or parts > MAX_FRAMES + 1:
                raise WireError(f"a message of {parts} parts from {identity!r}")
            message, payload = self._codec.decode([frame.buffer for frame in frames[1:]])
        except WireError as error:
            self.counters.malformed += 1
            self.report_misbehaviour(peer_id, str(error))
            return
        if self._permits is not None and not self._permits(peer_id, message):
            self.counters.forbidden += 1
            self.report_misbehaviour(peer_id, f"may not send {type(message).__name__}")
            return
        self.counters.received += 1
        self._dispatch_message(MessageSender(identity, peer_id), message, payload)

    def _dispatch_message(
        self, sender: MessageSender, message: M, payload: memoryview | None
    ) -> None:
        if not self._asynchronous:
            self._handle_now(sender, message, payload)
            return
        inbox = self._inboxes.get(sender.peer_id)
        if inbox is None:
            inbox = Inbox(self._limits.inbox_messages, self._limits.inbox_bytes)
            self._inboxes[sender.peer_id] = inbox
        size = 0 if payload is None else payload.nbytes
        if not inbox.add_work(partial(self._handle, sender, message, payload), size):
            self.counters.overflowed += 1

    def _handle_now(self, sender: MessageSender, message: M, payload: memoryview | None) -> None:
        try:
            self._handler(sender, message, payload)
        except Exception as error:
            self._on_handler_error(sender, message, error)

    async def _handle(self, sender: MessageSender, message: M, payload: memoryview | None) -> None:
        if not self._authenticator.is_allowed(sender.peer_id):
            self.counters.forbidden += 1
            return
        try:
            rest = self._handler(sender, message, payload)
            if rest is not None:
                await rest
        except Exception as error:
            self._on_handler_error(sender, message, error)

    def _on_handler_error(self, sender: MessageSender, message: M, error: Exception) -> None:
        """Reply with an :class:`ErrorReply`; log internal errors."""
        name, text = type(error).__name__, str(error)
        if not isinstance(error, MolinkError):
            self.counters.failures += 1
            logger.exception("handling a %s of %s", type(message).__name__, sender.peer_id)
            name, text = MolinkError.__name__, f"internal error: {name}"
        ref = getattr(message, "ref", None)
        if ref is not None:
            param = error.param if isinstance(error, RequestError) else None
            failure: Any = ErrorReply(ref=ref, code=name, message=text[:1024], param=param)
            self.send(sender.identity, failure)

    # --- misbehaviour and revocation -------------------------------------------------------------

    def report_misbehaviour(self, peer_id: str, reason: str) -> None:
        """Count a violation of ``peer_id``, and block it at the limit."""
        if not self._misbehaviour.add_violation(peer_id, asyncio.get_running_loop().time()):
            return
        self._authenticator.block_peer(peer_id)
        self.counters.blocked += 1
        logger.warning("blocking %s: %s", peer_id, reason)
        self._rebuild_soon()
        if self._on_blocked is not None:
            self._on_blocked(peer_id, reason)

    def _on_change(self, change: SocketChange) -> None:
        self.counters.accepted += change is SocketChange.ACCEPTED
        self.counters.admitted += change is SocketChange.CONNECTED
        self.counters.overrun += change is SocketChange.OVERRUN
        if change in (SocketChange.DISCONNECTED, SocketChange.WAITING) and self._pump is not None:
            self._pump.check_unread()
        if change is SocketChange.DISCONNECTED and self._on_disconnect is not None:
            self._on_disconnect()

    def _failed_to_read(self, error: Exception) -> None:
        logger.error("the reader of port %d failed", self.port, exc_info=error)
        self._rebuild_soon()

    def _rebuild_soon(self) -> None:
        if self._closed or self.port == 0 or self._rebuilding is not None:
            return
        self._rebuilding = asyncio.get_running_loop().create_task(self._rebuild())

    async def _rebuild(self) -> None:
        pause, logged = _REBIND_FIRST, False
        try:
            await asyncio.sleep(_CLOSE_DELAY)
            await self._unbind()
            while self._socket is None:
                try:
                    self.bind(self._host, (self.port, self.port + 1))
                except (UsageError, zmq.ZMQError) as error:
                    # libzmq releases the port with a delay. Other errors (no descriptor, address
                    # gone) may also be temporary, and the server can't work without a socket.
                    if not logged and (pause == _REBIND_MAX or not isinstance(error, PortInUse)):
                        logger.warning("can't listen on port %d again yet: %s", self.port, error)
                        logged = True
                    await asyncio.sleep(pause)
                    pause = min(_REBIND_MAX, 2 * pause)
            self.counters.rebuilds += 1
        finally:
            self._rebuilding = None

    async def _unbind(self) -> None:
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self._outboxes.clear()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


def _nothing() -> None:
    pass


def _peer_id_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
