"""Connections that move from one relay to another, or to the other end itself, on loopback."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from molink.wire.messages.relay import (
    CHOSEN,
    DIRECT_PROOF_BYTES,
    PEER_ARRIVED,
    PORT_BYTES,
    CloseRelay,
)
from molinkd.peer.membership import relay_server, relayed_routes
from molinkd.peer.membership.relay_server import RelayServer
from molinkd.splice import Stream
from tests.support.net import until
from tests.support.relay_bench import ID, Bench, ended, open_bench

OTHER = 8
NONCE = b"n" * 16
_WINDOW, _PIECE = 1 << 16, 4096


class TwoRelays:
    """A bench with a second relay."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.second = bench, RelayServer("127.0.0.1", 0)

    async def dial(self) -> Stream:
        """A connection through the first relay."""
        port = await self.bench.serve()
        self.bench.open()
        stream = await self.bench.dial(port)
        await exchange(stream, b"begin")
        return stream

    async def try_route(
        self, id: int, relay: RelayServer, *, beside: int, is_direct: bool = False
    ) -> float | None:
        """Open a relay beside the used one; returns the latency that was reported."""
        self.bench.open(id, relay, beside=beside, is_direct=is_direct)
        await until(lambda: self.bench.tried)
        peer, tried, latency = self.bench.tried.pop()
        assert (peer, tried) == ("b", id)
        return latency

    def close_route(self, id: int) -> None:
        """Close a route at both ends, as the coordinator orders."""
        for part in (self.bench.dialling, self.bench.waiting):
            part.on_message(CloseRelay(id=id))

    def drop_route(self, id: int) -> None:
        """End the time in which connections may leave a route."""
        for part in (self.bench.dialling, self.bench.waiting):
            part._drop_route(id)


async def exchange(stream: Stream, data: bytes) -> None:
    stream[1].write(data)
    assert await stream[0].readexactly(len(data)) == data.upper()


@pytest.fixture
async def two() -> AsyncIterator[TwoRelays]:
    async with open_bench() as bench:
        made = TwoRelays(bench)
        yield made
        await bench.dialling.close()
        await bench.waiting.close()
        await made.second.close()


class Traffic:
    """Sends random bytes over a connection, and checks that each returns once and in order."""

    def __init__(self, stream: Stream) -> None:
        self._reader, self._writer = stream
        self._sent, self._received = bytearray(), bytearray()
        self._is_over = False
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]

    async def _send(self) -> None:
        while not self._is_over:
            piece = secrets.token_bytes(_PIECE)
            self._sent += piece
            self._writer.write(piece)
            await self._writer.drain()
            await until(lambda: len(self._sent) - len(self._received) < _WINDOW)

    async def _receive(self) -> None:
        while not (self._is_over and len(self._received) == len(self._sent)):
            data = await self._reader.read(_WINDOW)
            assert data, "the connection broke"
            self._received += data

    async def pass_more(self) -> None:
        """Wait until further bytes have returned."""
        wanted = len(self._received) + 2 * _WINDOW
        receiving = self._tasks[1]
        await until(lambda: len(self._received) >= wanted or receiving.done())
        if receiving.done():
            receiving.result()

    async def finish(self) -> None:
        """Wait for the last bytes."""
        self._is_over = True
        self._writer.write(b"z")  # so that the reader wakes up
        self._sent += b"z"
        await asyncio.gather(*self._tasks)
        assert self._received == self._sent.upper()


async def test_a_stream_moves_from_relay_to_relay(two: TwoRelays) -> None:
    traffic = Traffic(await two.dial())
    used, relays = ID, [two.second, two.bench.relay]
    for id in range(OTHER, OTHER + 6):
        latency = await two.try_route(id, relays[id % 2], beside=used)
        assert latency is not None
        assert 0 < latency < 5
        await traffic.pass_more()
        assert not two.bench.uses_route(id)
        two.close_route(used)
        await until(lambda id=id: two.bench.uses_route(id))
        two.drop_route(used)
        relays[1 - id % 2].close_relay(used)
        await traffic.pass_more()
        used = id
    await traffic.finish()
    assert two.bench.failed == []
    assert two.bench.changed == ["b"]


async def test_new_connections_use_the_next_relay(two: TwoRelays) -> None:
    first = await two.dial()
    port = min(two.bench.allowed)
    await two.try_route(OTHER, two.second, beside=ID)
    two.close_route(ID)
    await until(lambda: two.bench.uses_route(OTHER))
    two.bench.relay.close_relay(ID)
    second = await two.bench.dial(port)
    for one in (first, second):
        await exchange(one, b"again")


async def test_a_relay_that_was_only_tried_changes_nothing(two: TwoRelays) -> None:
    stream = await two.dial()
    await two.try_route(OTHER, two.second, beside=ID)
    two.close_route(OTHER)
    two.second.close_relay(OTHER)
    await exchange(stream, b"again")
    assert two.bench.uses_route(ID)
    assert two.bench.changed == ["b"]


async def test_a_relay_that_can_not_be_reached_is_reported(two: TwoRelays) -> None:
    stream = await two.dial()
    two.bench.open(OTHER, two.second, beside=ID)
    two.second.close_relay(OTHER)
    await until(lambda: two.bench.tried)
    assert two.bench.tried == [("b", OTHER, None)]
    await exchange(stream, b"again")


async def test_a_connection_to_the_other_end_outlives_all_routes(two: TwoRelays) -> None:
    """Nothing tells this PC's programs to connect again."""
    stream = await two.dial()
    await two.try_route(OTHER, two.second, beside=ID, is_direct=True)
    two.close_route(ID)
    await until(lambda: two.bench.uses_route(OTHER))
    two.drop_route(ID)
    two.bench.relay.close_relay(ID)
    two.close_route(OTHER)
    two.second.close_relay(OTHER)
    assert not two.bench.dialling.has_route("b")
    await exchange(stream, b"again")
    stream[1].close()
    await until(lambda: not two.second._kept)


async def test_a_stream_that_can_not_move_stays_until_its_route_ends(two: TwoRelays) -> None:
    stream = await two.dial()
    await two.try_route(OTHER, two.second, beside=ID)
    two.second.close_relay(OTHER)
    two.close_route(ID)
    await exchange(stream, b"again")
    two.drop_route(ID)
    assert await ended(stream) == b""
    assert two.bench.failed == []


async def test_a_new_leaders_route_takes_over(two: TwoRelays) -> None:
    """It knows nothing of the former one."""
    stream = await two.dial()
    two.bench.open(OTHER, two.second)
    await until(lambda: two.bench.uses_route(OTHER))
    two.drop_route(ID)
    two.bench.relay.close_relay(ID)
    await exchange(stream, b"again")
    assert two.bench.changed == ["b"]
    assert two.bench.tried == []


# --- attacks ----------------------------------------------------------------------------------


async def ask_to_move(two: TwoRelays, id: int, nonce: bytes) -> Stream:
    """A connection of somebody who knows a relay's secret, but not that of the ends."""
    far = await relayed_routes._connect_relay(two.bench.dialling._routes[id])
    two.bench.streams.append(far)
    far[1].write(relayed_routes.MOVE_PORT.to_bytes(PORT_BYTES, "big") + nonce)
    assert await far[0].readexactly(1) == PEER_ARRIVED
    await relayed_routes.read_addresses(far[0])
    return far


@pytest.mark.parametrize("says", [b"x" * DIRECT_PROOF_BYTES + CHOSEN, b""])
async def test_a_stranger_can_not_take_a_stream(
    two: TwoRelays, monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    """A relay that dials in an end's place proves nothing; the stream stays where it is."""
    monkeypatch.setattr(relayed_routes, "MOVE_TIMEOUT_S", 60.0 if says else 0.1)
    stream = await two.dial()
    nonce = next(one.nonce for one in two.bench.waiting._streams.values())
    await two.try_route(OTHER, two.second, beside=ID)
    far = await ask_to_move(two, OTHER, nonce)
    far[1].write(says)
    assert await ended(far) == b""
    await exchange(stream, b"again")
    assert two.bench.uses_route(ID)


async def test_a_move_of_an_unknown_stream_is_rejected(two: TwoRelays) -> None:
    stream = await two.dial()
    far = await ask_to_move(two, ID, NONCE)
    assert await ended(far) == b""
    await exchange(stream, b"again")


async def test_a_relay_can_not_answer_a_measurement(
    two: TwoRelays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It mirrors what an end sends; only the other end's signs count."""

    async def mirror(one: Stream, other: Stream, _: object) -> None:
        while data := await one[0].read(_WINDOW):
            one[1].write(data)
        other[1].transport.abort()

    await two.dial()
    monkeypatch.setattr(relay_server, "splice_streams", mirror)
    assert await two.try_route(OTHER, two.second, beside=ID) is None
