"""A relay and its ends on loopback, against strangers and slow readers."""

import asyncio
import secrets
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from molink.errors import WireError
from molink.util.token_bucket import RateLimit
from molink.wire.messages.instructions import FormPipeline, StageAddress
from molink.wire.messages.relay import (
    ADDRESS_BYTES,
    NONCE_BYTES,
    PEER_ARRIVED,
    PORT_BYTES,
    PROOF_BYTES,
    RECORD_LENGTH,
    SIGN_BYTES,
    STREAM_NONCE_BYTES,
    CloseRelay,
    OpenRelay,
    RelayedRoute,
    SignOfLife,
    compute_proof,
    encode_address,
)
from molinkd.peer.membership import relay_server as module
from molinkd.peer.membership import relayed_routes as ends
from molinkd.peer.membership import relayed_stream
from molinkd.peer.membership.relay_server import (
    MAX_FROM_ENDS,
    MAX_STRANGERS,
    MAX_STRANGERS_PER_ADDRESS,
    ConnectionLimits,
    RelayServer,
    authenticate_end,
)
from molinkd.peer.membership.relayed_routes import RelayedRoutes, RouteEvents
from molinkd.splice import CHUNK_BYTES, Stream
from molinkd.tasks import cancel_tasks
from tests.support.net import Flood, until
from tests.support.relay_bench import (
    END_SECRET,
    ID,
    SECRET,
    Bench,
    EagerServer,
    ended,
    open_bench,
)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with open_bench() as made:
        yield made


async def test_bytes_flow_both_ways_over_several_connections(bench: Bench) -> None:
    port = await bench.serve()
    bench.open()
    assert bench.changed == ["b"]
    for text in (b"first", b"x" * 300_000, b"third"):
        reader, writer = await bench.dial(port)
        writer.write(text)
        async with asyncio.timeout(20):
            assert await reader.readexactly(len(text)) == text.upper()
        writer.close()
    assert bench.relay.bytes_relayed > 600_000


async def test_latency_over_the_relay(bench: Bench) -> None:
    bench.open()
    latency = await bench.dialling.measure_latency("b")
    assert latency is not None
    assert 0 < latency.latency < 5
    assert not latency.is_direct
    assert await bench.dialling.measure_latency("nobody") is None


async def test_a_relayed_route_reaches_our_own_ports_only(bench: Bench) -> None:
    port = await bench.serve()
    bench.allowed.clear()
    bench.open()
    stream = await bench.dial(port)
    stream[1].write(b"hello")
    assert await ended(stream) == b""
    assert bench.accepted == []


async def test_closing_one_side_closes_the_other(bench: Bench) -> None:
    port = await bench.serve()
    bench.open()
    streams = []
    for _ in range(2):
        reader, writer = await bench.dial(port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"A"
        streams.append((reader, writer))
    first, second = streams
    bench.accepted[0][1].close()  # the server's side
    assert await ended(first) == b""
    second[1].close()  # the client's side
    await until(lambda: bench.accepted[1][1].is_closing())
    await until(lambda: bench.relay.num_connections <= 1)


async def test_stage_addresses_are_localized(bench: Bench) -> None:
    bench.open()
    stages = [
        StageAddress(peer=peer, public_key="k" * 40, addresses=("10.9.9.9",), port=5468)
        for peer in ("a", "b")
    ]
    form = FormPipeline(pipeline="p", epoch=1, ring=tuple(stages), blocks=1, micro_batches=1)
    reported = bench.dialling.localize_order(form)
    assert isinstance(reported, FormPipeline)
    assert reported.ring[0] == stages[0]
    assert reported.ring[1].addresses == ("127.0.0.1",)
    assert reported.ring[1].port != 5468
    assert bench.dialling.localize_order(form) == reported
    bench.dialling.on_message(CloseRelay(id=ID))
    assert bench.dialling.localize_order(form) == form
    assert bench.changed == ["b", "b"]


async def test_the_own_stage_is_dialled_at_home() -> None:
    routes = RelayedRoutes("127.0.0.1", set, RouteEvents(), "me")
    stage = StageAddress(peer="me", public_key="k" * 40, addresses=("192.0.2.1",), port=5468)
    home = routes.localize_stage(stage)
    assert (home.addresses, home.port) == (("127.0.0.1",), 5468)


async def test_closing_a_relay_closes_its_connections(bench: Bench) -> None:
    port = await bench.serve()
    bench.open()
    stream = await bench.dial(port)
    stream[1].write(b"a")
    assert await stream[0].readexactly(1) == b"A"
    bench.relay.close_relay(ID)
    assert await ended(stream) == b""
    assert bench.relay.port == 0
    with pytest.raises(OSError, match=r".*"):
        await bench.visit()
    # The relay can be opened again.
    assert bench.relay.open_relay(OpenRelay(id=8, secret=SECRET)) != 0


# --- attacks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        b"GET / HTTP/1.1\r\n" + b"x" * 64,
        bytes(41),
        compute_proof(ID, "dials", b"wrong" + bytes(27), bytes(NONCE_BYTES)),
        compute_proof(ID, "dials", SECRET, bytes(NONCE_BYTES)),  # the proof of another nonce
        compute_proof(99, "dials", SECRET, bytes(NONCE_BYTES)),
    ],
)
async def test_a_stranger_is_disconnected(bench: Bench, answer: bytes) -> None:
    port = await bench.serve()
    bench.open()
    await until(lambda: bench.relay.num_connections == 1)
    stream = await bench.visit()
    stream[1].write(answer)
    assert len(await ended(stream)) == NONCE_BYTES
    assert bench.relay.num_connections == 1
    good = await bench.dial(port)
    good[1].write(b"a")
    assert await good[0].readexactly(1) == b"A"


async def test_a_replayed_proof_is_rejected(bench: Bench) -> None:
    """A nonce is never repeated, so an overheard proof is useless."""
    bench.open()
    stream = await bench.visit()
    nonce = await stream[0].readexactly(NONCE_BYTES)
    overheard = compute_proof(ID, "waits", SECRET, nonce)
    again = await bench.visit()
    assert await again[0].readexactly(NONCE_BYTES) != nonce
    again[1].write(overheard)
    assert await ended(again) == b""
    stream[1].close()


async def test_silent_connections_time_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TALK_S", 0.2)
    bench.open()
    stream = await bench.visit()
    assert len(await ended(stream)) == NONCE_BYTES


needs_addresses = pytest.mark.skipif(sys.platform == "darwin", reason="127.0.0.2 is not there")
#: Addresses that flood, and whether an end shares one of them.
FLOODS = [
    pytest.param(("127.0.0.2",), id="another address"),
    pytest.param(("127.0.0.1",), id="the address of the ends, as behind one router"),
    pytest.param(tuple(f"127.0.0.{n}" for n in range(2, 100)), id="many addresses"),
    pytest.param(tuple(f"127.0.0.{n}" for n in range(1, 5)), id="some, the ends' among them"),
]


@needs_addresses
@pytest.mark.parametrize("addresses", FLOODS)
@pytest.mark.parametrize("told", [(), ("127.0.0.1",)], ids=["unknown ends", "told ends"])
async def test_a_flood_of_strangers_does_not_lock_out_the_ends(
    bench: Bench, addresses: tuple[str, ...], told: tuple[str, ...]
) -> None:
    port = await bench.serve()
    bench.port = bench.relay.open_relay(OpenRelay(id=ID, secret=SECRET, ends=told))
    flood = Flood(bench.port, addresses, per_second=100)
    await until(lambda: len(flood) > 2 * MAX_STRANGERS)
    bench.open()
    for _ in range(6):
        good = await bench.dial(port)
        good[1].write(b"a")
        async with asyncio.timeout(30):
            assert await good[0].readexactly(1) == b"A"
        good[1].transport.abort()
    # A connection that lost its slot ends a moment later.
    await until(lambda: len(bench.relay._unauthenticated) <= MAX_STRANGERS + MAX_FROM_ENDS)
    await flood.end()


@needs_addresses
async def test_slots_are_bounded_by_address(bench: Bench) -> None:
    bench.port = bench.relay.open_relay(OpenRelay(id=ID, secret=SECRET))
    flood = Flood(bench.port, ("127.0.0.2",), per_second=200)
    await until(lambda: len(flood) > 2 * MAX_STRANGERS_PER_ADDRESS)
    await until(lambda: len(bench.relay._strangers) == MAX_STRANGERS_PER_ADDRESS)
    await flood.end()
    await until(lambda: not bench.relay._strangers)


async def test_an_end_that_has_authenticated_has_a_slot_kept(bench: Bench) -> None:
    """An end behind a router connects from another address than it reports."""
    bench.port = bench.relay.open_relay(OpenRelay(id=ID, secret=SECRET, ends=("10.0.0.7",)))
    await bench.visit()
    await until(lambda: len(bench.relay._strangers) == 1)
    end = await bench.visit()
    await authenticate_end(end, ID, "waits", SECRET)
    await until(lambda: bench.relay.num_connections == 1)
    await bench.visit()
    await until(lambda: len(bench.relay._from_ends) == 1)
    assert len(bench.relay._strangers) == 1


async def test_connections_per_relay_are_bounded(bench: Bench) -> None:
    bench.relay = RelayServer("127.0.0.1", 0, limits=ConnectionLimits(100, 4))
    bench.open()
    streams = []
    for _ in range(6):
        stream = await bench.visit()
        await authenticate_end(stream, ID, "dials", SECRET)
        streams.append(stream)
    assert await ended(streams[-1]) == b""
    for _, writer in streams:
        writer.transport.abort()


async def test_a_waiting_connection_is_replaced_by_the_next(bench: Bench) -> None:
    bench.port = bench.relay.open_relay(OpenRelay(id=ID, secret=SECRET))
    first, second = await bench.visit(), await bench.visit()
    await authenticate_end(first, ID, "waits", SECRET)
    await until(lambda: bench.relay.num_connections == 1)
    await authenticate_end(second, ID, "waits", SECRET)
    assert await ended(first) == b""
    dialling = await bench.visit()
    await authenticate_end(dialling, ID, "dials", SECRET)
    dialling[1].write(b"hello")
    arrival = PEER_ARRIVED + 2 * encode_address(None)  # the ends are on the relay's own PC
    assert await second[0].readexactly(len(arrival) + 5) == arrival + b"hello"
    for _, writer in (second, dialling):
        writer.transport.abort()


async def test_a_slow_reader_slows_the_sender_and_memory_is_bounded(bench: Bench) -> None:
    bench.port = bench.relay.open_relay(OpenRelay(id=ID, secret=SECRET))
    reading, sending = await bench.visit(), await bench.visit()
    await authenticate_end(reading, ID, "waits", SECRET)
    await authenticate_end(sending, ID, "dials", SECRET)
    await reading[0].readexactly(len(PEER_ARRIVED) + 2 * ADDRESS_BYTES)
    reading[1].transport.pause_reading()  # type: ignore[attr-defined]
    data, sent = secrets.token_bytes(1 << 20), 0
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while sent < 1 << 30:
                sending[1].write(data)
                await sending[1].drain()
                sent += len(data)
    # The limit is what the sockets of three processes buffer, far less than a gigabyte.
    assert bench.relay.bytes_relayed < 64 << 20
    stuck = bench.relay.bytes_relayed
    assert sent - stuck < 64 << 20
    for _, writer in (reading, sending):
        writer.transport.abort()
    await until(lambda: bench.relay.num_connections == 0)


async def test_the_byte_rate_is_limited(bench: Bench) -> None:
    slow = RelayServer("127.0.0.1", 0, rate=1e6)
    bench.relay = slow
    port = await bench.serve()
    bench.open()
    reader, writer = await bench.dial(port)
    loop = asyncio.get_running_loop()
    began, size = loop.time(), 500_000
    writer.write(b"x" * size)
    await reader.readexactly(size)
    assert loop.time() - began > 0.8  # in both directions


async def test_an_unreachable_relay_is_retried_slowly(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "_AGAIN_S", 0.01)
    monkeypatch.setattr(ends, "_TRIES", 3)
    bench.open()
    await until(lambda: bench.relay.num_connections == 1)
    bench.relay.close_relay(ID)
    await until(lambda: not bench.waiting._tasks[ID])
    assert await bench.dialling.measure_latency("b") is None


async def test_a_relay_with_addresses_of_nonsense_is_unreachable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ends, "_AGAIN_S", 0.01)
    monkeypatch.setattr(ends, "_TRIES", 3)
    reported = {"id": ID, "secret": SECRET, "end_secret": END_SECRET, "port": 1}
    addresses = ("a..b", "x" * 64, "x\x00")
    bench.waiting.on_message(RelayedRoute(peer="a", role="waits", addresses=addresses, **reported))
    bench.dialling.on_message(RelayedRoute(peer="b", role="dials", addresses=addresses, **reported))
    await until(lambda: not bench.waiting._tasks[ID])
    assert await ended(await bench.dial(80)) == b""
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_relayed_routes_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "MAX_ROUTES", 1)
    bench.open()
    reported = {
        "id": 9,
        "secret": SECRET,
        "end_secret": END_SECRET,
        "addresses": ("127.0.0.1",),
        "port": bench.port,
    }
    bench.dialling.on_message(RelayedRoute(peer="c", role="dials", **reported))
    assert bench.dialling.local_endpoint("c", 1) == ""
    assert bench.dialling.local_endpoint("b", 1) != ""

    def full(*_: object) -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr(ends, "listen_on_free_port", full)
    assert bench.dialling.local_endpoint("b", 2) == ""


@pytest.mark.parametrize("then", [None, bytes(2 * ADDRESS_BYTES)], ids=["closes", "holds"])
async def test_a_relay_that_announces_ends_without_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, then: bytes | None
) -> None:
    """The waiting end bounds its connections, and the rate at which it comes back."""
    monkeypatch.setattr(ends, "WAIT_LIMIT", RateLimit(burst=8, per_second=1e-6))
    monkeypatch.setattr(ends, "MAX_SERVED", 3)
    relay = EagerServer(NONCE_BYTES, PROOF_BYTES, then)
    route = RelayedRoute(
        id=ID,
        peer="a",
        role="waits",
        secret=SECRET,
        end_secret=END_SECRET,
        addresses=("127.0.0.1",),
        port=await relay.start(),
    )
    bench.waiting.on_message(route)
    await until(lambda: relay.num_answers == 8)
    await relay.visit(8)
    assert relay.num_answers == 8
    assert len(bench.waiting._tasks[ID]) <= 1 + 3
    await bench.waiting.close()
    await relay.close()


async def test_abandoned_relays_are_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.relay.open_relay(OpenRelay(id=1, secret=SECRET))
    monkeypatch.setattr(module, "UNUSED_TIMEOUT_S", -1.0)
    bench.relay.open_relay(OpenRelay(id=2, secret=SECRET))
    assert list(bench.relay._sessions) == [2]


# --- a hostile relay --------------------------------------------------------------------------

Pass = Callable[[bytes, asyncio.StreamWriter], None]


def pass_nothing(data: bytes, writer: asyncio.StreamWriter) -> None:
    """Drop the data."""


def pass_slowly(data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(data[:1])


def alter(data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(data[:-1] + bytes([data[-1] ^ 1]))


class Forger:
    """Drops the data and answers as an end would, but without the ends' secret."""

    def __init__(self) -> None:
        self._numbers: Counter[asyncio.StreamWriter] = Counter()

    def __call__(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        self._numbers[writer] += 1
        number = self._numbers[writer]
        sign = SignOfLife(number, number, 0).encode("waits", SECRET, bytes(16))
        writer.write(RECORD_LENGTH.pack(0) + sign)


class Dropper:
    """Relays keepalives only, and drops the data between them."""

    def __init__(self) -> None:
        self._rest: dict[asyncio.StreamWriter, bytes] = {}

    def __call__(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        rest = self._rest.get(writer, b"") + data
        while len(rest) >= RECORD_LENGTH.size:
            (length,) = RECORD_LENGTH.unpack_from(rest)
            end = RECORD_LENGTH.size + (length or SIGN_BYTES)
            if len(rest) < end:
                break
            if not length:
                writer.write(rest[:end])
            rest = rest[end:]
        self._rest[writer] = rest


def lie(monkeypatch: pytest.MonkeyPatch, passes: Pass, honest: int) -> Counter[str]:
    """Make the relay pass the first ``honest`` bytes of each end, and give the rest to ``passes``.

    It still answers echo requests. Returns how many chunks it has passed and given.
    """
    chunks = Counter[str]()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := await reader.read(CHUNK_BYTES):
            if passed < honest:
                chunks["passed"] += 1
                writer.write(data)
            else:
                chunks["given"] += 1
                passes(data, writer)
            passed += len(data)

    async def splice(one: Stream, other: Stream, _: object) -> None:
        ways = [
            asyncio.ensure_future(copy(one[0], other[1])),
            asyncio.ensure_future(copy(other[0], one[1])),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_tasks(*ways)
            other[1].transport.abort()

    monkeypatch.setattr(module, "splice_streams", splice)
    return chunks


@pytest.mark.parametrize("honest", [PORT_BYTES + STREAM_NONCE_BYTES, 200], ids=["at once", "later"])
@pytest.mark.parametrize(
    "passes",
    [pass_nothing, pass_slowly, alter, Forger()],
    ids=["nothing", "slowly", "altered", "forged"],
)
async def test_a_relay_that_lies_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, passes: Pass, honest: int
) -> None:
    """It answers probes, but drops or alters data.

    The end that notices first closes the connection.
    """
    monkeypatch.setattr(relayed_stream, "SIGN_INTERVAL_S", 0.02)
    port = await bench.serve()
    lie(monkeypatch, passes, honest)
    bench.open()
    for _ in range(ends.LOSS_LIMIT.burst + 1):
        stream = await bench.dial(port)
        stream[1].write(b"hello")
        await ended(stream)
    await until(lambda: bench.failed)
    assert set(bench.failed) == {("b", ID)}


def test_a_sign_of_life_is_of_one_end_of_one_connection() -> None:
    sign, nonce = SignOfLife(3, 2, 1), bytes(STREAM_NONCE_BYTES)
    data = sign.encode("waits", END_SECRET, nonce)
    assert len(data) == SIGN_BYTES
    assert SignOfLife.decode(data, "waits", END_SECRET, nonce) == sign
    for forged in (
        (data, "dials", END_SECRET, nonce),
        (data, "waits", SECRET, nonce),
        (data, "waits", END_SECRET, b"n" * STREAM_NONCE_BYTES),
        (data[:7] + b"\x04" + data[8:], "waits", END_SECRET, nonce),
    ):
        with pytest.raises(WireError):
            SignOfLife.decode(*forged)


async def test_a_relay_that_passes_signs_of_life_only_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayed_stream, "SIGN_INTERVAL_S", 0.02)
    port = await bench.serve()
    chunks = lie(monkeypatch, Dropper(), PORT_BYTES + STREAM_NONCE_BYTES)
    bench.open()
    for _ in range(ends.LOSS_LIMIT.burst + 1):
        stream, given = await bench.dial(port), chunks["given"]
        # Both ends' first chunks are relayed; each ends with a complete record.
        await until(lambda given=given: chunks["given"] > given + 2)
        stream[1].write(b"hello")
        await ended(stream)
    await until(lambda: bench.failed)


async def test_a_relay_that_cuts_connections_is_reported(bench: Bench) -> None:
    """The limit allows a few losses for other reasons."""
    port = await bench.serve()
    bench.open()
    for lost in range(ends.LOSS_LIMIT.burst + 1):
        assert len(bench.failed) == 0, lost
        stream = await bench.dial(port)
        stream[1].write(b"a")
        assert await stream[0].readexactly(1) == b"A"
        for task in bench.relay._sessions[ID].tasks:
            task.cancel()
        assert await ended(stream) == b""
    await until(lambda: bench.failed == [("b", ID)])


async def test_connections_given_up_without_an_answer_count_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage may close its connection before the relay's timeout."""
    monkeypatch.setattr(relayed_stream, "SIGN_INTERVAL_S", 0.02)
    monkeypatch.setitem(relayed_stream.MAX_UNANSWERED, "dials", 1 << 30)
    port = await bench.serve()
    chunks = lie(monkeypatch, pass_nothing, 200)
    bench.open()
    while not bench.failed:
        stream, given = await bench.dial(port), chunks["given"]
        stream[1].write(b"hello" * 100)
        # Both ends' signs of life remain unanswered.
        await until(lambda given=given: chunks["given"] > given + 20)
        stream[1].close()
    assert bench.failed == [("b", ID)]


async def test_ends_that_close_report_no_relay(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed port and a port that isn't molink's count neither."""
    monkeypatch.setattr(relayed_stream, "SIGN_INTERVAL_S", 0.02)
    monkeypatch.setattr(ends, "LOSS_LIMIT", RateLimit(1, 1e-6))
    port = await bench.serve()
    bench.open()
    closed = socket.create_server(("127.0.0.1", 0))
    refused = int(closed.getsockname()[1])
    closed.close()
    bench.allowed.add(refused)
    for _ in range(3):
        for wrong in (refused, 2):
            assert await ended(await bench.dial(wrong)) == b""
        stream = await bench.dial(port)
        stream[1].write(b"a")
        assert await stream[0].readexactly(1) == b"A"
        bench.accepted[-1][1].close()
        assert await ended(stream) == b""
    assert bench.failed == []


async def test_an_idle_connection_stays(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_stream, "SIGN_INTERVAL_S", 0.01)
    port = await bench.serve()
    bench.open()
    stream = await bench.dial(port)
    before = bench.relay.bytes_relayed
    # Many more keepalives than may be unanswered.
    await until(lambda: bench.relay.bytes_relayed - before > 100 * SIGN_BYTES)
    stream[1].write(b"a")
    assert await stream[0].readexactly(1) == b"A"
    assert bench.failed == []
