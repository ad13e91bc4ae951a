"""The client socket: one DEALER with one reader, and requests with replies."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from molink.errors import (
    ConnectionBroken,
    MolinkError,
    NotAuthorized,
    Overloaded,
    Unavailable,
    UsageError,
    WireError,
)
from molink.wire.messages.codec import MAX_FRAMES, Buffer, Codec
from molink.wire.messages.control_plane import ErrorReply
from molink.wire.sockets.create_socket import connect_socket, create_client
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.message_queues import Outbox
from molink.wire.sockets.misbehaviour import MisbehaviourScore
from molink.wire.sockets.socket_monitor import SocketChange, SocketMonitor
from molink.wire.sockets.socket_pump import SocketPump
from molink.wire.sockets.unread_bytes import UnreadBytes

#: Windows retries twice at 0.5 s intervals before it reports a refusal.
_ATTEMPT_S = 2.5
#: Seconds within which a server that recreates its socket listens again.
_LASTING_S = 0.3
_PAUSE_S = 0.1


async def is_refused(address: str) -> bool:
    """Return whether ``address`` (``tcp://host:port``) keeps refusing connections.

    A refusal reveals that a process has ended, which libzmq doesn't report. A network that is down
    or drops all packets causes no refusals. Takes 0.3 s on most systems and 2 s on Windows, or less
    if the port is open.
    """
    began = time.monotonic()
    while await _refused_once(address):
        if time.monotonic() - began >= _LASTING_S:
            return True
        await asyncio.sleep(_PAUSE_S)
    return False


async def _refused_once(address: str) -> bool:
    loop = asyncio.get_running_loop()
    try:
        target = urlsplit(address)
        if target.hostname is None or target.port is None:
            return False
        family = socket.AF_INET6 if ":" in target.hostname else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setblocking(False)
            async with asyncio.timeout(_ATTEMPT_S):
                await loop.sock_connect(tried, (target.hostname, target.port))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # ValueError: an address of nonsense that a peer has reported
        return False
    return False


logger = logging.getLogger(__name__)

M = TypeVar("M")

#: Seconds per address before the next is tried: the maximum duration of a handshake.
_ADDRESS_TIMEOUT = 3.0
#: Seconds before a single address is tried again; a handshake takes five round trips.
_ONLY_ADDRESS_TIMEOUT = 8.0
#: Seconds for libzmq to reconnect by itself, and for a server to learn a key that it refused.
_NUDGE_PAUSE = 1.0

Reply = tuple[M, memoryview | None]


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ClientEvents(Generic[M]):
    """Callbacks of a client; their errors are only logged."""

    #: Called with a message that is not a reply, and its payload.
    on_message: Callable[[M, memoryview | None], None] = _nothing
    #: Called when connected; messages sent from the callback go first.
    on_connect: Callable[[], None] = _nothing
    on_disconnect: Callable[[], None] = _nothing
    #: Called with the reason when the connection has broken and its address refuses new ones.
    on_lost: Callable[[str], None] | None = None
    #: Called with the reason when a handshake failed.
    on_refused: Callable[[str], None] = _nothing
    #: Called when the client is no longer congested.
    on_drained: Callable[[], None] = _nothing
    #: As in :class:`SocketMonitor`.
    on_open: Callable[[int], None] | None = None


class Client(Generic[M]):
    """A persistent connection to the server that holds ``server_key``.

    It reconnects automatically and tries ``addresses`` in turn. Messages never move to the next
    connection: pending ones are dropped when a connection breaks.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        codec: Codec[M],
        server_key: str,
        addresses: Sequence[str],
        *,
        name: str = "the server",
        events: ClientEvents[M] | None = None,
        max_messages: int = 4096,
        max_bytes: int = 8 << 20,
    ) -> None:
        """``name`` describes the server in errors.

        ``max_messages`` and ``max_bytes`` bound the queue for a slow server.
        """
        self._context, self._keys, self._codec = context, keys, codec
        self._server_key = server_key
        self._addresses = tuple(addresses)
        self._name = name
        self._events = events or ClientEvents()
        self.is_connected = False
        #: Why the last handshake failed; ``None`` after a success.
        self.failure: MolinkError | None = None
        self._address_index = 0
        self._ref = 0
        self._pending: dict[int, asyncio.Future[Reply[M] | MolinkError]] = {}
        self._outbox = Outbox(max_messages, max_bytes)
        self._misbehaviour = MisbehaviourScore()
        self._changed = asyncio.Event()
        self._nudge = asyncio.Event()
        self._is_stalled = False
        self._socket: zmq.asyncio.Socket | None = None
        self._pump: SocketPump | None = None
        self._monitor: SocketMonitor | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._refusal_check: asyncio.Task[None] | None = None

    # --- lifecycle -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to connect. Raises :class:`UsageError` without valid addresses."""
        if not self._addresses:
            raise UsageError(f"{self._name} has no address")
        self._socket = create_client(self._context, self._keys, self._server_key)
        backlog = UnreadBytes()
        self._monitor = SocketMonitor(self._socket, backlog, self._on_change, self._events.on_open)
        try:
            connect_socket(self._socket, self._address)
        except MolinkError:
            self._release()
            raise
        self._pump = SocketPump(
            self._socket, MAX_FRAMES, self._on_frames, self._flush, self._on_failed, backlog
        )
        self._dialing = asyncio.get_running_loop().create_task(
            self._redial(self._socket), name="molink-client-dial"
        )
        self._dialing.add_done_callback(self._task_ended)

    async def close(self) -> None:
        """Disconnect; pending requests fail."""
        tasks = [task for task in (self._dialing, self._refusal_check) if task is not None]
        self._dialing = None
        for task in tasks:
            task.cancel()
        # Done before the await, which may be cancelled.
        self._drop(f"the connection to {self._name} was closed")
        self._release()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.error("%s failed", task.get_name(), exc_info=task.exception())

    def reconnect_now(self) -> None:
        """Replace the connection or the current attempt, at the same address.

        TCP doubles its retry interval, so an old connection may stay silent for seconds after the
        network has recovered; a new one does not.
        """
        self._is_stalled = True
        self._nudge.set()

    def _on_failed(self, error: Exception) -> None:
        logger.error("reading the connection to %s failed", self._name, exc_info=error)

    async def wait_connected(self, timeout: float) -> None:
        """Wait for a connection.

        Raises:
            NotAuthorized: the server doesn't know this key.
            Unavailable: no connection within ``timeout`` seconds.
        """
        self.failure = None
        try:
            async with asyncio.timeout(timeout):
                while not self.is_connected:
                    if isinstance(self.failure, NotAuthorized):
                        raise self.failure
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self.failure or Unavailable(
                f"{self._name} doesn't answer at {', '.join(self._addresses)}:"
                " is it running, and is the port open?"
            ) from None

    # --- sending ---------------------------------------------------------------------------------

    def send(self, message: M, payload: Buffer | None = None) -> None:
        """Send the message, or queue it until the socket is ready; never block.

        Raises:
            Unavailable: there is no connection.
            Overloaded: the queue is full.
            WireError: the message exceeds its bounds.
        """
        if not self.is_connected or self._pump is None:
            raise Unavailable(f"not connected to {self._name}")
        parts: list[object] = [*self._codec.encode(message, payload)]
        try:
            if not self._outbox and self._pump.send_parts(parts):
                return
        except zmq.ZMQError as error:
            raise Unavailable(f"can't send to {self._name}: {error}") from error
        if not self._outbox.add_message(
            parts, 0 if payload is None else memoryview(payload).nbytes
        ):
            raise Overloaded(f"{self._name} is too slow for the messages sent to it")

    @property
    def is_congested(self) -> bool:
        """Whether messages wait for the socket; senders should pause."""
        return len(self._outbox) > 0

    def _flush(self) -> None:
        assert self._pump is not None
        try:
            while self._outbox:
                if not self._pump.send_parts(self._outbox.peek_message()):
                    return
                self._outbox.pop_message()
        except zmq.ZMQError as error:
            logger.warning("can't send to %s: %s", self._name, error)
            self._outbox.drop_messages()
        self._call_back(self._events.on_drained)

    # --- requests --------------------------------------------------------------------------------

    async def send_request(
        self, message: M, payload: Buffer | None = None, *, timeout: float = 10.0
    ) -> Reply[M]:
        """Send ``message`` with a new ``ref`` and wait for the reply.

        Raises:
            MolinkError: the server's error, by its class name.
            ConnectionBroken: the connection ended meanwhile.
            Unavailable: no connection, or no reply within ``timeout`` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        await self.wait_connected(timeout)
        self._ref += 1
        ref = self._ref
        reply = self._pending[ref] = loop.create_future()
        try:
            self.send(_with_ref(message, ref), payload)
            async with asyncio.timeout_at(deadline):
                answer: Reply[M] | MolinkError = await reply
        except TimeoutError:
            name = type(message).__name__
            raise Unavailable(f"{self._name} didn't answer a {name} in {timeout:g} s") from None
        finally:
            del self._pending[ref]
        if isinstance(answer, MolinkError):
            raise answer
        return answer

    # --- receiving -------------------------------------------------------------------------------

    def _on_frames(self, frames: list[zmq.Frame], parts: int) -> None:
        try:
            if parts > MAX_FRAMES:
                raise WireError(f"a message of {parts} parts")
            message, payload = self._codec.decode([frame.buffer for frame in frames])
        except WireError as error:
            self._report_misbehaviour(str(error))
            return
        ref = getattr(message, "ref", None)
        if ref is None:
            self._call_back(self._events.on_message, message, payload)
            return
        reply = self._pending.get(ref)
        if reply is None or reply.done():
            return  # a reply to an abandoned request, or a second one
        reply.set_result(message.error if isinstance(message, ErrorReply) else (message, payload))

    def _call_back(self, callback: Callable[..., None], *arguments: object) -> None:
        """Run a callback and log its errors."""
        try:
            callback(*arguments)
        except Exception:
            logger.exception("%s failed on the connection to %s", callback, self._name)

    def _report_misbehaviour(self, reason: str) -> None:
        if self._misbehaviour.add_violation(self._server_key, asyncio.get_running_loop().time()):
            logger.warning("%s sent an invalid message: %s", self._name, reason)
            self._call_back(self._events.on_refused, f"{self._name} misbehaves: {reason}")

    # --- the connection --------------------------------------------------------------------------

    @property
    def _address(self) -> str:
        return self._addresses[self._address_index % len(self._addresses)]

    def _on_change(self, change: SocketChange) -> None:
        if change in (SocketChange.DISCONNECTED, SocketChange.WAITING) and self._pump is not None:
            self._pump.check_unread()
        if change is SocketChange.CONNECTED:
            self.failure = None
            self.is_connected = True
            self._call_back(self._events.on_connect)
        elif change is SocketChange.DISCONNECTED:
            self._nudge.set()
            self._on_disconnected()
            self._start_refusal_check()
        elif change is SocketChange.OVERRUN:
            self._call_back(self._events.on_refused, f"{self._name} sends more than this PC reads")
        elif change in (SocketChange.REFUSED, SocketChange.FAILED):
            self.failure = self._explain(change)
            if change is SocketChange.REFUSED:
                self._nudge.set()
            self._call_back(self._events.on_refused, str(self.failure))
        self._changed.set()

    def _on_disconnected(self) -> None:
        was, self.is_connected = self.is_connected, False
        self._drop(f"the connection to {self._name} broke")
        if was:
            self._call_back(self._events.on_disconnect)

    def _start_refusal_check(self) -> None:
        """Check whether the server's process has ended, if there is a callback for it."""
        if self._events.on_lost is None or self._refusal_check is not None:
            return
        loop = asyncio.get_running_loop()
        self._refusal_check = loop.create_task(
            self._check_refusal(self._address), name="molink-client-ask"
        )
        self._refusal_check.add_done_callback(self._on_refusal_checked)

    async def _check_refusal(self, address: str) -> None:
        if await is_refused(address) and not self.is_connected and self._events.on_lost is not None:
            reason = f"its process has ended: {address} refuses connections"
            self._call_back(self._events.on_lost, reason)

    def _on_refusal_checked(self, task: asyncio.Task[None]) -> None:
        self._refusal_check = None
        if not task.cancelled() and task.exception() is not None:
            self._task_ended(task)

    def _explain(self, change: SocketChange) -> MolinkError:
        if change is SocketChange.REFUSED:
            return NotAuthorized(
                f"{self._name} at {self._address} doesn't know this PC: join the swarm (again)"
            )
        return Unavailable(
            f"the handshake with {self._name} at {self._address} failed:"
            " it has another key or isn't molink"
        )

    async def _redial(self, socket: zmq.asyncio.Socket) -> None:
        """Try the next address after a while without a connection.

        With a single address, try it again: libzmq gives up on a server that refused it or broke
        the protocol.
        """
        timeout = _ADDRESS_TIMEOUT if len(self._addresses) > 1 else _ONLY_ADDRESS_TIMEOUT
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._nudge.wait()
                    if not self._is_stalled:
                        await asyncio.sleep(_NUDGE_PAUSE)
            self._nudge.clear()
            stalled, self._is_stalled = self._is_stalled, False
            if self.is_connected and not stalled:
                continue
            with contextlib.suppress(zmq.ZMQError):
                socket.disconnect(self._address)
            if stalled:
                # libzmq doesn't report a replaced connection.
                self._on_disconnected()
            else:
                self._address_index += 1
            try:
                connect_socket(socket, self._address)
            except MolinkError as error:
                logger.warning("%s", error)
            if self._pump is not None:
                self._pump.check_unread()

    def _drop(self, reason: str) -> None:
        self._outbox.drop_messages()
        for reply in self._pending.values():
            if not reply.done():
                reply.set_result(ConnectionBroken(reason))

    def _release(self) -> None:
        self.is_connected = False
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None


def _with_ref(message: M, ref: int) -> M:
    struct: Any = message
    replaced: M = msgspec.structs.replace(struct, ref=ref)
    return replaced
