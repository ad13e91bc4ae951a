"""A forwarding network between PCs that can be cut, reset and slowed per PC.

Each PC listens on its own loopback address; others reach it by a second one that forwards here. The
process at a connection's other end identifies its PC, so a PC that is cut off still reaches itself.
A port without a listener shows as a reset, not as a refusal.
"""

import asyncio
import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import psutil

from tools.chaos.pc import Pc, find_home

_CHUNK = 65536
#: Bytes per read on limited links, and reads in flight.
_SLOW_CHUNK = 4096
_QUEUED = 64
_START_S = 10.0
#: ``struct linger``: end a connection with a reset.
_RESET = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)


@dataclass(slots=True, eq=False)
class _Way:
    """State of one PC's network, both directions."""

    #: Bytes pass while set.
    whole: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    #: Bytes/s; 0 = without limit.
    rate: float = 0.0


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection forwarded from ``source`` to ``target``."""

    source: tuple[str, int]
    target: str
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    #: Network states its bytes pass; none if a PC reaches itself.
    ways: list[_Way]
    #: PCs at its ends; the source becomes known later.
    ends: frozenset[str]


class Network:
    """Forwards between PCs, in a thread of its own, for the life of a ``with`` block."""

    def __init__(self, pcs: Sequence[Pc]) -> None:
        self._pcs = {pc.name: pc for pc in pcs}
        self._connections: set[_Connection] = set()
        #: Connections whose opener is unknown yet.
        self._strangers: list[_Connection] = []
        self._accepted: asyncio.Event
        self._seen = self._sought = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._ways: dict[str, _Way] = {}
        self._loop = asyncio.new_event_loop()
        self._ready: Future[None] = Future()
        self._over: asyncio.Event
        self._thread = threading.Thread(target=self._serve_all, name="chaos-net", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.result(_START_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call_in_loop(lambda: self._over.set())
        self._thread.join()

    @property
    def settled(self) -> bool:
        """Whether all openers have been looked up."""
        return self._seen == self._sought

    def cut(self, name: str) -> None:
        """Hold all bytes between that PC and the others; connections stay open."""
        self._call_in_loop(self._ways[name].whole.clear)

    def slow(self, name: str, delay_s: float, rate: float) -> None:
        """Delay what that PC and the others send, and limit it to ``rate`` bytes/s."""

        def change() -> None:
            self._ways[name].delay_s, self._ways[name].rate = delay_s, rate

        self._call_in_loop(change)

    def reset(self, name: str) -> None:
        """Break all connections between that PC and the others, once."""

        def change() -> None:
            for connection in self._connections:
                if name in connection.ends and connection.ways:
                    for writer in connection.writers:
                        _abort_writer(writer)

        self._call_in_loop(change)

    def mend(self, name: str) -> None:
        """Undo :meth:`cut` and :meth:`slow`."""
        self.slow(name, 0.0, 0.0)
        self._call_in_loop(self._ways[name].whole.set)

    def _call_in_loop(self, work: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(work)

    def _serve_all(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._run_relays())
            except OSError as error:
                self._ready.set_exception(error)

    async def _run_relays(self) -> None:
        self._over, self._accepted = asyncio.Event(), asyncio.Event()
        for name in self._pcs:
            self._ways[name] = _Way()
            self._ways[name].whole.set()
        async with contextlib.AsyncExitStack() as stack:
            for pc in self._pcs.values():
                for port in pc.place.for_others:
                    await self._listen_for(stack, pc, port)
            knowing = asyncio.create_task(self._find_openers())
            self._tasks.add(knowing)
            self._ready.set_result(None)
            await self._over.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen_for(self, stack: contextlib.AsyncExitStack, pc: Pc, port: int) -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._relay_connection(pc, port, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(accept, pc.place.advertised, port)
        stack.callback(server.close)

    async def _relay_connection(
        self, target: Pc, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(target.place.host, port)
        except OSError:
            _abort_writer(writer)
            return
        connection = _Connection(
            source=tuple(writer.get_extra_info("peername")[:2]),
            target=target.name,
            writers=(writer, far_writer),
            ways=[self._ways[target.name]],
            ends=frozenset((target.name,)),
        )
        self._connections.add(connection)
        self._strangers.append(connection)
        self._seen += 1
        self._accepted.set()
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy_bytes(reader, far_writer, connection.ways))
                both.create_task(_copy_bytes(far_reader, writer, connection.ways))
        except* OSError:
            pass  # one side closed, so both do
        finally:
            self._connections.discard(connection)
            _abort_writer(writer)
            _abort_writer(far_writer)

    async def _find_openers(self) -> None:
        """Find out which PCs opened connections, without delaying them."""
        while True:
            await self._accepted.wait()
            self._accepted.clear()
            strangers, self._strangers = self._strangers, []
            owners = await asyncio.to_thread(self._map_addresses)
            for connection in strangers:
                source = owners.get(connection.source)
                if source == connection.target:
                    connection.ways.clear()
                elif source is not None:
                    connection.ways.append(self._ways[source])
                    connection.ends |= {source}
            self._sought += len(strangers)

    def _map_addresses(self) -> dict[tuple[str, int], str]:
        """Map local addresses of connections to PCs."""
        names = {str(pc.home): name for name, pc in self._pcs.items()}
        pids: dict[int, str | None] = {}
        found = {}
        for connection in psutil.net_connections("tcp4"):
            if connection.pid is None or not connection.raddr:
                continue
            if connection.pid not in pids:
                pids[connection.pid] = names.get(find_home(connection.pid) or "")
            name = pids[connection.pid]
            if name is not None:
                found[(connection.laddr.ip, connection.laddr.port)] = name
        return found


async def _copy_bytes(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ways: Sequence[_Way]
) -> None:
    """Copy one direction; its end also ends the other."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED)
    async with asyncio.TaskGroup() as both:
        delivery = both.create_task(_write_delayed(queue, writer, ways))
        free = 0.0
        while data := await reader.read(_SLOW_CHUNK if any(way.rate for way in ways) else _CHUNK):
            rate = min((way.rate for way in ways if way.rate), default=float("inf"))
            free = max(free, time.monotonic()) + len(data) / rate
            await queue.put((free + sum(way.delay_s for way in ways), data))
        await queue.put((free, b""))
        await delivery
        raise ConnectionResetError("closed by its other end")


async def _write_delayed(
    queue: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter, ways: Sequence[_Way]
) -> None:
    while True:
        at, data = await queue.get()
        if not data:
            return
        pause = at - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        for way in ways:
            await way.whole.wait()
        writer.write(data)
        await writer.drain()


def _abort_writer(writer: asyncio.StreamWriter) -> None:
    """Close with a reset."""
    sock: Any = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
