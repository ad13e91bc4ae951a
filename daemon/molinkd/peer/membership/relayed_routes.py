"""Endpoints of relayed routes between this PC and peers that it can't connect to.

For the dialling side, a relayed route is a port on loopback, connected to a port of the other end.
The traffic is encrypted and authenticated end to end, so neither the relay nor a local program that
connects to that port gains access. Each connection leaves the relay for a direct one if the routers
of the two let it (:mod:`molinkd.peer.membership.hole_punching`).
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from molink.errors import ConnectionBroken, MolinkError
from molink.swarm.membership.router_kind import RouterObserver
from molink.util.token_bucket import RateLimit, TokenBucket
from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    Prefetch,
    StageAddress,
    StageProfile,
    Unassign,
)
from molink.wire.messages.relay import (
    PEER_ARRIVED,
    PORT_BYTES,
    STREAM_NONCE_BYTES,
    Address,
    CloseRelay,
    RelayedRoute,
)
from molinkd.peer.membership.addresses import LOOPBACK
from molinkd.peer.membership.hole_punching import PunchBackoff, may_punch, punch
from molinkd.peer.membership.relay_ends import (
    CONNECT_TIMEOUT_S,
    accept_local,
    await_other_end,
    connect_any,
    read_addresses,
    spawn_in,
)
from molinkd.peer.membership.relay_server import authenticate_end
from molinkd.peer.membership.relayed_stream import OpenDirect, RelayedStream
from molinkd.splice import Stream, close_after, listen_on_free_port, open_pair, open_stream
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)


#: Retry interval for an unreachable relay, in seconds, and retries until it is given up.
_AGAIN_S, _TRIES = 2.0, 60
#: Maximum number of routes, and of connections per route.
MAX_ROUTES, MAX_CONNECTIONS = 64, 16
#: Connections that a relay may lose; beyond that it is reported.
LOSS_LIMIT = RateLimit(burst=3, per_second=0.05)
#: Virtual port that echoes, to measure latency.
ECHO_PORT = 0
_NUM_ROUND_TRIPS = 5
#: How long a measurement may take in seconds: the ends may try a direct connection before.
_MEASURE_TIMEOUT_S = 20.0
_BACKLOG = 16

#: Orders of the coordinator about stages.
StageOrder = Prefetch | Assign | StageProfile | FormPipeline | Unassign


class RouteLatency(NamedTuple):
    """One-way latency of a relayed route in seconds, and whether its bytes go directly."""

    latency: float
    is_direct: bool


class RelayedRoutes:
    """All relayed routes of this PC."""

    def __init__(
        self,
        host: str,
        allowed: Callable[[], Collection[int]],
        on_change: Callable[[str], None],
        on_failed: Callable[[str, int], None],
        own_peer: str = "",
    ) -> None:
        """``host`` is where our sockets listen, ``allowed()`` returns their ports.

        ``on_change(peer)`` is called when the route to a peer is added or removed, and
        ``on_failed(peer, id)`` when the relay of that id passes nothing on.
        """
        self._host, self._allowed_ports, self._on_change = host, allowed, on_change
        self._on_failed, self._own_peer = on_failed, own_peer
        self._routes: dict[int, RelayedRoute] = {}
        #: Local listener by peer and remote port.
        self._listeners: dict[tuple[str, int], socket.socket] = {}
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}
        self._losses: dict[int, TokenBucket] = {}
        self._punches = PunchBackoff(time.monotonic)
        #: Peers to which a connection has left its relay.
        self._left: set[str] = set()
        #: This PC's router, by what relays see.
        self.router = RouterObserver()
        #: Connections by the tasks that serve them; and those whose route is gone, but not needed.
        self._streams: WeakKeyDictionary[asyncio.Task[Any], RelayedStream] = WeakKeyDictionary()
        self._direct: set[asyncio.Task[Any]] = set()

    # --- orders of the coordinator ---

    def on_message(self, message: RelayedRoute | CloseRelay) -> None:
        """Add or remove a route."""
        if isinstance(message, CloseRelay):
            self._drop_route(message.id)
            return
        for old in [one for one in self._routes.values() if _is_same_end(one, message)]:
            self._drop_route(old.id)
        if len(self._routes) >= MAX_ROUTES:
            log.warning("no relayed route to %s: %d exist already", message.peer, MAX_ROUTES)
            return
        self._routes[message.id] = message
        self._tasks[message.id] = set()
        self._losses[message.id] = TokenBucket(LOSS_LIMIT, asyncio.get_running_loop().time())
        log.info("%s: relayed route through %s", message.peer, ", ".join(message.addresses))
        if message.role == "waits":
            self._spawn(message.id, self._wait_at_relay(message))
        else:
            self._on_change(message.peer)

    async def close(self) -> None:
        """Close all routes."""
        tasks = [task for each in self._tasks.values() for task in each]
        self._on_change = lambda _: None
        for id in tuple(self._routes):
            self._drop_route(id)
        await cancel_tasks(*self._direct)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- addresses ---

    def has_route(self, peer: str) -> bool:
        """Whether ``peer`` is reached by a relayed route."""
        return self._find_route(peer) is not None

    def local_endpoint(self, peer: str, port: int) -> str:
        """Local endpoint of a peer's port; empty without a relayed route."""
        relayed_route = self._find_route(peer)
        if relayed_route is None:
            return ""
        listener = self._listeners.get((peer, port))
        if listener is None:
            try:
                listener = self._listeners[peer, port] = listen_on_free_port(
                    LOOPBACK, 0, 1, _BACKLOG
                )
            except OSError as error:
                log.warning("no relayed route to %s: %s", peer, error)
                return ""
            accepting = accept_local(
                listener, lambda one: self._on_local_connection(relayed_route, one, port)
            )
            close_after(self._spawn(relayed_route.id, accepting), listener)
        return f"tcp://{LOOPBACK}:{listener.getsockname()[1]}"

    def localize_stage(self, stage: StageAddress) -> StageAddress:
        """``stage`` with an address that is reachable from this PC."""
        if stage.peer == self._own_peer:
            # Behind a router, this PC may not reach its own public address.
            return msgspec.structs.replace(stage, addresses=(self._host,))
        found = self.local_endpoint(stage.peer, stage.port)
        if not found:
            return stage
        port = int(found.rpartition(":")[2])
        return msgspec.structs.replace(stage, addresses=(LOOPBACK,), port=port)

    def localize_order(self, order: StageOrder) -> StageOrder:
        """``order`` with stage addresses that are reachable from this PC."""
        if not isinstance(order, FormPipeline):
            return order
        return msgspec.structs.replace(order, ring=tuple(map(self.localize_stage, order.ring)))

    async def measure_latency(self, peer: str) -> RouteLatency | None:
        """Latency of a peer's relayed route, once it is clear how it goes; ``None`` if it fails."""
        relayed_route = self._find_route(peer)
        if relayed_route is None:
            return None
        with contextlib.suppress(OSError, EOFError, TimeoutError, MolinkError):
            async with asyncio.timeout(_MEASURE_TIMEOUT_S):
                stream = await self._dial_port(relayed_route, ECHO_PORT)
                near, far = await open_pair()
                splicing = asyncio.ensure_future(stream.splice(far))
                try:
                    await stream.is_settled.wait()
                    latency = await _time_echoes(*near)
                finally:
                    near[1].transport.abort()
                    await cancel_tasks(splicing)
            return RouteLatency(latency, stream.is_direct)
        return None

    # --- dialling end ---

    def _on_local_connection(
        self, relayed_route: RelayedRoute, connection: socket.socket, port: int
    ) -> None:
        if len(self._tasks[relayed_route.id]) >= MAX_CONNECTIONS:
            connection.close()
        else:
            forwarding = self._forward_connection(relayed_route, connection, port)
            self._spawn(relayed_route.id, forwarding)

    async def _forward_connection(
        self, relayed_route: RelayedRoute, connection: socket.socket, port: int
    ) -> None:
        local = await open_stream(connection)
        try:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                stream = await self._dial_port(relayed_route, port)
        except BaseException:
            local[1].transport.abort()
            raise
        try:
            await stream.splice(local)
            if stream.is_direct:
                self._punches.record_result(relayed_route.peer, ok=True)
        except MolinkError as error:
            if stream.is_direct:
                log.info("the direct connection to %s: %s", relayed_route.peer, error)
                self._punches.record_result(relayed_route.peer, ok=False)
            else:
                self._on_lost(relayed_route, error)

    def _on_lost(self, relayed_route: RelayedRoute, error: MolinkError) -> None:
        """Report a relay that doesn't do its work; one that loses a few connections does."""
        log.info("the relayed route to %s: %s", relayed_route.peer, error)
        losses = self._losses.get(relayed_route.id)
        if losses is None:
            return  # the route is gone
        is_tolerated = losses.try_take(asyncio.get_running_loop().time())
        if not (isinstance(error, ConnectionBroken) and is_tolerated):
            self._on_failed(relayed_route.peer, relayed_route.id)

    async def _dial_port(self, relayed_route: RelayedRoute, port: int) -> RelayedStream:
        far = await _connect_relay(relayed_route)
        nonce = secrets.token_bytes(STREAM_NONCE_BYTES)
        far[1].write(port.to_bytes(PORT_BYTES, "big") + nonce)
        try:
            if await far[0].readexactly(1) != PEER_ARRIVED:
                raise ConnectionError("unexpected reply from the relay")
            other = await self._read_other(far)
        except BaseException:
            far[1].transport.abort()
            raise
        return self._make_stream(relayed_route, far, nonce, other)

    def _on_moved(self, peer: str, seconds: float) -> None:
        """Log how soon connections to a peer leave their relay."""
        level = logging.DEBUG if peer in self._left else logging.INFO
        self._left.add(peer)
        log.log(level, "%s: left the relay after %.2f s", peer, seconds)

    async def _read_other(self, far: Stream) -> Address | None:
        """Where the other end has connected from, as the relay says."""
        other, own = await read_addresses(far[0])
        if own is not None:
            host, port = far[1].get_extra_info("sockname")[:2]
            self.router.observe((str(host), int(port)), own)
        return other

    def _make_stream(
        self, relayed_route: RelayedRoute, far: Stream, nonce: bytes, other: Address | None
    ) -> RelayedStream:
        """A connection over a relay that leaves it if it can."""
        role, secret, peer = relayed_route.role, relayed_route.end_secret, relayed_route.peer
        local_port = int(far[1].get_extra_info("sockname")[1])
        relay = str(far[1].get_extra_info("peername")[0])

        async def open_direct(other: Address) -> Stream:
            try:
                return await punch(local_port, other, role, secret, nonce)
            except TimeoutError:
                self._punches.record_result(peer, ok=False)
                raise

        direct: OpenDirect | None = None
        is_due = role == "waits" or self._punches.is_due(peer)
        if other is not None and is_due and may_punch(other, relay):
            direct = partial(open_direct, other)
        stream = RelayedStream(far, role, secret, nonce, direct, partial(self._on_moved, peer))
        task = asyncio.current_task()
        assert task is not None
        self._streams[task] = stream
        return stream

    # --- waiting end ---

    async def _wait_at_relay(self, relayed_route: RelayedRoute) -> None:
        """Keep one connection waiting at the relay."""
        tries = 0
        while tries < _TRIES:
            try:
                stream = await await_other_end(lambda: _connect_relay(relayed_route))
            except TimeoutError:
                continue  # replace the idle connection
            except (OSError, EOFError) as error:
                tries += 1
                log.debug("no relay: %r", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            tries = 0
            self._spawn(relayed_route.id, self._serve_connection(relayed_route, stream))
        log.warning("can't reach the relay for %s any more", relayed_route.peer)

    async def _serve_connection(self, relayed_route: RelayedRoute, far: Stream) -> None:
        """Connect the other end to the port that it requests."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                other = await self._read_other(far)
                port = int.from_bytes(await far[0].readexactly(PORT_BYTES), "big")
                nonce = await far[0].readexactly(STREAM_NONCE_BYTES)
            stream = self._make_stream(relayed_route, far, nonce, other)
            if port == ECHO_PORT:
                await _serve_echo(stream)
                return
            if port not in self._allowed_ports():
                log.warning("rejected a relayed connection to port %d", port)
                await stream.close()
                return
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    local = await asyncio.open_connection(self._host, port)
            except BaseException:
                await stream.close()
                raise
            await stream.splice(local)
        finally:
            far[1].transport.abort()

    # --- bookkeeping ---

    def _find_route(self, peer: str) -> RelayedRoute | None:
        found = (one for one in self._routes.values() if one.peer == peer)
        return next((one for one in found if one.role == "dials"), None)

    def _drop_route(self, id: int) -> None:
        relayed_route = self._routes.pop(id, None)
        if relayed_route is None:
            return
        del self._losses[id]
        for task in self._tasks.pop(id):
            stream = self._streams.get(task)
            if stream is not None and stream.is_direct:
                self._direct.add(task)
                task.add_done_callback(self._direct.discard)
            else:
                task.cancel()
        if relayed_route.role == "dials":
            for key in [key for key in self._listeners if key[0] == relayed_route.peer]:
                del self._listeners[key]
            self._punches.drop_peer(relayed_route.peer)
            self._left.discard(relayed_route.peer)
            self._on_change(relayed_route.peer)

    def _spawn(self, id: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        return spawn_in(self._tasks[id], work, "molink-relayed-route")


def _is_same_end(one: RelayedRoute, other: RelayedRoute) -> bool:
    return (one.peer, one.role) == (other.peer, other.role) or one.id == other.id


async def _connect_relay(relayed_route: RelayedRoute) -> Stream:
    """Connect and authenticate to the relay.

    Raises:
        OSError, EOFError: The relay is unreachable or rejects us.
    """
    stream = await connect_any(relayed_route.addresses, relayed_route.port)
    try:
        await authenticate_end(stream, relayed_route.id, relayed_route.role, relayed_route.secret)
    except BaseException:
        stream[1].transport.abort()
        raise
    return stream


async def _echo_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for _ in range(_NUM_ROUND_TRIPS):
        writer.write(await reader.readexactly(1))


async def _serve_echo(stream: RelayedStream) -> None:
    near, far = await open_pair()
    echoing = asyncio.ensure_future(_echo_bytes(*near))
    try:
        async with asyncio.timeout(_MEASURE_TIMEOUT_S):
            await stream.splice(far)
    finally:
        near[1].transport.abort()
        await cancel_tasks(echoing)


async def _time_echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    """One-way latency in seconds: half of the shortest round trip."""
    loop, trips = asyncio.get_running_loop(), []
    for _ in range(_NUM_ROUND_TRIPS):
        started = loop.time()
        writer.write(b"?")
        await reader.readexactly(1)
        trips.append(loop.time() - started)
    return min(trips) / 2
