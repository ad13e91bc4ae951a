"""Endpoints of relayed routes between this PC and peers that it can't connect to.

For the dialling side, a relayed route is a port on loopback, connected to a port of the other end.
The traffic is encrypted and authenticated end to end, so neither the relay nor a local program that
connects to that port gains access. Each connection leaves the relay for a direct one if the routers
of the two let it (:mod:`molinkd.peer.membership.hole_punching`), or for a better relay, which is
tried beside the used one first.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
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
from molinkd.peer.membership.relayed_stream import OpenCarrier, RelayedStream
from molinkd.splice import Stream, close_after, listen_on_free_port, open_pair, open_stream
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)


#: Retry interval for an unreachable relay, in seconds, and retries until it is given up.
_AGAIN_S, _TRIES = 2.0, 60
#: Maximum number of routes, and of connections per route.
MAX_ROUTES, MAX_CONNECTIONS = 64, 16
#: Connections that the waiting end serves per route, since those that end take some seconds, and
#: at which rate it goes to the relay.
MAX_SERVED, WAIT_LIMIT = 2 * MAX_CONNECTIONS, RateLimit(burst=64, per_second=10.0)
#: Connections that a relay may lose; beyond that it is reported.
LOSS_LIMIT = RateLimit(burst=3, per_second=0.05)
#: Virtual ports: of a connection that is only measured, and of one to which another moves.
MEASURE_PORT, MOVE_PORT = 0, 1
#: How long a connection may take to move, in seconds; then the former route is closed.
MOVE_TIMEOUT_S = 10.0
#: How long a measurement may take in seconds: the ends may try a direct connection before.
_MEASURE_TIMEOUT_S = 20.0
_BACKLOG = 16

#: Orders of the coordinator about stages.
StageOrder = Prefetch | Assign | StageProfile | FormPipeline | Unassign


class RouteLatency(NamedTuple):
    """One-way latency of a relayed route in seconds, and whether its bytes go directly."""

    latency: float
    is_direct: bool


@dataclass(frozen=True, slots=True)
class RouteEvents:
    """Callbacks of :class:`RelayedRoutes`."""

    #: ``on_change(peer)``: the first route to a peer was added, or the last one removed.
    on_change: Callable[[str], None] = lambda peer: None
    #: ``on_failed(peer, id)``: the relay of that id passes nothing on.
    on_failed: Callable[[str, int], None] = lambda peer, id: None
    #: ``on_tried(peer, id, latency)``: the relay of that id was tried beside the used one. The
    #: latency is one way in seconds; ``None`` if it doesn't work.
    on_tried: Callable[[str, int, float | None], None] = lambda peer, id, latency: None


class RelayedRoutes:
    """All relayed routes of this PC."""

    def __init__(
        self,
        host: str,
        allowed: Callable[[], Collection[int]],
        events: RouteEvents,
        own_peer: str = "",
    ) -> None:
        """``host`` is where our sockets listen, ``allowed()`` returns their ports."""
        self._host, self._allowed_ports = host, allowed
        self._events, self._own_peer = events, own_peer
        self._routes: dict[int, RelayedRoute] = {}
        #: Routes that connections leave for another, and when they are dropped.
        self._replaced: dict[int, asyncio.TimerHandle] = {}
        #: Local listener by peer and remote port, and the task that accepts.
        self._listeners: dict[tuple[str, int], tuple[socket.socket, asyncio.Task[Any]]] = {}
        self._accepting: set[asyncio.Task[Any]] = set()
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
            self._close_route(message.id)
            return
        self._drop_route(message.id)
        if len(self._routes) >= MAX_ROUTES:
            log.warning("no relayed route to %s: %d exist already", message.peer, MAX_ROUTES)
            return
        former = [one for one in self._routes.values() if _is_same_end(one, message)]
        self._routes[message.id] = message
        self._tasks[message.id] = set()
        self._losses[message.id] = TokenBucket(LOSS_LIMIT, asyncio.get_running_loop().time())
        log.info("%s: relayed route through %s", message.peer, ", ".join(message.addresses))
        if message.role == "waits":
            self._spawn(message.id, self._wait_at_relay(message))
        elif message.beside:
            self._spawn(message.id, self._try_route(message))
        if message.beside not in self._routes:
            self._use_route(message, former)

    def _use_route(self, new: RelayedRoute, former: Sequence[RelayedRoute]) -> None:
        """Use a route, to which connections of the former ones to this peer move."""
        self._routes[new.id] = msgspec.structs.replace(new, beside=0)
        replaced = [one for one in former if one.id not in self._replaced]
        for old in replaced:
            loop = asyncio.get_running_loop()
            self._replaced[old.id] = loop.call_later(MOVE_TIMEOUT_S, self._drop_route, old.id)
            if old.role == "dials":
                for task in tuple(self._tasks[old.id]):
                    stream = self._streams.get(task)
                    if stream is not None and stream.route == old.id:
                        self._spawn(new.id, self._move_stream(stream, new))
        if new.role == "dials" and not replaced:
            self._events.on_change(new.peer)

    def _close_route(self, id: int) -> None:
        former = self._routes.get(id)
        beside = [one for one in self._routes.values() if one.beside == id]
        if former is not None and beside:
            self._use_route(beside[0], [former])
        else:
            self._drop_route(id)

    async def close(self) -> None:
        """Close all routes."""
        tasks = [task for each in self._tasks.values() for task in each]
        self._events = RouteEvents()
        for id in tuple(self._routes):
            self._drop_route(id)
        await cancel_tasks(*self._direct, *self._accepting)
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
        if (peer, port) not in self._listeners:
            try:
                listener = listen_on_free_port(LOOPBACK, 0, 1, _BACKLOG)
            except OSError as error:
                log.warning("no relayed route to %s: %s", peer, error)
                return ""
            accepting = accept_local(listener, lambda one: self._on_local(peer, one, port))
            task = spawn_in(self._accepting, accepting, "molink-relayed-route")
            close_after(task, listener)
            self._listeners[peer, port] = listener, task
        return f"tcp://{LOOPBACK}:{self._listeners[peer, port][0].getsockname()[1]}"

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
        """Latency of a peer's relayed route, once it is clear how it goes; ``None`` if it fails.

        If the measured connection has left its relay, the others try it again.
        """
        relayed_route = self._find_route(peer)
        if relayed_route is None:
            return None
        measured = await self._measure_route(relayed_route)
        if measured is not None and measured.is_direct:
            for task in tuple(self._tasks.get(relayed_route.id, ())):
                if (stream := self._streams.get(task)) is not None:
                    self._spawn(relayed_route.id, stream.leave_relay())
        return measured

    async def _measure_route(
        self, relayed_route: RelayedRoute, *, may_leave: bool = True
    ) -> RouteLatency | None:
        """``may_leave``: measure a direct connection, if the ends can open one."""
        with contextlib.suppress(OSError, EOFError, MolinkError):  # includes TimeoutError
            async with asyncio.timeout(_MEASURE_TIMEOUT_S):
                stream = await self._dial_port(relayed_route, MEASURE_PORT, may_leave=may_leave)
                near, far = await open_pair()
                splicing = asyncio.ensure_future(stream.splice(far))
                try:
                    await stream.is_settled.wait()
                    return RouteLatency(await stream.measure_latency(), stream.is_direct)
                finally:
                    near[1].transport.abort()
                    await cancel_tasks(splicing)
        return None

    # --- dialling end ---

    async def _try_route(self, relayed_route: RelayedRoute) -> None:
        """Measure a route beside the used one, and report it."""
        measured = await self._measure_route(relayed_route, may_leave=False)
        latency = None if measured is None else measured.latency
        self._events.on_tried(relayed_route.peer, relayed_route.id, latency)

    async def _move_stream(self, stream: RelayedStream, new: RelayedRoute) -> None:
        """Move a connection to another route; it breaks with the former one if that fails."""

        async def open_carrier() -> Stream:
            async with asyncio.timeout(MOVE_TIMEOUT_S):
                far, _ = await self._meet_other_end(new, MOVE_PORT, stream.nonce)
                try:
                    await stream.prove_carrier(far)
                except BaseException:
                    far[1].transport.abort()
                    raise
            return far

        try:
            await stream.move_to(open_carrier, new.id)
            log.info("%s: a connection has moved to another route", new.peer)
        except (OSError, EOFError, MolinkError) as error:
            log.info("%s: a connection can't move to another route: %s", new.peer, error)

    def _on_local(self, peer: str, connection: socket.socket, port: int) -> None:
        relayed_route = self._find_route(peer)
        if relayed_route is None or len(self._tasks[relayed_route.id]) >= MAX_CONNECTIONS:
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
                self._on_lost(relayed_route.peer, stream.route, error)

    def _on_lost(self, peer: str, id: int, error: MolinkError) -> None:
        """Report a relay that doesn't do its work; one that loses a few connections does."""
        log.info("the relayed route to %s: %s", peer, error)
        losses = self._losses.get(id)
        if losses is None:
            return  # the route is gone
        is_tolerated = losses.try_take(asyncio.get_running_loop().time())
        if not (isinstance(error, ConnectionBroken) and is_tolerated):
            self._events.on_failed(peer, id)

    async def _dial_port(
        self, relayed_route: RelayedRoute, port: int, *, may_leave: bool = True
    ) -> RelayedStream:
        nonce = secrets.token_bytes(STREAM_NONCE_BYTES)
        far, other = await self._meet_other_end(relayed_route, port, nonce)
        return self._make_stream(relayed_route, far, nonce, other if may_leave else None)

    async def _meet_other_end(
        self, relayed_route: RelayedRoute, port: int, nonce: bytes
    ) -> tuple[Stream, Address | None]:
        """A connection to the other end, and its address as the relay sees it.

        Raises:
            OSError, EOFError: The relay is unreachable or rejects us.
        """
        far = await _connect_relay(relayed_route)
        far[1].write(port.to_bytes(PORT_BYTES, "big") + nonce)
        try:
            if await far[0].readexactly(1) != PEER_ARRIVED:
                raise ConnectionError("unexpected reply from the relay")
            return far, await self._read_other(far)
        except BaseException:
            far[1].transport.abort()
            raise

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

        direct: OpenCarrier | None = None
        if other is not None and may_punch(other, relay):
            direct = partial(open_direct, other)
        on_moved = partial(self._on_moved, peer)
        is_due = self._punches.is_due(peer)
        id = relayed_route.id
        stream = RelayedStream(
            far, role, secret, nonce, id, direct, on_moved, leaves_at_once=is_due
        )
        task = asyncio.current_task()
        assert task is not None
        self._streams[task] = stream
        return stream

    # --- waiting end ---

    async def _wait_at_relay(self, relayed_route: RelayedRoute) -> None:
        """Keep one connection waiting at the relay."""
        tries, attempts = 0, TokenBucket(WAIT_LIMIT, time.monotonic())
        while tries < _TRIES:
            try:
                stream = await await_other_end(lambda: _connect_relay(relayed_route), attempts)
            except TimeoutError:
                continue  # replace the idle connection
            except (OSError, EOFError) as error:
                tries += 1
                log.debug("no relay: %r", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            tries = 0
            if len(self._tasks[relayed_route.id]) > MAX_SERVED:  # this task is one of them
                stream[1].transport.abort()
                continue
            self._spawn(relayed_route.id, self._serve_connection(relayed_route, stream))
        log.warning("can't reach the relay for %s any more", relayed_route.peer)

    async def _serve_connection(self, relayed_route: RelayedRoute, far: Stream) -> None:
        """Connect the other end to the port that it requests."""
        is_moved_to = False
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                other = await self._read_other(far)
                port = int.from_bytes(await far[0].readexactly(PORT_BYTES), "big")
                nonce = await far[0].readexactly(STREAM_NONCE_BYTES)
            if port == MOVE_PORT:
                is_moved_to = self._accept_move(relayed_route, far, nonce)
                return
            stream = self._make_stream(relayed_route, far, nonce, other)
            if port == MEASURE_PORT:
                await _serve_measurement(stream)
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
            if not is_moved_to:
                far[1].transport.abort()

    def _accept_move(self, relayed_route: RelayedRoute, far: Stream, nonce: bytes) -> bool:
        """Offer ``far`` to the connection that has ``nonce``; returns whether there is one."""

        async def prove() -> Stream:
            try:
                async with asyncio.timeout(MOVE_TIMEOUT_S):
                    await stream.prove_carrier(far)
            except BaseException:
                far[1].transport.abort()
                raise
            return far

        for stream in tuple(self._streams.values()):
            if stream.nonce == nonce and stream.role == "waits" and not stream.is_over:
                stream.accept_move(prove, relayed_route.id)
                return True
        return False

    # --- bookkeeping ---

    def _find_route(self, peer: str) -> RelayedRoute | None:
        """The route that is used to dial ``peer``."""
        used = (one for one in self._routes.values() if one.id not in self._replaced)
        found = (one for one in used if (one.peer, one.role, one.beside) == (peer, "dials", 0))
        return next(found, None)

    def _drop_route(self, id: int) -> None:
        relayed_route = self._routes.pop(id, None)
        if relayed_route is None:
            return
        del self._losses[id]
        if id in self._replaced:
            self._replaced.pop(id).cancel()
        for task in self._tasks.pop(id):
            stream = self._streams.get(task)
            if stream is not None and stream.route in self._routes:
                self._tasks[stream.route].add(task)
                task.add_done_callback(self._tasks[stream.route].discard)
            elif stream is not None and (stream.is_direct or relayed_route.is_direct):
                self._direct.add(task)
                task.add_done_callback(self._direct.discard)
            else:
                task.cancel()
        peer = relayed_route.peer
        if relayed_route.role == "dials" and self._find_route(peer) is None:
            self._forget_peer(peer)
            self._events.on_change(peer)

    def _forget_peer(self, peer: str) -> None:
        """Drop what is known of a peer that no route leads to any more."""
        for key in [key for key in self._listeners if key[0] == peer]:
            self._listeners.pop(key)[1].cancel()
        self._punches.drop_peer(peer)
        self._left.discard(peer)

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


async def _serve_measurement(stream: RelayedStream) -> None:
    """Answer signs of life on a connection without a program, until the other end closes it."""
    near, far = await open_pair()
    try:
        async with asyncio.timeout(_MEASURE_TIMEOUT_S):
            await stream.splice(far)
    finally:
        near[1].transport.abort()
