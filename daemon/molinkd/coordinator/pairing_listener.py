"""The listener for PCs that ask to join without a token.

It is open only while discovery is enabled, and speaks plain TCP, since ZeroMQ would reject an
unknown key. It accepts two small messages per connection. A person decides who is admitted
(:mod:`molink.swarm.membership.pairing`).
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from molink.errors import (
    InvariantError,
    Overloaded,
    RequestError,
    StateError,
    Unavailable,
    WireError,
)
from molink.swarm.membership.pairing import (
    AdmitJoinerAction,
    ConfirmRefusalAction,
    DisconnectJoinerAction,
    JoinerConnectedEvent,
    JoinerDisconnectedEvent,
    JoinerMessageReceivedEvent,
    NameJoinerAction,
    PairingAction,
    PairingDecidedEvent,
    PairingEvent,
    PairingRequest,
    PairingResponder,
    PairingTimePassedEvent,
    PublishPendingAction,
    ReportPairingErrorAction,
    SendToJoinerAction,
)
from molink.swarm.membership.versions import PeerVersion, explain_mismatch, own_version
from molink.util.token_bucket import RateLimit, TokenBucket
from molink.wire.messages.pairing import (
    LENGTH_BYTES,
    MAX_FRAME,
    Commitment,
    PairingClientMessage,
    PairingOutcome,
    PairingResult,
    decode_frame,
    encode_frame,
    parse_frame_length,
)
from molinkd.splice import listen_on_free_port

log = logging.getLogger(__name__)

#: Accepted connections; further ones wait in the system's short queue.
ACCEPT_LIMIT = RateLimit(32, 20.0)
_BACKLOG = 16
#: Seconds after a failed ``accept``, for example for lack of descriptors.
_ACCEPT_RETRY_DELAY = 0.5
#: Ports tried, downwards; the firewall rule opens them.
MAX_PORTS_TRIED = 12


@dataclass(frozen=True, slots=True)
class PairingConfig:
    """The swarm, and callbacks of its coordinator."""

    swarm: str
    name: str
    public_key: str
    #: Why a key is inadmissible; ``None`` if a person may admit it.
    find_objection: Callable[[str], PairingOutcome | None]
    #: The coordinator's port, and its addresses without port.
    locate_coordinator: Callable[[], tuple[int, tuple[str, ...]]]
    #: Called when the pending requests have changed.
    on_pending_changed: Callable[[], None]


class PairingListener:
    """One listening socket and its connections."""

    def __init__(self, config: PairingConfig) -> None:
        self._config = config
        self._responder = PairingResponder(
            config.swarm, config.name, config.public_key, time.monotonic()
        )
        self._joiner_ids = itertools.count(1)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self.port = 0

    # --- life --------------------------------------------------------------------------------

    def open(self, host: str, port: int) -> int:
        """Listen on ``port`` or the next free one below it (0: any), and return it.

        Raises:
            OSError: none is free.
        """
        self._listener = listen_on_free_port(
            "" if host == "*" else host, port, MAX_PORTS_TRIED, _BACKLOG
        )
        self.port = int(self._listener.getsockname()[1])
        self._spawn(self._accept_joiners(self._listener))
        return self.port

    async def close(self) -> None:
        """Close all connections."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def on_timer(self) -> None:
        """Expire pending requests."""
        self._dispatch_event(PairingTimePassedEvent())

    # --- for members -------------------------------------------------------------------------

    @property
    def pending_requests(self) -> list[PairingRequest]:
        """Requests that await a decision, oldest first; ``since`` is unix time."""
        offset = time.time() - time.monotonic()
        return [
            replace(one, since=round(offset + one.since, 1))
            for one in self._responder.pending_requests
        ]

    def refuse_joiner(self, code: str) -> str:
        """Refuse the PC that shows ``code``; returns its name.

        Raises:
            RequestError: there is no such PC, or several show the code.
        """
        return self._decide(PairingDecidedEvent(code, refuse=True)).name

    def find_joiner(self, code: str) -> NameJoinerAction:
        """The name and the verify key of the PC that shows ``code``.

        Raises:
            RequestError: there is no such PC, or several show the code.
        """
        action = self._decide(PairingDecidedEvent(code))
        assert isinstance(action, NameJoinerAction)
        return action

    def admit_joiner(self, code: str, verify_key: str, admit: Callable[[], object]) -> None:
        """Admit the PC that shows ``code``, for whose key a member has signed, by ``admit``.

        Raises:
            RequestError: there is no such PC, or it has another key.
            MolinkError: it can't be admitted. After a StateError or an InvariantError it may have
                been; it has to ask again.
        """
        action = self._decide(PairingDecidedEvent(code, verify_key))
        if not isinstance(action, AdmitJoinerAction):
            raise RequestError("the PC that shows this code has another key", param="code")
        result = PairingResult(outcome="refused")
        try:
            admit()
            port, addresses = self._config.locate_coordinator()
            result = PairingResult(outcome="admitted", port=port, addresses=addresses)
        except Overloaded:
            result = PairingResult(outcome="busy")
            raise
        except Unavailable:
            result = PairingResult(outcome="full")
            raise
        except (StateError, InvariantError):
            self._disconnect(action.joiner)
            raise
        finally:
            self._send_to_joiner(SendToJoinerAction(action.joiner, result))

    def _decide(
        self, event: PairingDecidedEvent
    ) -> AdmitJoinerAction | NameJoinerAction | ConfirmRefusalAction:
        for action in self._dispatch_event(event):
            match action:
                case ReportPairingErrorAction(reason):
                    raise RequestError(reason, param="code")
                case AdmitJoinerAction() | NameJoinerAction() | ConfirmRefusalAction():
                    return action
        raise RequestError("there is no such PC", param="code")

    # --- joiners -----------------------------------------------------------------------------

    def _dispatch_event(self, event: PairingEvent) -> list[PairingAction]:
        """Handle an event; returns the actions that are left to the caller."""
        unhandled: list[PairingAction] = []
        for action in self._responder.handle(event, time.monotonic()):
            match action:
                case SendToJoinerAction():
                    self._send_to_joiner(action)
                case DisconnectJoinerAction(joiner):
                    self._disconnect(joiner)
                case PublishPendingAction():
                    self._config.on_pending_changed()
                case _:
                    unhandled.append(action)
        return unhandled

    def _send_to_joiner(self, action: SendToJoinerAction) -> None:
        writer = self._writers.get(action.joiner)
        if writer is None or writer.is_closing():
            return
        writer.write(encode_frame(action.message))
        if isinstance(action.message, PairingResult):
            del self._writers[action.joiner]
            writer.close()

    def _disconnect(self, joiner: int) -> None:
        writer = self._writers.pop(joiner, None)
        if writer is not None:
            writer.transport.abort()

    async def _accept_joiners(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        bucket = TokenBucket(ACCEPT_LIMIT, loop.time())
        while True:
            await asyncio.sleep(bucket.wait_time(loop.time()))
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("failed to accept a pairing connection: %s", error)
                await asyncio.sleep(_ACCEPT_RETRY_DELAY)
                continue
            bucket.take_token()
            self._spawn(self._serve_joiner(connection, str(address[0])))

    async def _serve_joiner(self, connection: socket.socket, address: str) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=2 * MAX_FRAME)
        except OSError:
            connection.close()
            return
        joiner = next(self._joiner_ids)
        self._writers[joiner] = writer
        try:
            self._dispatch_event(JoinerConnectedEvent(joiner, address, secrets.token_bytes(32)))
            while joiner in self._writers:
                message = await _read_frame(reader)
                self._dispatch_event(
                    JoinerMessageReceivedEvent(joiner, message, self._find_objection(message))
                )
        except (OSError, WireError, asyncio.IncompleteReadError) as error:
            log.debug("lost a joiner from %s: %s", address, error)
        finally:
            self._dispatch_event(JoinerDisconnectedEvent(joiner))
            self._disconnect(joiner)
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _find_objection(self, message: PairingClientMessage) -> PairingOutcome | None:
        if not isinstance(message, Commitment):
            return None
        if explain_mismatch(PeerVersion(message.version, message.protocol), own_version()):
            return "version"
        return self._config.find_objection(message.public_key)

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        loop = asyncio.get_running_loop()
        task: asyncio.Task[None] = loop.create_task(work, name="molink-pairing")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())


async def _read_frame(reader: asyncio.StreamReader) -> PairingClientMessage:
    length = parse_frame_length(await reader.readexactly(LENGTH_BYTES))
    message: PairingClientMessage = decode_frame(
        await reader.readexactly(length), PairingClientMessage
    )
    return message
