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
    Form,
    Prefetch,
    StageAddress,
    StageProfile,
    Unassign,
)
from molink.wire.messages.relaying import GO, PORT_BYTES, CloseRelay, Detour
from molinkd.peer.membership.addresses import LOOPBACK
from molinkd.peer.membership.relay import enter
from molinkd.splice import Stream, close_after, listen, splice, stream_of

log = logging.getLogger(__name__)

#: To connect to a relay and prove ourselves there, in seconds.
CONNECT_S = 5.0
#: A connection that waits is made anew after so long: routers forget those that are silent.
WAIT_S = 30.0
#: From a relay that can't be reached to the next try, and tries until it is given up.
_AGAIN_S, _TRIES = 2.0, 60
#: Detours of this PC, and connections of one.
MAX_DETOURS, MAX_CONNECTIONS = 64, 16
#: The port that answers with what it is sent: so the way is measured.
ECHO = 0
_TRIPS = 5
_QUEUE = 16

#: What a coordinator has a peer do about its stages.
Order = Prefetch | Assign | StageProfile | Form | Unassign


class Detours:
    """All detours of this PC. ``on_change(peer)`` is called when that to a member comes or goes."""

    def __init__(
        self, host: str, allowed: Callable[[], Collection[int]], on_change: Callable[[str], None]
    ) -> None:
        """``host`` is where our own sockets are reached; ``allowed()`` are their ports."""
        self._host, self._allowed, self._on_change = host, allowed, on_change
        self._detours: dict[int, Detour] = {}
        #: By member and its port: where it is reached here.
        self._doors: dict[tuple[str, int], socket.socket] = {}
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}

    # --- for the coordinator -----------------------------------------------------------------

    def take(self, message: Detour | CloseRelay) -> None:
        """A detour has come, or is no more."""
        if isinstance(message, CloseRelay):
            self._end(message.id)
            return
        for old in [one for one in self._detours.values() if _same(one, message)]:
            self._end(old.id)
        if len(self._detours) >= MAX_DETOURS:
            log.warning("no detour for %s: there are %d", message.peer, MAX_DETOURS)
            return
        self._detours[message.id] = message
        self._tasks[message.id] = set()
        log.info("%s: a detour, by way of %s", message.peer, ", ".join(message.addresses))
        if message.role == "waits":
            self._spawn(message.id, self._wait(message))
        else:
            self._on_change(message.peer)

    async def close(self) -> None:
        """No more of any."""
        tasks = [task for each in self._tasks.values() for task in each]
        self._on_change = lambda _: None
        for id in tuple(self._detours):
            self._end(id)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- for those who dial ------------------------------------------------------------------

    def to(self, peer: str) -> bool:
        """Whether that member is reached by a detour."""
        return self._to(peer) is not None

    def endpoint(self, peer: str, port: int) -> str:
        """Where a port of that member is reached on this PC; empty if it has no detour."""
        detour = self._to(peer)
        if detour is None:
            return ""
        door = self._doors.get((peer, port))
        if door is None:
            try:
                door = self._doors[peer, port] = listen(LOOPBACK, 0, 1, _QUEUE)
            except OSError as error:
                log.warning("no detour to %s: %s", peer, error)
                return ""
            close_after(self._spawn(detour.id, self._attend(detour, door, port)), door)
        return f"tcp://{LOOPBACK}:{door.getsockname()[1]}"

    def address(self, stage: StageAddress) -> StageAddress:
        """Where a stage is reached from here."""
        found = self.endpoint(stage.peer, stage.port)
        if not found:
            return stage
        port = int(found.rpartition(":")[2])
        return msgspec.structs.replace(stage, addresses=(LOOPBACK,), port=port)

    def order(self, order: Order) -> Order:
        """An order in which stages are where they are reached from here."""
        if not isinstance(order, Form):
            return order
        return msgspec.structs.replace(order, ring=tuple(map(self.address, order.ring)))

    async def latency(self, peer: str) -> float | None:
        """Seconds of the one way to a member by its detour, as its end answers; ``None``: none."""
        detour = self._to(peer)
        if detour is None:
            return None
        loop, trips = asyncio.get_running_loop(), []
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await self._dial(detour, ECHO)
                try:
                    for _ in range(_TRIPS):
                        began = loop.time()
                        writer.write(b"?")
                        await reader.readexactly(1)
                        trips.append(loop.time() - began)
                finally:
                    writer.transport.abort()
        return min(trips) / 2 if trips else None

    # --- the end that dials ------------------------------------------------------------------

    async def _attend(self, detour: Detour, door: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(door)
            except OSError:
                await asyncio.sleep(_AGAIN_S)
                continue
            if len(self._tasks[detour.id]) >= MAX_CONNECTIONS:
                connection.close()
            else:
                self._spawn(detour.id, self._carry(detour, connection, port))

    async def _carry(self, detour: Detour, connection: socket.socket, port: int) -> None:
        local = await stream_of(connection)
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                far = await self._dial(detour, port)
        except BaseException:
            local[1].transport.abort()
            raise
        await splice(local, far)

    async def _dial(self, detour: Detour, port: int) -> Stream:
        stream = await _reach(detour)
        stream[1].write(port.to_bytes(PORT_BYTES, "big"))
        return stream

    # --- the end that waits ------------------------------------------------------------------

    async def _wait(self, detour: Detour) -> None:
        """Always have a connection at the relay that waits for the other end."""
        tries = 0
        while tries < _TRIES:
            try:
                stream = await _await_other(detour)
            except TimeoutError:
                continue  # nobody has come: a new connection waits on
            except (OSError, EOFError) as error:
                tries += 1
                log.debug("no relay: %r", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            tries = 0
            self._spawn(detour.id, self._serve(stream))
        log.warning("the relay for %s is not reached any more", detour.peer)

    async def _serve(self, stream: Stream) -> None:
        """The other end has come, and says which port it wants."""
        try:
            async with asyncio.timeout(CONNECT_S):
                port = int.from_bytes(await stream[0].readexactly(PORT_BYTES), "big")
                if port == ECHO:
                    await _echo(stream)
                    return
                if port not in self._allowed():
                    log.warning("port %d was asked for by a detour, and is none of ours", port)
                    return
                local = await asyncio.open_connection(self._host, port)
            await splice(local, stream)
        finally:
            stream[1].transport.abort()

    # --- housekeeping ------------------------------------------------------------------------

    def _to(self, peer: str) -> Detour | None:
        found = (one for one in self._detours.values() if one.peer == peer)
        return next((one for one in found if one.role == "dials"), None)

    def _end(self, id: int) -> None:
        detour = self._detours.pop(id, None)
        if detour is None:
            return
        for task in self._tasks.pop(id):
            task.cancel()
        if detour.role == "dials":
            for key in [key for key in self._doors if key[0] == detour.peer]:
                del self._doors[key]
            self._on_change(detour.peer)

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


def _same(one: Detour, other: Detour) -> bool:
    return (one.peer, one.role) == (other.peer, other.role) or one.id == other.id


async def _reach(detour: Detour) -> Stream:
    """Connect to the relay, and prove that we belong there.

    Raises:
        OSError, EOFError: it can't be reached, or doesn't want us.
    """
    stream = await _connect(detour.addresses, detour.port)
    try:
        await enter(stream, detour.id, detour.role, detour.secret)
    except BaseException:
        stream[1].transport.abort()
        raise
    return stream


async def _await_other(detour: Detour) -> Stream:
    """A connection to the relay on which the other end has come.

    Raises:
        TimeoutError: it has not.
        OSError, EOFError: the relay can't be reached, or doesn't want us.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            stream = await _reach(detour)
    except TimeoutError as error:
        raise ConnectionError("the relay says nothing") from error
    try:
        async with asyncio.timeout(WAIT_S):
            if await stream[0].readexactly(1) != GO:
                raise ConnectionError("the relay says what no relay says")
    except BaseException:
        stream[1].transport.abort()
        raise
    return stream


async def _connect(hosts: Sequence[str], port: int) -> Stream:
    failure: OSError = ConnectionError("the relay has no address")
    for host in hosts:
        try:
            async with asyncio.timeout(CONNECT_S / 2):
                return await asyncio.open_connection(host, port)
        except OSError as error:  # a TimeoutError is one
            failure = error
    raise failure


async def _echo(stream: Stream) -> None:
    for _ in range(_TRIPS):
        stream[1].write(await stream[0].readexactly(1))
