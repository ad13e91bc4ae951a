"""Relays the encrypted traffic of two PCs that can't connect to each other.

Both ends connect here and prove that they know a secret (:mod:`molink.wire.messages.relay`). One
end waits; when the other connects, the two are joined. Everything is bounded: sessions,
connections, unauthenticated connections, the accept rate, the total byte rate, and buffered bytes
(one chunk per direction). Addresses of the ends have slots of their own, so that strangers
elsewhere can't take them.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from molink.errors import WireError
from molink.util.connection_slots import ConnectionSlots
from molink.util.token_bucket import RateLimit, TokenBucket
from molink.wire.messages.relay import (
    MAX_OF_PEER,
    NONCE_BYTES,
    PEER_ARRIVED,
    PROOF_BYTES,
    Address,
    Claim,
    OpenRelay,
    compute_proof,
    encode_address,
    is_valid_proof,
    parse_claim,
)
from molink.wire.messages.rendezvous import MAX_WAITING
from molinkd.peer.membership.relay_ends import spawn_in
from molinkd.splice import Stream, close_after, listen_on_free_port, open_stream, splice_streams
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Maximum number of unauthenticated connections: from addresses of the ends, and from others, in
#: all and per address.
MAX_FROM_ENDS, MAX_STRANGERS, MAX_STRANGERS_PER_ADDRESS = 32, 32, 16
#: Addresses of a relay's ends: those reported, and the latest that authenticated.
_MAX_END_ADDRESSES = 32
#: Timeouts of authentication, and of waiting for the other end, in seconds.
TALK_S, MEET_S = 5.0, 10.0
#: Accept rate; further connections wait in the system's backlog. An end that has connected gets
#: ``MAX_FROM_ENDS / 200`` s to authenticate even if strangers share its address.
ACCEPT_RATE = RateLimit(64, 200.0)
_BACKLOG = 128
_NUM_PORTS = 12
#: Total byte rate in bytes/s: suits a home network and takes little CPU.
RATE_LIMIT = 64e6
#: Idle time after which a relay is considered abandoned, in seconds.
UNUSED_TIMEOUT_S = 300.0
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Maximum number of authenticated connections, in all and per session."""

    total: int
    per_session: int


RELAY_LIMITS = ConnectionLimits(128, 24)


@dataclass(slots=True)
class RelaySession:
    """Two ends that may meet, any number of times."""

    last_used: float
    ends: deque[str]
    #: Empty at a rendezvous, where all secrets derive from one.
    secret: bytes = b""
    waiting: list[Stream] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    #: Whether connections stay when the session is closed.
    keeps_connections: bool = False
    #: Nobody has waited when called.
    is_gone: bool = False

    @property
    def num_connections(self) -> int:
        """Connections of both ends."""
        return 2 * len(self.tasks) + len(self.waiting)


class MeetingServer(ABC):
    """Accepts ends on one port and joins those of one session."""

    def __init__(
        self, rate: float, accept_rate: RateLimit = ACCEPT_RATE, max_from_ends: int = MAX_FROM_ENDS
    ) -> None:
        """``max_from_ends``: unauthenticated connections from addresses of the ends."""
        self._rate_limit, self._accept_rate = rate, accept_rate
        self._sessions: dict[int, RelaySession] = {}
        self._unauthenticated: set[asyncio.Task[Any]] = set()
        #: Connections of closed sessions.
        self._kept: set[asyncio.Task[Any]] = set()
        self._from_ends = ConnectionSlots[asyncio.StreamWriter](max_from_ends, max_from_ends)
        self._strangers = ConnectionSlots[asyncio.StreamWriter](
            MAX_STRANGERS, MAX_STRANGERS_PER_ADDRESS
        )
        self._accepting: asyncio.Task[None] | None = None
        #: Time at which the bytes so far conform to the rate limit.
        self._free_at = 0.0
        self.port = 0
        self.bytes_relayed = 0

    @abstractmethod
    async def _authenticate(self, stream: Stream) -> tuple[int, Claim]:
        """The session and the claim of a new connection.

        Raises:
            WireError: It does not know the secret.
            OSError, EOFError: The connection was lost.
        """

    @abstractmethod
    def _find_room(self, stream: Stream, id: int, claim: Claim) -> RelaySession | None:
        """The session, if it has room for an authenticated connection."""

    async def close(self) -> None:
        """Close all sessions."""
        tasks = [task for session in self._sessions.values() for task in session.tasks]
        tasks += [*self._unauthenticated, *([self._accepting] if self._accepting else [])]
        for id in tuple(self._sessions):
            self._close_session(id)
        await cancel_tasks(*self._kept)
        self._close_listener()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_connections(self) -> int:
        """Authenticated connections of all sessions."""
        open_ones = sum(session.num_connections for session in self._sessions.values())
        return open_ones + 2 * len(self._kept)

    # --- connections ---

    async def _accept_connections(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        bucket = TokenBucket(self._accept_rate, loop.time())
        while True:
            await asyncio.sleep(bucket.wait_time(loop.time()))
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("can't accept a relay connection: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            bucket.take_token()
            with contextlib.suppress(OSError):  # the other side has closed
                stream = await open_stream(connection)
                source = str(address[0]).removeprefix("::ffff:")  # IPv4 at a socket of both
                task = self._spawn(self._handle_connection(stream, source), self._unauthenticated)
                task.add_done_callback(partial(_abort_if_cancelled, stream))

    async def _handle_connection(self, stream: Stream, address: str) -> None:
        writer, kept = stream[1], False
        is_end = any(address in session.ends for session in self._sessions.values())
        slots = self._from_ends if is_end else self._strangers
        try:
            replaced = slots.admit(writer, address)
            if replaced is not None:
                replaced.transport.abort()
            async with asyncio.timeout(TALK_S):
                id, claim = await self._authenticate(stream)
            kept = self._admit_end(stream, id, claim)
            if kept and address not in self._sessions[id].ends:
                self._sessions[id].ends.append(address)
        finally:
            slots.release(writer)
            if not kept:
                writer.transport.abort()

    def _admit_end(self, stream: Stream, id: int, claim: Claim) -> bool:
        session = self._find_room(stream, id, claim)
        if session is None:
            return False
        session.last_used = self._now()
        if claim in ("waits", "registers"):
            # Only the newest connection is sure to be alive: routers drop idle ones.
            session.waiting.append(stream)
            kept = 1 if claim == "waits" else MAX_WAITING
            for _, writer in session.waiting[:-kept]:
                writer.transport.abort()
            session.waiting[:], session.is_gone = session.waiting[-kept:], False
            session.arrived.set()
        else:
            self._spawn(self._join_ends(session, stream, claim), session.tasks)
        return True

    async def _join_ends(self, session: RelaySession, stream: Stream, claim: Claim) -> None:
        """Join a dialling end with the waiting one, and tell each the other's address."""
        del claim
        try:
            async with asyncio.timeout(MEET_S):
                other = await self._pop_waiting(session)
            ends = _address_of_end(stream), _address_of_end(other)
            known = None not in ends  # else one of the ends is this PC
            dials, waits = (encode_address(one if known else None) for one in ends)
            other[1].write(PEER_ARRIVED + dials + waits)
            stream[1].write(PEER_ARRIVED + waits + dials)
            await splice_streams(stream, other, self._limit_rate)
        finally:
            session.last_used = self._now()
            stream[1].transport.abort()

    async def _pop_waiting(self, session: RelaySession) -> Stream:
        """The waiting end, once there is one that is alive."""
        while True:
            while not session.waiting:
                session.arrived.clear()
                await session.arrived.wait()
            other = session.waiting.pop()
            if is_alive(other):
                return other
            other[1].transport.abort()

    async def _limit_rate(self, nbytes: int) -> None:
        now = self._now()
        self.bytes_relayed += nbytes
        self._free_at = max(self._free_at, now) + nbytes / self._rate_limit
        if self._free_at > now + 0.001:
            await asyncio.sleep(self._free_at - now)

    # --- housekeeping ------------------------------------------------------------------------

    def _close_session(self, id: int) -> None:
        session = self._sessions.pop(id, None)
        if session is not None:
            for task in session.tasks:
                if session.keeps_connections:
                    self._kept.add(task)
                    task.add_done_callback(self._kept.discard)
                else:
                    task.cancel()
            for _, writer in session.waiting:
                writer.transport.abort()

    def _close_unused(self, timeout: float) -> None:
        """Close sessions that nobody has used for ``timeout`` seconds."""
        now = self._now()
        for id, session in tuple(self._sessions.items()):
            if not session.tasks and now - session.last_used > timeout:
                self._close_session(id)

    def _accept_from(self, listener: socket.socket) -> None:
        """Accept connections from now on; closes the listener at the end."""
        self.port = int(listener.getsockname()[1])
        accepting = self._accept_connections(listener)
        self._accepting = asyncio.get_running_loop().create_task(accepting)
        close_after(self._accepting, listener)

    def _close_listener(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
        for task in self._unauthenticated:
            task.cancel()
        self.port = 0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _spawn(
        self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[Any]]
    ) -> asyncio.Task[Any]:
        return spawn_in(tasks, work, "molink-relay")


class RelayServer(MeetingServer):
    """All relays of this PC, on one port that is open only while there are any."""

    def __init__(
        self,
        host: str,
        first_port: int,
        rate: float = RATE_LIMIT,
        limits: ConnectionLimits = RELAY_LIMITS,
    ) -> None:
        super().__init__(rate)
        self._limits = limits
        self._host, self._first_port = host, first_port

    def open_relay(self, order: OpenRelay) -> int:
        """Open a relay; returns the port, or 0 on failure."""
        self._close_unused(UNUSED_TIMEOUT_S)
        if order.id not in self._sessions and len(self._sessions) >= MAX_OF_PEER:
            return 0
        if self._accepting is None:
            try:
                host = "" if self._host == "*" else self._host
                listener = listen_on_free_port(host, self._first_port, _NUM_PORTS, _BACKLOG)
            except OSError as error:
                log.warning("can't relay for other PCs: %s", error)
                return 0
            self._accept_from(listener)
        ends = deque(order.ends, maxlen=_MAX_END_ADDRESSES)
        session = RelaySession(self._now(), ends, order.secret, keeps_connections=order.is_end)
        self._sessions.setdefault(order.id, session)
        log.info("relaying for two other PCs on port %d", self.port)
        return self.port

    def close_relay(self, id: int) -> None:
        """Close a relay and its connections, unless this PC is an end of them."""
        self._close_session(id)
        if not self._sessions:
            self._close_listener()

    def _find_room(self, stream: Stream, id: int, claim: Claim) -> RelaySession | None:
        session = self._sessions.get(id)
        if (
            session is None
            or self.num_connections >= self._limits.total
            or session.num_connections >= self._limits.per_session
        ):
            return None
        return session

    async def _authenticate(self, stream: Stream) -> tuple[int, Claim]:
        reader, writer = stream
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(nonce)
        answer = await reader.readexactly(PROOF_BYTES)
        id, claim = parse_claim(answer)
        session = self._sessions.get(id)
        if (
            session is None
            or claim not in ("dials", "waits")
            or not is_valid_proof(answer, id, claim, session.secret, nonce)
        ):
            raise WireError("wrong relay secret")
        return id, claim


def is_alive(stream: Stream) -> bool:
    """Whether neither side has closed a connection, by what is known here."""
    return not stream[1].is_closing() and not stream[0].at_eof()


def _abort_if_cancelled(stream: Stream, task: asyncio.Task[Any]) -> None:
    """Abort a connection whose task was cancelled, perhaps before it has begun."""
    if task.cancelled():
        stream[1].transport.abort()


def _address_of_end(stream: Stream) -> Address | None:
    """From where an end has connected; ``None`` if from this PC."""
    host, port = stream[1].get_extra_info("peername")[:2]
    return None if host == stream[1].get_extra_info("sockname")[0] else (str(host), int(port))


async def authenticate_end(stream: Stream, id: int, claim: Claim, secret: bytes) -> None:
    """Prove to a relay that we are one of its ends.

    Raises:
        OSError, EOFError: The connection was lost.
    """
    reader, writer = stream
    nonce = await reader.readexactly(NONCE_BYTES)
    writer.write(compute_proof(id, claim, secret, nonce))
