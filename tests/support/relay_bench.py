"""A relay with its two ends on loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from molink.wire.messages.relay import PEER_ARRIVED, OpenRelay, RelayedRoute
from molinkd.peer.membership.relay_server import RelayServer
from molinkd.peer.membership.relayed_routes import RelayedRoutes, RouteEvents
from molinkd.splice import CHUNK_BYTES, Stream
from tests.support.net import until

SECRET, END_SECRET = b"s" * 32, b"e" * 32
ID = 7


class Bench:
    """A relay, its two ends, and a server behind the one that waits."""

    def __init__(self, relay: RelayServer) -> None:
        self.relay = relay
        self.port = 0
        self.allowed: set[int] = set()
        self.changed: list[str] = []
        #: Relays that the dialling end has reported.
        self.failed: list[tuple[str, int]] = []
        #: Relays that it has tried: peer, id and latency.
        self.tried: list[tuple[str, int, float | None]] = []
        events = RouteEvents(
            self.changed.append,
            lambda *relay: self.failed.append(relay),
            lambda *tried: self.tried.append(tried),
        )
        self.dialling = RelayedRoutes("127.0.0.1", set, events)
        self.waiting = RelayedRoutes("127.0.0.1", lambda: self.allowed, RouteEvents())
        self.server: asyncio.Server | None = None
        self.accepted: list[Stream] = []
        self.streams: list[Stream] = []

    async def serve(self) -> int:
        """Start a server that answers in capitals; returns its port."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.accepted.append((reader, writer))
            with suppress(OSError):
                while data := await reader.read(CHUNK_BYTES):
                    writer.write(data.upper())
                    await writer.drain()
            writer.close()

        self.server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = int(self.server.sockets[0].getsockname()[1])
        self.allowed.add(port)
        return port

    def open(
        self,
        id: int = ID,
        relay: RelayServer | None = None,
        *,
        beside: int = 0,
        is_direct: bool = False,
    ) -> None:
        order = OpenRelay(id=id, secret=SECRET, is_end=is_direct)
        self.port = (relay or self.relay).open_relay(order)
        reported = {
            "id": id,
            "secret": SECRET,
            "end_secret": END_SECRET,
            "addresses": ("127.0.0.1",),
            "port": self.port,
            "beside": beside,
            "is_direct": is_direct,
        }
        self.waiting.on_message(RelayedRoute(peer="a", role="waits", **reported))
        self.dialling.on_message(RelayedRoute(peer="b", role="dials", **reported))

    async def dial(self, port: int) -> Stream:
        where = self.dialling.local_endpoint("b", port)
        return await self.connect(int(where.rpartition(":")[2]))

    def uses_route(self, id: int) -> bool:
        """Whether all connections use a route (or none, ``NO_ROUTE``), at both ends."""
        parts = (self.dialling, self.waiting)
        used = [{one.route for one in part._streams.values() if not one.is_over} for part in parts]
        return used == [{id}, {id}]

    async def visit(self) -> Stream:
        return await self.connect(self.port)

    async def connect(self, port: int) -> Stream:
        stream = await asyncio.open_connection("127.0.0.1", port)
        self.streams.append(stream)
        return stream

    async def close(self) -> None:
        await self.dialling.close()
        await self.waiting.close()
        await self.relay.close()
        for _, writer in (*self.accepted, *self.streams):
            writer.transport.abort()
        if self.server is not None:
            self.server.close()
            await self.server.wait_closed()


class EagerServer:
    """A relay or rendezvous that claims at once that the other end has come."""

    def __init__(self, sends: int, reads: int, then: bytes | None = None) -> None:
        """It ``sends`` bytes of a nonce and ``reads`` a proof.

        Then it sends ``then`` and holds the connection, or closes it without.
        """
        self._sends, self._reads, self._then = sends, reads, then
        self.num_answers = 0
        self._streams: list[Stream] = []

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._port = int(self._server.sockets[0].getsockname()[1])
        return self._port

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams.append((reader, writer))
        writer.write(bytes(self._sends))
        with suppress(OSError, EOFError):
            await reader.readexactly(self._reads)
            self.num_answers += 1
            writer.write(PEER_ARRIVED + (self._then or b""))
            await writer.drain()
        if self._then is None:
            writer.close()

    async def visit(self, times: int) -> None:
        """Connect one after the other, which takes long enough to see others' connections."""
        for _ in range(times):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            await reader.readexactly(self._sends)
            writer.transport.abort()

    async def close(self) -> None:
        """Close all connections."""
        self._server.close()
        for _, writer in self._streams:
            writer.transport.abort()
        await self._server.wait_closed()
        await asyncio.sleep(0)


@asynccontextmanager
async def open_bench() -> AsyncIterator[Bench]:
    """A bench that leaves no task behind."""
    made = Bench(RelayServer("127.0.0.1", 0))
    yield made
    await made.close()
    await until(lambda: not any("molink" in one.get_name() for one in asyncio.all_tasks()))
    await asyncio.sleep(0)  # aborted connections close one loop iteration later


async def ended(stream: Stream) -> bytes:
    """Read until the other side closes."""
    async with asyncio.timeout(20):
        with suppress(OSError):
            return await stream[0].read()
    return b""
