"""This PC at a rendezvous: other peers call it there, and it calls them.

To sockets of this PC, a call is a port on loopback: what connects to it is joined with a socket of
the other peer. CURVE runs from end to end, so neither the rendezvous nor a local program that
connects to that port gains access.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from molink.errors import Unavailable
from molink.facts.identity import derive_peer_id
from molink.util.token_bucket import RateLimit, TokenBucket
from molink.wire.messages.relay import NONCE_BYTES
from molink.wire.messages.rendezvous import (
    COORDINATOR,
    JOINED,
    MAX_WAITING,
    NOBODY,
    RendezvousAddress,
    compute_registration,
    derive_session_secret,
    session_of_peer,
)
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.membership.addresses import LOOPBACK
from molinkd.peer.membership.relay_ends import (
    CONNECT_TIMEOUT_S,
    accept_local,
    await_other_end,
    spawn_in,
)
from molinkd.peer.membership.relay_server import authenticate_end
from molinkd.splice import (
    CHUNK_BYTES,
    Stream,
    close_after,
    keep_alive,
    listen_on_free_port,
    open_stream,
    splice_streams,
)
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Pauses before this PC registers again at a rendezvous that is unreachable, in seconds.
_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)
#: Consecutive failures that are reported; one that restarts is back sooner.
_FAILURES_TO_REPORT = 3
#: Round trips to the rendezvous until a call is answered: two to be joined, and six to a peer that
#: is as far from it, two thirds more for delays; and the longest timeout in seconds.
_ROUND_TRIPS, MAX_TIMEOUT_S = 20, 3.0
#: Interval of checking whether this PC leads, in seconds.
_LEADER_CHECK_S = 2.0
#: When a further address of its name is tried, in seconds.
_OTHER_FAMILY_DELAY_S = 0.25
#: How long a failed call keeps its local connection, in seconds: libzmq would call again at once.
_FAILURE_PAUSE_S = 0.5
#: Calls at once, and those that this PC answers at once: more than a rendezvous joins with it.
_MAX_CALLS, _MAX_ANSWERED = 64, 160
#: Rate of registrations: one per call, and many at once when all PCs look for the next leader.
REGISTER_LIMIT = RateLimit(burst=160, per_second=50.0)
#: Local ports of calls: more than two sockets of each peer of a large swarm.
MAX_LISTENERS = 256
_BACKLOG = 16


def open_rendezvous(text: str, keys: KeyPair, host: str = LOOPBACK) -> "RendezvousClient | None":
    """The client of the rendezvous ``SECRET@HOST:PORT``; ``None`` for an empty text."""
    return RendezvousClient(RendezvousAddress.parse(text), keys, host) if text else None


class RendezvousClient:
    """Calls peers at a rendezvous, and answers their calls once started."""

    def __init__(self, address: RendezvousAddress, keys: KeyPair, host: str) -> None:
        """``host`` is where the sockets of this PC listen."""
        self.address = address
        #: Called with a sentence when this PC can't register any more.
        self.on_problem: Callable[[str], None] = lambda _: None
        #: Duration of the last connect to the rendezvous, in seconds.
        self._round_trip = 0.0
        self._signer, self._me = keys.signer, derive_peer_id(keys.public)
        self._host = host
        self._find_port: Callable[[bytes], int] = lambda _: 0
        #: Local listeners with their tasks by peer and socket, the last used last.
        self._listeners: dict[tuple[str, bytes], tuple[socket.socket, asyncio.Task[Any]]] = {}
        self._accepting: set[asyncio.Task[Any]] = set()
        self._calls: set[asyncio.Task[Any]] = set()
        self._answered: set[asyncio.Task[Any]] = set()
        self._registering: set[asyncio.Task[Any]] = set()
        #: Why the last call of a peer failed, and who waits for such a failure.
        self._failures: dict[str, str] = {}
        self._waiters: dict[str, set[asyncio.Future[str]]] = {}
        #: Peers that were last reached by a call only.
        self._called_only: set[str] = set()
        #: Whether this PC is registered.
        self.is_registered = False

    def start(self, find_port: Callable[[bytes], int]) -> None:
        """Register and answer calls; ``find_port()`` returns a socket's port, or 0."""
        self._find_port = find_port
        self._attempts = TokenBucket(REGISTER_LIMIT, time.monotonic())
        spawn_in(self._registering, self._keep_registered(), "molink-rendezvous")
        for _ in range(MAX_WAITING - 1):
            spawn_in(self._registering, self._keep_more_waiting(), "molink-rendezvous")

    async def close(self) -> None:
        """End all calls."""
        await cancel_tasks(*self._registering, *self._accepting, *self._calls, *self._answered)
        self._listeners.clear()

    # --- calls ---

    def local_endpoint(self, peer: str, wanted: bytes) -> str:
        """The local endpoint of a peer's socket; empty if there can't be one."""
        if peer in ("", self._me):
            return ""
        found = self._listeners.pop((peer, wanted), None)
        if found is None:
            try:
                session_of_peer(peer)
                listener = listen_on_free_port(LOOPBACK, 0, 1, _BACKLOG)
            except (OSError, ValueError) as error:
                log.warning("can't call a peer: %s", error)
                return ""
            accepting = accept_local(listener, lambda one: self._on_local(one, peer, wanted))
            found = listener, spawn_in(self._accepting, accepting, "molink-call")
            close_after(found[1], listener)
        if len(self._listeners) >= MAX_LISTENERS:
            self._drop_oldest()
        self._listeners[peer, wanted] = found
        return f"tcp://{LOOPBACK}:{found[0].getsockname()[1]}"

    def _drop_oldest(self) -> None:
        """Close the port that was not asked for longest: its peer may be gone."""
        oldest = next(iter(self._listeners))
        self._listeners.pop(oldest)[1].cancel()
        self._failures.pop(oldest[0], None)
        self._called_only.discard(oldest[0])

    def add_endpoint(self, endpoints: Sequence[str], peer: str, wanted: bytes) -> tuple[str, ...]:
        """A peer's ``endpoints`` with that of a call: first if it was last reached by a call."""
        call = self.local_endpoint(peer, wanted)
        if not call:
            return tuple(endpoints)
        return (call, *endpoints) if peer in self._called_only else (*endpoints, call)

    def stretch_timeout(self, timeout: float) -> float:
        """``timeout`` in seconds, longer if the rendezvous is far away."""
        return min(max(timeout, _ROUND_TRIPS * self._round_trip), MAX_TIMEOUT_S)

    def find_failure(self, peer: str) -> str:
        """Why the last call of ``peer`` failed; empty if it did not."""
        return self._failures.get(peer, "")

    async def wait_failed(self, peer: str) -> str:
        """Wait until a call of ``peer`` fails; returns why."""
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(peer, set())
        waiters.add(waiter)
        try:
            return await waiter
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop(peer, None)

    def record_reached(self, peer: str, *, by_call: bool) -> None:
        """Record how a peer was reached."""
        (self._called_only.add if by_call else self._called_only.discard)(peer)

    def _on_local(self, connection: socket.socket, peer: str, wanted: bytes) -> None:
        if len(self._calls) >= _MAX_CALLS:
            connection.close()
            return
        spawn_in(self._calls, self._call_peer(connection, peer, wanted), "molink-call")

    async def _call_peer(self, connection: socket.socket, peer: str, wanted: bytes) -> None:
        local = await open_stream(connection)
        try:
            far = await self._connect_peer(peer, wanted)
        except (OSError, EOFError, Unavailable) as error:
            self._record_failure(peer, self._explain(error))
            await asyncio.sleep(_FAILURE_PAUSE_S)
        else:
            self._failures.pop(peer, None)
            await splice_streams(local, far)
        finally:
            local[1].transport.abort()

    def _record_failure(self, peer: str, reason: str) -> None:
        log.debug("can't call %s: the rendezvous %s", peer, reason)
        self._failures[peer] = reason
        for waiter in self._waiters.get(peer, ()):
            if not waiter.done():
                waiter.set_result(reason)

    async def _connect_peer(self, peer: str, wanted: bytes) -> Stream:
        """A connection to one of a peer's sockets.

        Raises:
            OSError, EOFError: The rendezvous is unreachable or rejects us.
            Unavailable: The peer isn't registered.
        """
        id = session_of_peer(peer)
        shared = derive_session_secret(self.address.secret, "calls", id)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            stream = await self._connect()
            try:
                await authenticate_end(stream, id, "calls", shared)
                stream[1].write(wanted)
                answer = await stream[0].readexactly(1)
                if answer == NOBODY:
                    raise Unavailable("knows nothing of that PC")
                if answer != JOINED:
                    raise Unavailable("is no rendezvous")
            except BaseException:
                stream[1].transport.abort()
                raise
        return stream

    async def _connect(self) -> Stream:
        """A connection to the rendezvous, by IPv6 or IPv4.

        Raises:
            OSError: It is unreachable.
        """
        try:
            reader, writer = await asyncio.open_connection(
                self.address.host,
                self.address.port,
                limit=CHUNK_BYTES,
                happy_eyeballs_delay=_OTHER_FAMILY_DELAY_S,
            )
        except UnicodeError as error:  # a token of nonsense
            raise socket.gaierror(socket.EAI_NONAME, "not a host name") from error
        keep_alive(writer.get_extra_info("socket"))
        return reader, writer

    def _explain(self, error: Exception) -> str:
        """What the rendezvous does, as the end of a sentence."""
        match error:
            case Unavailable():
                return str(error)
            case EOFError():
                return "refuses this PC: its secret has changed, or it is full"
            case ConnectionRefusedError():
                return "refuses connections"
            case socket.gaierror():
                return "has an unknown name"
            case OSError(strerror=str(reason)) if not isinstance(error, TimeoutError):
                return f"can't be reached: {reason}"
        return "doesn't answer"

    # --- answers ---

    async def _keep_registered(self) -> None:
        """Keep one connection waiting for callers."""
        failures = 0
        while True:
            try:
                stream = await await_other_end(self._register, self._attempts)
            except TimeoutError:
                continue  # replace the idle connection
            except (OSError, EOFError) as error:
                self.is_registered = False
                text = f"the rendezvous {self.address.place} {self._explain(error)}"
                log.debug("%s", text)
                if failures == _FAILURES_TO_REPORT:
                    self.on_problem(text)
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
                continue
            failures = 0
            self._spawn_answer(stream)

    async def _keep_more_waiting(self) -> None:
        """Keep another connection waiting while this PC leads, since all others call it."""
        while True:
            if self.is_registered and self._find_port(COORDINATOR):
                try:
                    self._spawn_answer(await await_other_end(self._register, self._attempts))
                    continue
                except TimeoutError:
                    continue  # replace the idle connection
                except (OSError, EOFError) as error:
                    log.debug("no further connection to the rendezvous: %s", self._explain(error))
            await asyncio.sleep(_LEADER_CHECK_S)

    def _spawn_answer(self, stream: Stream) -> None:
        if len(self._answered) >= _MAX_ANSWERED:
            stream[1].transport.abort()
        else:
            spawn_in(self._answered, self._answer_call(stream), "molink-answer")

    async def _register(self) -> Stream:
        """A connection on which the rendezvous knows this peer.

        Raises:
            OSError, EOFError: The rendezvous is unreachable.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        stream = await self._connect()
        self._round_trip = loop.time() - began
        try:
            nonce = await stream[0].readexactly(NONCE_BYTES)
            secret = self.address.secret
            stream[1].write(compute_registration(self._signer, self._me, secret, nonce))
        except BaseException:
            stream[1].transport.abort()
            raise
        if not self.is_registered:
            log.info("registered at the rendezvous %s", self.address.place)
        self.is_registered = True
        return stream

    async def _answer_call(self, far: Stream) -> None:
        """Connect a caller to the socket that it asks for."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                port = self._find_port(await far[0].readexactly(1))
                if not port:
                    return
                local = await asyncio.open_connection(self._host, port)
            await splice_streams(far, local)
        finally:
            far[1].transport.abort()
