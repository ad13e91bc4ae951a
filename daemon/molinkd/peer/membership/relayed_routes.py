"""The ends of relays: members that are reached by way of another PC, and those that reach us so.

To whoever dials, a detour is a port on this PC's loopback; what connects there comes out at a port
of the other end. What it says is encrypted and authenticated as on any connection: neither the
relay, nor a program on this PC that connects there too, gains anything.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec

from molink.wire.messages.instructions import (
    Assign,
    FormPipeline,
    Prefetch,
    StageAddress,
    StageProfile,
    Unassign,
)
from molink.wire.messages.relay import PEER_ARRIVED, PORT_BYTES, CloseRelay, RelayedRoute
from molinkd.peer.membership.addresses import LOOPBACK
from molinkd.peer.membership.relay_server import authenticate_end
from molinkd.splice import Stream, close_after, listen_on_free_port, open_stream, splice_streams

log = logging.getLogger(__name__)

#: To connect to a relay and prove ourselves there, in seconds.
CONNECT_TIMEOUT_S = 5.0
#: A connection that waits is made anew after so long: routers forget those that are silent.
RECONNECT_INTERVAL_S = 30.0
#: From a relay that can't be reached to the next try, and tries until it is given up.
_AGAIN_S, _TRIES = 2.0, 60
#: Detours of this PC, and connections of one.
MAX_DETOURS, MAX_CONNECTIONS = 64, 16
#: The port that answers with what it is sent: so the way is measured.
ECHO_PORT = 0
_NUM_ROUND_TRIPS = 5
_BACKLOG = 16

#: What a coordinator has a peer do about its stages.
StageOrder = Prefetch | Assign | StageProfile | FormPipeline | Unassign


class RelayedRoutes:
    """All detours of this PC. ``on_change(peer)`` is called when that to a member comes or goes."""

    def __init__(
        self, host: str, allowed: Callable[[], Collection[int]], on_change: Callable[[str], None]
    ) -> None:
        """``host`` is where our own sockets are reached; ``allowed()`` are their ports."""
        self._host, self._allowed_ports, self._on_change = host, allowed, on_change
        self._routes: dict[int, RelayedRoute] = {}
        #: By member and its port: where it is reached here.
        self._listeners: dict[tuple[str, int], socket.socket] = {}
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}

    # --- for the coordinator -----------------------------------------------------------------

    def on_message(self, message: RelayedRoute | CloseRelay) -> None:
        """A detour has come, or is no more."""
        if isinstance(message, CloseRelay):
            self._drop_route(message.id)
            return
        for old in [one for one in self._routes.values() if _is_same_end(one, message)]:
            self._drop_route(old.id)
        if len(self._routes) >= MAX_DETOURS:
            log.warning("no detour for %s: there are %d", message.peer, MAX_DETOURS)
            return
        self._routes[message.id] = message
        self._tasks[message.id] = set()
        log.info("%s: a detour, by way of %s", message.peer, ", ".join(message.addresses))
        if message.role == "waits":
            self._spawn(message.id, self._wait_at_relay(message))
        else:
            self._on_change(message.peer)

    async def close(self) -> None:
        """No more of any."""
        tasks = [task for each in self._tasks.values() for task in each]
        self._on_change = lambda _: None
        for id in tuple(self._routes):
            self._drop_route(id)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- for those who dial ------------------------------------------------------------------

    def has_route(self, peer: str) -> bool:
        """Whether that member is reached by a detour."""
        return self._find_route(peer) is not None

    def local_endpoint(self, peer: str, port: int) -> str:
        """Where a port of that member is reached on this PC; empty if it has no detour."""
        relayed_route = self._find_route(peer)
        if relayed_route is None:
            return ""
        door = self._listeners.get((peer, port))
        if door is None:
            try:
                door = self._listeners[peer, port] = listen_on_free_port(LOOPBACK, 0, 1, _BACKLOG)
            except OSError as error:
                log.warning("no detour to %s: %s", peer, error)
                return ""
            close_after(
                self._spawn(relayed_route.id, self._accept_connections(relayed_route, door, port)),
                door,
            )
        return f"tcp://{LOOPBACK}:{door.getsockname()[1]}"

    def localize_stage(self, stage: StageAddress) -> StageAddress:
        """Where a stage is reached from here."""
        found = self.local_endpoint(stage.peer, stage.port)
        if not found:
            return stage
        port = int(found.rpartition(":")[2])
        return msgspec.structs.replace(stage, addresses=(LOOPBACK,), port=port)

    def localize_order(self, order: StageOrder) -> StageOrder:
        """An order in which stages are where they are reached from here."""
        if not isinstance(order, FormPipeline):
            return order
        return msgspec.structs.replace(order, ring=tuple(map(self.localize_stage, order.ring)))

    async def measure_latency(self, peer: str) -> float | None:
        """Seconds of the one way to a member by its detour, as its end answers; ``None``: none."""
        relayed_route = self._find_route(peer)
        if relayed_route is None:
            return None
        loop, trips = asyncio.get_running_loop(), []
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await self._dial_port(relayed_route, ECHO_PORT)
                try:
                    for _ in range(_NUM_ROUND_TRIPS):
                        began = loop.time()
                        writer.write(b"?")
                        await reader.readexactly(1)
                        trips.append(loop.time() - began)
                finally:
                    writer.transport.abort()
        return min(trips) / 2 if trips else None

    # --- the end that dials ------------------------------------------------------------------

    async def _accept_connections(
        self, relayed_route: RelayedRoute, door: socket.socket, port: int
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(door)
            except OSError:
                await asyncio.sleep(_AGAIN_S)
                continue
            if len(self._tasks[relayed_route.id]) >= MAX_CONNECTIONS:
                connection.close()
            else:
                self._spawn(
                    relayed_route.id, self._forward_connection(relayed_route, connection, port)
                )

    async def _forward_connection(
        self, relayed_route: RelayedRoute, connection: socket.socket, port: int
    ) -> None:
        local = await open_stream(connection)
        try:
            async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
                far = await self._dial_port(relayed_route, port)
        except BaseException:
            local[1].transport.abort()
            raise
        await splice_streams(local, far)

    async def _dial_port(self, relayed_route: RelayedRoute, port: int) -> Stream:
        stream = await _connect_relay(relayed_route)
        stream[1].write(port.to_bytes(PORT_BYTES, "big"))
        return stream

    # --- the end that waits ------------------------------------------------------------------

    async def _wait_at_relay(self, relayed_route: RelayedRoute) -> None:
        """Always have a connection at the relay that waits for the other end."""
        tries = 0
        while tries < _TRIES:
            try:
                stream = await _await_other_end(relayed_route)
            except TimeoutError:
                continue  # nobody has come: a new connection waits on
            except (OSError, EOFError) as error:
                tries += 1
                log.debug("no relay: %r", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            tries = 0
            self._spawn(relayed_route.id, self._serve_connection(stream))
        log.warning("the relay for %s is not reached any more", relayed_route.peer)

    async def _serve_connection(self, stream: Stream) -> None:
        """The other end has come, and says which port it wants."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                port = int.from_bytes(await stream[0].readexactly(PORT_BYTES), "big")
                if port == ECHO_PORT:
                    await _echo_bytes(stream)
                    return
                if port not in self._allowed_ports():
                    log.warning("port %d was asked for by a detour, and is none of ours", port)
                    return
                local = await asyncio.open_connection(self._host, port)
            await splice_streams(local, stream)
        finally:
            stream[1].transport.abort()

    # --- housekeeping ------------------------------------------------------------------------

    def _find_route(self, peer: str) -> RelayedRoute | None:
        found = (one for one in self._routes.values() if one.peer == peer)
        return next((one for one in found if one.role == "dials"), None)

    def _drop_route(self, id: int) -> None:
        relayed_route = self._routes.pop(id, None)
        if relayed_route is None:
            return
        for task in self._tasks.pop(id):
            task.cancel()
        if relayed_route.role == "dials":
            for key in [key for key in self._listeners if key[0] == relayed_route.peer]:
                del self._listeners[key]
            self._on_change(relayed_route.peer)

    def _spawn(self, id: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        tasks = self._tasks[id]
        task = asyncio.get_running_loop().create_task(work, name="molink-detour")
        tasks.add(task)

        def ended(done: asyncio.Task[Any]) -> None:
            tasks.discard(done)
            if done.cancelled() or done.exception() is None:
                return
            error = done.exception()
            if isinstance(error, (OSError, EOFError, TimeoutError)):
                log.debug("a connection of a detour has ended: %r", error)
            else:
                log.error("a detour failed", exc_info=error)

        task.add_done_callback(ended)
        return task


def _is_same_end(one: RelayedRoute, other: RelayedRoute) -> bool:
    return (one.peer, one.role) == (other.peer, other.role) or one.id == other.id


async def _connect_relay(relayed_route: RelayedRoute) -> Stream:
    """Connect to the relay, and prove that we belong there.

    Raises:
        OSError, EOFError: it can't be reached, or doesn't want us.
    """
    stream = await _connect_any(relayed_route.addresses, relayed_route.port)
    try:
        await authenticate_end(stream, relayed_route.id, relayed_route.role, relayed_route.secret)
    except BaseException:
        stream[1].transport.abort()
        raise
    return stream


async def _await_other_end(relayed_route: RelayedRoute) -> Stream:
    """A connection to the relay on which the other end has come.

    Raises:
        TimeoutError: it has not.
        OSError, EOFError: the relay can't be reached, or doesn't want us.
    """
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            stream = await _connect_relay(relayed_route)
    except TimeoutError as error:
        raise ConnectionError("the relay says nothing") from error
    try:
        async with asyncio.timeout(RECONNECT_INTERVAL_S):
            if await stream[0].readexactly(1) != PEER_ARRIVED:
                raise ConnectionError("the relay says what no relay says")
    except BaseException:
        stream[1].transport.abort()
        raise
    return stream


async def _connect_any(hosts: Sequence[str], port: int) -> Stream:
    failure: OSError = ConnectionError("the relay has no address")
    for host in hosts:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S / 2):
                return await asyncio.open_connection(host, port)
        except OSError as error:  # a TimeoutError is one
            failure = error
    raise failure


async def _echo_bytes(stream: Stream) -> None:
    for _ in range(_NUM_ROUND_TRIPS):
        stream[1].write(await stream[0].readexactly(1))
