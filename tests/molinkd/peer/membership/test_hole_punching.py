"""Direct connections between the ends of a relayed one, on loopback."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from molink.errors import WireError
from molink.wire.messages.relay import (
    DIRECT_PROOF_BYTES,
    RECORD_LENGTH,
    STREAM_NONCE_BYTES,
    Address,
    CloseRelay,
    SignKind,
    SignOfLife,
    compute_direct_proof,
    decode_address,
    encode_address,
)
from molinkd.peer.membership import hole_punching as module
from molinkd.peer.membership import relay_server, relayed_routes
from molinkd.peer.membership.hole_punching import PunchBackoff, connect_shared, may_punch, punch
from molinkd.peer.membership.relayed_stream import NO_ROUTE, RelayedStream
from molinkd.splice import Stream, open_pair
from tests.support.coordinator_scene import lasting_port
from tests.support.net import until
from tests.support.relay_bench import END_SECRET, ID, Bench, ended, open_bench

NONCE = b"n" * STREAM_NONCE_BYTES


def address_of(stream: Stream) -> Address:
    host, port = stream[1].get_extra_info("peername")[:2]
    return host, port


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long timeouts, so that ends also meet on a busy machine."""
    monkeypatch.setattr(module, "PUNCH_S", 60.0)
    monkeypatch.setattr(module, "_PROVE_S", 20.0)


def can_share_ports() -> bool:
    """Whether a second socket gets the local port of a listening one: not under Wine."""
    with module._make_socket(socket.AF_INET, 0) as one:
        one.listen()
        try:
            module._make_socket(socket.AF_INET, one.getsockname()[1]).close()
        except OSError:
            return False
    return True


#: For tests whose ends meet.
needs_shared_ports = pytest.mark.skipif(
    not can_share_ports(), reason="sockets can't share a local port, as under Wine"
)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """A bench whose ends have addresses of their own, as on other PCs."""
    monkeypatch.setattr(relay_server, "_address_of_end", address_of)
    async with open_bench() as made:
        yield made


def free_ports() -> tuple[int, int]:
    """Two ports that no other program's outgoing connection gets meanwhile."""
    one = lasting_port()
    return one, next(port for port in iter(lasting_port, None) if port != one)


@needs_shared_ports
async def test_two_ends_meet() -> None:
    a, b = free_ports()
    one, other = await asyncio.gather(
        punch(a, ("127.0.0.1", b), "dials", END_SECRET, NONCE),
        punch(b, ("127.0.0.1", a), "waits", END_SECRET, NONCE),
    )
    one[1].write(b"hello")
    assert await other[0].readexactly(5) == b"hello"
    other[1].write(b"there")
    assert await one[0].readexactly(5) == b"there"
    one[1].close()
    assert await ended(other) == b""
    other[1].close()


@pytest.mark.parametrize("wrong", ["secret", "nonce"])
async def test_another_end_is_not_found(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(module, "PUNCH_S", 0.5)
    a, b = free_ports()
    other_secret = b"x" * 32 if wrong == "secret" else END_SECRET
    other_nonce = b"x" * STREAM_NONCE_BYTES if wrong == "nonce" else NONCE
    found = await asyncio.gather(
        punch(a, ("127.0.0.1", b), "dials", END_SECRET, NONCE),
        punch(b, ("127.0.0.1", a), "waits", other_secret, other_nonce),
        return_exceptions=True,
    )
    assert [type(one) for one in found] == [TimeoutError, TimeoutError]


async def dial(port: int) -> Stream:
    """Connect to an end as soon as it listens."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.01)


@needs_shared_ports
@pytest.mark.parametrize("says", [b"", b"x" * DIRECT_PROOF_BYTES, b"GET / HTTP/1.1\r\n\r\n"])
async def test_strangers_change_nothing(says: bytes) -> None:
    """The waiting end sends them nothing, and still meets its peer."""
    a, b = free_ports()
    waiting = asyncio.create_task(punch(b, ("127.0.0.1", a), "waits", END_SECRET, NONCE))
    strangers = [await dial(b) for _ in range(module._MAX_UNPROVEN - 1)]
    for _, writer in strangers:
        writer.write(says)
    one, other = await asyncio.gather(
        punch(a, ("127.0.0.1", b), "dials", END_SECRET, NONCE), waiting
    )
    one[1].write(b"hello")
    assert await other[0].readexactly(5) == b"hello"
    for stranger in strangers:
        assert await ended(stranger) == b""
    for _, writer in (one, other, *strangers):
        writer.transport.abort()


async def test_an_overheard_proof_is_of_one_connection_and_one_end() -> None:
    proof = compute_direct_proof("dials", END_SECRET, NONCE)
    assert len(proof) == DIRECT_PROOF_BYTES
    assert proof != compute_direct_proof("waits", END_SECRET, NONCE)
    assert proof != compute_direct_proof("dials", END_SECRET, b"m" * STREAM_NONCE_BYTES)


def test_an_address_is_told() -> None:
    for address in (("203.0.113.9", 40001), ("2001:db8::7", 40002), None):
        assert decode_address(encode_address(address)) == address


@pytest.mark.parametrize(
    ("other", "relay", "may"),
    [
        (("198.51.99.9", 40001), "8.8.8.8", True),
        (("198.51.99.9", 80), "8.8.8.8", False),  # a service's port, which no router chooses
        (("192.168.1.1", 9100), "8.8.8.8", False),  # a device of the home network
        (("100.64.0.7", 40001), "8.8.8.8", False),
        (("192.168.1.7", 40001), "192.168.1.3", True),
        (("127.0.0.1", 40001), "192.168.1.3", False),
        (("224.0.0.1", 40001), "192.168.1.3", False),
        (("169.254.1.1", 40001), "192.168.1.3", False),
        (("0.0.0.0", 40001), "192.168.1.3", False),
        (("2600::9", 40001), "8.8.8.8", False),
        (("2600::9", 40001), "2600::1", True),
        (("fd00::9", 40001), "2600::1", False),
    ],
)
def test_a_relay_can_not_point_anywhere(other: Address, relay: str, may: bool) -> None:
    assert may_punch(other, relay) is may


def test_failures_are_followed_by_longer_pauses() -> None:
    now = 0.0
    backoff = PunchBackoff(lambda: now)
    for _ in range(2):
        backoff.record_result("b", ok=False)
        assert backoff.is_due("b")
    pauses = []
    for _ in range(12):
        backoff.record_result("b", ok=False)
        began = now
        while not backoff.is_due("b"):
            now += 10.0
        pauses.append(now - began)
    assert pauses[:3] == [30, 60, 120]
    assert pauses[-1] == 3600
    assert backoff.is_due("c")
    backoff.record_result("b", ok=False)
    backoff.record_result("b", ok=True)
    assert backoff.is_due("b")


@needs_shared_ports
async def test_a_stream_moves_without_losing_a_byte(bench: Bench) -> None:
    port = await bench.serve()
    bench.open()
    reader, writer = await bench.dial(port)
    data = secrets.token_bytes(1 << 20).replace(b"a", b"b")
    received = bytearray()

    async def receive() -> None:
        while len(received) < len(data):
            received.extend(await reader.read(1 << 16))

    receiving = asyncio.create_task(receive())
    pieces = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    for number, piece in enumerate(pieces):
        writer.write(piece)
        await writer.drain()
        if number % 16 == 0:
            await until(lambda size=number * 4096: len(received) >= size)
    await receiving
    assert bytes(received) == data.upper()
    # The relay relays none of the data any more, and keeps only the next waiting connection.
    await until(lambda: bench.relay.num_connections == 1)
    before = bench.relay.bytes_relayed
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"HELLO"
    assert bench.relay.bytes_relayed == before
    bench.accepted[0][1].close()
    assert await ended((reader, writer)) == b""
    assert bench.failed == []


@needs_shared_ports
async def test_a_direct_connection_outlives_its_relay(bench: Bench) -> None:
    port = await bench.serve()
    bench.open()
    stream = await bench.dial(port)
    await until(lambda: bench.uses_route(NO_ROUTE))
    stream[1].write(b"a")
    assert await stream[0].readexactly(1) == b"A"
    for part in (bench.dialling, bench.waiting):
        part.on_message(CloseRelay(id=ID))
    bench.relay.close_relay(ID)
    assert not bench.dialling.has_route("b")
    stream[1].write(b"hello")
    assert await stream[0].readexactly(5) == b"HELLO"
    stream[1].close()
    await until(lambda: not bench.dialling._direct)


@needs_shared_ports
async def test_a_connection_follows_one_that_could_leave_the_relay(bench: Bench) -> None:
    """Its own attempts failed, before the routers' rules changed."""
    port = await bench.serve()
    bench.open()
    for _ in range(3):
        bench.dialling._punches.record_result("b", ok=False)
    stream = await bench.dial(port)
    stream[1].write(b"a")
    assert await stream[0].readexactly(1) == b"A"
    assert bench.uses_route(ID)
    bench.dialling._punches.drop_peer("b")
    measured = await bench.dialling.measure_latency("b")
    assert measured is not None
    assert measured.is_direct
    await until(lambda: bench.uses_route(NO_ROUTE))
    stream[1].write(b"b")
    assert await stream[0].readexactly(1) == b"B"


@needs_shared_ports
async def test_the_latency_is_that_of_the_direct_way(bench: Bench) -> None:
    bench.open()
    latency = await bench.dialling.measure_latency("b")
    assert latency is not None
    assert latency.is_direct
    assert bench.dialling.router.kind == bench.waiting.router.kind == "none"


async def test_a_lie_about_the_address_leaves_the_stream_with_the_relay(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process at that address reads at most a proof, which is useless elsewhere."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.close()

    monkeypatch.setattr(module, "PUNCH_S", 0.5)
    monkeypatch.setattr(module, "_PROVE_S", 0.1)
    target = await asyncio.start_server(listen, "127.0.0.1", 0)
    where = target.sockets[0].getsockname()[:2]
    monkeypatch.setattr(relay_server, "_address_of_end", lambda _: where)
    port = await bench.serve()
    bench.open()
    reader, writer = await bench.dial(port)
    writer.write(b"hello")
    assert await reader.readexactly(5) == b"HELLO"
    assert not bench.dialling._punches._failures
    await until(lambda: bench.dialling._punches._failures)
    writer.write(b"again")
    assert await reader.readexactly(5) == b"AGAIN"
    assert bench.failed == []
    writer.close()
    target.close()
    assert {len(one) for one in heard} <= {0, DIRECT_PROOF_BYTES}


async def test_an_end_that_moves_without_a_connection_is_cut(bench: Bench) -> None:
    near, far = await open_pair()
    local, program = await open_pair()
    stream = RelayedStream(far, "waits", END_SECRET, NONCE, ID)
    splicing = asyncio.create_task(stream.splice(local))
    sign = SignOfLife(1, 0, 0, SignKind.MOVED).encode("dials", END_SECRET, NONCE)
    near[1].write(RECORD_LENGTH.pack(0) + sign)
    with pytest.raises(WireError):
        await splicing
    for _, writer in (near, program):
        writer.transport.abort()


@needs_shared_ports
async def test_a_direct_connection_that_breaks_is_not_the_relays_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Stream] = []

    async def punched(*arguments: Any) -> Stream:
        found.append(await punch(*arguments))
        return found[-1]

    monkeypatch.setattr(relayed_routes, "punch", punched)
    port = await bench.serve()
    bench.open()
    stream = await bench.dial(port)
    stream[1].write(b"a")
    assert await stream[0].readexactly(1) == b"A"
    await until(lambda: bench.relay.num_connections == 1)
    for _, writer in found:
        writer.transport.abort()
    assert await ended(stream) == b""
    await until(lambda: bench.dialling._punches._failures)
    assert bench.failed == []


async def test_all_addresses_of_a_name_are_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PC without IPv6 also resolves names that have an IPv6 address."""
    port = await bench.serve()
    closed, _ = free_ports()

    async def find(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        targets = (("127.0.0.1", closed), (host, port))
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", one) for one in targets]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", find)
    (await connect_shared("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        await connect_shared("127.0.0.1", closed)


async def test_a_port_can_be_shared(bench: Bench) -> None:
    port = await bench.serve()
    one = await connect_shared("127.0.0.1", port)
    again = module._make_socket(socket.AF_INET, one.getsockname()[1])
    again.listen()
    again.close()
    one.close()
