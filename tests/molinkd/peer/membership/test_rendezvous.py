"""A rendezvous and its peers on loopback, with strangers, lies and floods."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from molink.errors import MolinkError
from molink.facts.identity import derive_peer_id
from molink.util.token_bucket import RateLimit
from molink.wire.messages.admin import StatusReply, StatusRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.relay import (
    NONCE_BYTES,
    PEER_ARRIVED,
    PROOF_BYTES,
    Claim,
    compute_proof,
)
from molink.wire.messages.rendezvous import (
    CONTROL,
    COORDINATOR,
    JOINED,
    MAX_WAITING,
    NOBODY,
    REGISTRATION_BYTES,
    RendezvousAddress,
    compute_registration,
    derive_session_secret,
    is_place,
    session_of_peer,
)
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender
from molinkd.peer.membership import relay_server
from molinkd.peer.membership import rendezvous_client as client_module
from molinkd.peer.membership import rendezvous_server as module
from molinkd.peer.membership.rendezvous_client import RendezvousClient
from molinkd.peer.membership.rendezvous_server import RendezvousServer
from molinkd.splice import CHUNK_BYTES, Stream
from molinkd.tasks import cancel_tasks
from tests.support.net import Flood, Net, until
from tests.support.relay_bench import EagerServer

SECRET = b"s" * 16
#: Names of tasks that end with the rendezvous and its clients.
TASKS = {"molink-relay", "molink-rendezvous", "molink-call", "molink-answer"}


class Bench:
    """A rendezvous, a registered peer with two sockets, and a caller."""

    def __init__(self) -> None:
        self.server = RendezvousServer(SECRET)
        self.port = self.server.listen("127.0.0.1", 0)
        self.address = RendezvousAddress(SECRET, "127.0.0.1", self.port)
        self.keys = KeyPair.generate()
        self.peer = derive_peer_id(self.keys.public)
        self.registered = self.client(self.keys)
        self.caller = self.client(KeyPair.generate())
        self.clients = [self.registered, self.caller]
        self.servers: list[asyncio.Server] = []
        self.streams: list[Stream] = []

    def client(self, keys: KeyPair) -> RendezvousClient:
        return RendezvousClient(self.address, keys, "127.0.0.1")

    async def serve(self, name: bytes) -> int:
        """A server that answers every chunk with its name; returns its port."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.streams.append((reader, writer))
            with suppress(OSError):
                while await reader.read(CHUNK_BYTES):
                    writer.write(name)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        self.servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def register(self) -> None:
        """Register the peer with its two sockets."""
        ports = {COORDINATOR: await self.serve(b"L"), CONTROL: await self.serve(b"D")}
        self.registered.start(lambda wanted: ports.get(wanted, 0))
        await until(lambda: self.waiting)

    @property
    def waiting(self) -> list[Stream]:
        """The peer's waiting connection."""
        session = self.server._sessions.get(session_of_peer(self.peer) | module._PEERS)
        return [] if session is None else session.waiting

    async def call(self, wanted: bytes = COORDINATOR) -> Stream:
        endpoint = self.caller.local_endpoint(self.peer, wanted)
        return await self.connect(int(endpoint.rpartition(":")[2]))

    async def visit(self, source: str = "127.0.0.1") -> tuple[Stream, bytes]:
        """A connection to the rendezvous, and the nonce that it sends."""
        stream = await self.connect(self.port, source)
        return stream, await stream[0].readexactly(NONCE_BYTES)

    async def connect(self, port: int, source: str = "127.0.0.1") -> Stream:
        stream = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        self.streams.append(stream)
        return stream

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.server.close()
        for _, writer in self.streams:
            writer.transport.abort()
        for server in self.servers:
            server.close()
            await server.wait_closed()


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(client_module, "_FAILURE_PAUSE_S", 0.0)
    monkeypatch.setattr(client_module, "_RETRY_S", (0.01,))
    monkeypatch.setattr(client_module, "_LEADER_CHECK_S", 1e6)
    made = Bench()
    yield made
    await made.close()
    await until(lambda: not any(one.get_name() in TASKS for one in asyncio.all_tasks()))
    await asyncio.sleep(0)  # aborted connections are closed in the loop's next iteration


def prove(peer: str, claim: Claim, nonce: bytes, secret: bytes = SECRET) -> bytes:
    id = session_of_peer(peer)
    return compute_proof(id, claim, derive_session_secret(secret, claim, id), nonce)


async def ended(stream: Stream) -> bytes:
    """Read until the other side ends the connection."""
    async with asyncio.timeout(20):
        with suppress(OSError):
            return await stream[0].read()
    return b""


async def talk(stream: Stream) -> bytes:
    """The first byte of an answer."""
    stream[1].write(b"?")
    async with asyncio.timeout(20):
        return await stream[0].readexactly(1)


# --- calls --------------------------------------------------------------------------------------


async def test_a_call_reaches_the_socket_that_it_names(bench: Bench) -> None:
    await bench.register()
    for _ in range(3):
        assert await talk(await bench.call(COORDINATOR)) == b"L"
        assert await talk(await bench.call(CONTROL)) == b"D"
    assert await ended(await bench.call(b"\x09")) == b""  # and no others
    assert bench.caller.find_failure(bench.peer) == ""
    assert bench.server.num_peers == 1


async def test_a_leader_waits_for_many_callers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_LEADER_CHECK_S", 0.01)
    await bench.register()
    await until(lambda: len(bench.waiting) == MAX_WAITING)
    streams = await asyncio.gather(*(bench.call() for _ in range(60)))
    assert await asyncio.gather(*map(talk, streams)) == [b"L"] * 60


async def test_nobody_is_registered(bench: Bench) -> None:
    assert await ended(await bench.call()) == b""
    assert bench.caller.find_failure(bench.peer) == "knows nothing of that PC"
    await bench.register()
    assert await talk(await bench.call()) == b"L"


async def test_a_rendezvous_that_is_gone_comes_back(bench: Bench) -> None:
    await bench.register()
    stream = await bench.call()
    assert await talk(stream) == b"L"
    await bench.server.close()
    assert await ended(stream) == b""
    assert await ended(await bench.call()) == b""
    assert bench.caller.find_failure(bench.peer) == "refuses connections"
    await until(lambda: not bench.registered.is_registered)
    bench.server = RendezvousServer(SECRET)
    bench.server.listen("127.0.0.1", bench.port)
    await until(lambda: bench.waiting)
    assert await talk(await bench.call()) == b"L"


async def test_a_lasting_failure_is_reported_once(bench: Bench) -> None:
    problems: list[str] = []
    bench.registered.on_problem = problems.append
    await bench.server.close()
    tries = []
    bench.registered._explain = lambda _: str(tries.append(1) or "is gone")  # type: ignore[method-assign]
    bench.registered.start(lambda _: 0)
    await until(lambda: len(tries) > 8)
    assert problems == [f"the rendezvous {bench.address.place} is gone"]


def test_a_far_rendezvous_gets_more_time() -> None:
    client = RendezvousClient(RendezvousAddress(SECRET, "meet.example", 1), OTHER, "127.0.0.1")
    found = []
    for client._round_trip in (0.0, 0.01, 0.1, 5.0):
        found.append(client.stretch_timeout(1.0))
    assert found == [1.0, 1.0, 2.0, client_module.MAX_TIMEOUT_S]


async def test_a_wrong_secret(bench: Bench) -> None:
    await bench.register()
    address = bench.address._replace(secret=b"w" * 16)
    wrong = RendezvousClient(address, KeyPair.generate(), "127.0.0.1")
    bench.clients.append(wrong)
    endpoint = wrong.local_endpoint(bench.peer, COORDINATOR)
    assert await ended(await bench.connect(int(endpoint.rpartition(":")[2]))) == b""
    assert "its secret has changed" in wrong.find_failure(bench.peer)


async def test_a_registered_peer_that_vanished(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection still looks open, as after a power cut, but a caller is told soon."""
    monkeypatch.setattr(module, "REGISTER_GAP_S", 0.1)
    stream, nonce = await bench.visit()
    stream[1].write(compute_registration(bench.keys.signer, bench.peer, SECRET, nonce))
    await until(lambda: bench.waiting)
    calling, nonce = await bench.visit()
    calling[1].write(prove(bench.peer, "calls", nonce) + COORDINATOR)
    assert await calling[0].readexactly(1) == JOINED
    assert await stream[0].readexactly(2) == PEER_ARRIVED + COORDINATOR
    calling, nonce = await bench.visit()
    calling[1].write(prove(bench.peer, "calls", nonce) + COORDINATOR)
    assert await ended(calling) == NOBODY
    # From then on a call is refused at once, until the peer registers again.
    monkeypatch.setattr(module, "REGISTER_GAP_S", 1e6)
    calling, nonce = await bench.visit()
    calling[1].write(prove(bench.peer, "calls", nonce) + COORDINATOR)
    assert await ended(calling) == NOBODY
    await bench.register()
    assert await talk(await bench.call()) == b"L"


async def test_a_registered_peer_that_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous knows that the peer has ended, so a query ends as soon."""
    monkeypatch.setattr(module, "REGISTER_GAP_S", 1e6)
    monkeypatch.setattr(module, "RENEW_GAP_S", 0.05)
    await bench.register()
    await bench.registered.close()
    failed = asyncio.create_task(bench.caller.wait_failed(bench.peer))
    assert await ended(await bench.call()) == b""
    assert await failed == "knows nothing of that PC"


def test_addresses() -> None:
    text = "c2VjcmV0IG9mIDE2IGJ5dA@[2001:db8::7]:99"
    address = RendezvousAddress.parse(text)
    assert (address.host, address.port, address.place) == ("2001:db8::7", 99, "[2001:db8::7]:99")
    assert str(address) == text
    assert "c2Vj" not in repr(address)
    assert RendezvousAddress.parse("c2VjcmV0IG9mIDE2IGJ5dA@meet.example").port == 5464
    for wrong in ("meet.example:5464", "x@meet.example", f"{text}0000", text.replace("99", "0")):
        with pytest.raises(ValueError, match="SECRET@HOST:PORT"):
            RendezvousAddress.parse(wrong)
    assert is_place(address.place)
    assert not any(map(is_place, ("", "meet.example", "a\x1b[2J:1", text)))


# --- strangers ----------------------------------------------------------------------------------


def register_as(peer: str, keys: KeyPair, nonce: bytes, secret: bytes = SECRET) -> bytes:
    return compute_registration(keys.signer, peer, secret, nonce)


OTHER = KeyPair.generate()
Answer = Callable[[str, bytes], bytes]
#: Answers to the nonce of a rendezvous, to be called with the peer's id and the nonce.
STRANGERS: dict[str, Answer] = {
    "no molink": lambda *_: b"GET / HTTP/1.1\r\n" + b"x" * 160,
    "a call without the secret": lambda peer, nonce: prove(peer, "calls", nonce, b"w" * 16),
    "a call of another nonce": lambda peer, _: prove(peer, "calls", bytes(NONCE_BYTES)),
    "a route's secret for a call": lambda peer, nonce: compute_proof(
        session_of_peer(peer),
        "calls",
        derive_session_secret(SECRET, "dials", session_of_peer(peer)),
        nonce,
    ),
    "another peer's id": lambda peer, nonce: register_as(peer, OTHER, nonce),
    "no signature": lambda peer, nonce: prove(peer, "registers", nonce) + bytes(REGISTRATION_BYTES),
    "a registration of another nonce": lambda _, __: register_as(
        derive_peer_id(OTHER.public), OTHER, bytes(NONCE_BYTES)
    ),
    "a registration without the secret": lambda _, nonce: register_as(
        derive_peer_id(OTHER.public), OTHER, nonce, b"w" * 16
    ),
}


@pytest.mark.parametrize("kind", STRANGERS)
async def test_a_stranger_gets_a_nonce_and_no_more(bench: Bench, kind: str) -> None:
    await bench.register()
    stream, nonce = await bench.visit()
    answer = STRANGERS[kind](bench.peer, nonce)
    assert len(answer) > NONCE_BYTES  # no answer is longer than its question
    stream[1].write(answer)
    assert await ended(stream) == b""
    assert (bench.server.num_peers, bench.server.bytes_relayed) == (1, 0)
    assert await talk(await bench.call()) == b"L"


async def test_a_registration_is_void_at_another_rendezvous(bench: Bench) -> None:
    """A hostile rendezvous passes our rendezvous's nonce on to a peer that registers there."""
    stream, nonce = await bench.visit()
    signed = register_as(bench.peer, bench.keys, nonce, b"h" * 16)[PROOF_BYTES:]
    stream[1].write(prove(bench.peer, "registers", nonce) + signed)
    assert await ended(stream) == b""
    assert bench.server.num_peers == 0


async def test_silent_connections_time_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_server, "TALK_S", 0.1)
    stream, _ = await bench.visit()
    assert await ended(stream) == b""


async def test_a_flood_locks_nobody_out(bench: Bench) -> None:
    await bench.register()
    sources = tuple(f"127.0.0.{n}" for n in range(1, 60))
    flood = Flood(bench.port, sources, per_second=100)
    await until(lambda: len(flood) > 2 * relay_server.MAX_STRANGERS)
    for _ in range(4):
        assert await talk(await bench.call()) == b"L"
    await flood.end()


async def test_one_address_takes_neither_all_sessions_nor_all_calls(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address knows the secret, as a removed member may."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 4)
    monkeypatch.setattr(module, "MAX_CALLERS", 3)
    await bench.server.close()
    bench.server = RendezvousServer(SECRET)
    bench.server.listen("127.0.0.1", bench.port)
    await bench.register()
    for _ in range(6):
        keys = KeyPair.generate()
        stream, nonce = await bench.visit("127.0.0.2")
        stream[1].write(register_as(derive_peer_id(keys.public), keys, nonce))
    await until(lambda: len(bench.server._opened) == 4)
    assert bench.waiting
    calls = []
    for _ in range(5):
        stream, nonce = await bench.visit("127.0.0.2")
        stream[1].write(prove(bench.peer, "calls", nonce) + COORDINATOR)
        assert await stream[0].readexactly(1) == JOINED
        calls.append(stream)
    assert await ended(calls[0]) == b""
    assert await talk(await bench.call()) == b"L"


async def test_connections_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 8)
    await bench.server.close()
    bench.server = RendezvousServer(SECRET)
    bench.server.listen("127.0.0.1", bench.port)
    await bench.register()
    strangers = []
    for id in range(1, 13):
        stream, nonce = await bench.visit("127.0.0.2")
        strangers.append(stream)
        shared = derive_session_secret(SECRET, "waits", id)
        stream[1].write(compute_proof(id, "waits", shared, nonce))
    for stream in strangers[:5]:
        assert await ended(stream) == b""
    await until(lambda: len(bench.server._connections) == 8)
    assert await talk(await bench.call()) == b"L"


async def test_invented_peers_fill_no_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOG_LIMIT", RateLimit(burst=3, per_second=1e-6))
    await bench.server.close()
    bench.server = RendezvousServer(SECRET)
    bench.server.listen("127.0.0.1", bench.port)
    caplog.set_level("DEBUG", module.__name__)
    for _ in range(8):
        keys = KeyPair.generate()
        stream, nonce = await bench.visit()
        stream[1].write(register_as(derive_peer_id(keys.public), keys, nonce))
    await until(lambda: bench.server.num_peers == 8)
    lines = [one.levelname for one in caplog.records if "has registered" in one.message]
    assert lines == ["INFO"] * 3 + ["DEBUG"] * 5


# --- a hostile rendezvous ---------------------------------------------------------------------


async def test_a_rendezvous_that_joins_nobody_is_not_called_endlessly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It claims with each registration that a caller has come, and leaves."""
    monkeypatch.setattr(client_module, "REGISTER_LIMIT", RateLimit(burst=4, per_second=1e-6))
    server = EagerServer(NONCE_BYTES, PROOF_BYTES + REGISTRATION_BYTES)
    address = RendezvousAddress(SECRET, "127.0.0.1", await server.start())
    client = RendezvousClient(address, KeyPair.generate(), "127.0.0.1")
    client.start(lambda _: 0)
    await until(lambda: server.num_answers == 4)
    await server.visit(8)
    assert server.num_answers == 4
    await client.close()
    await server.close()


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
async def test_a_rendezvous_whose_name_is_none_is_reported(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """A hostile token names it."""
    monkeypatch.setattr(client_module, "_RETRY_S", (0.001,))
    address = RendezvousAddress.parse(f"{'s' * 22}@{host}")
    client = RendezvousClient(address, KeyPair.generate(), "127.0.0.1")
    problems: list[str] = []
    client.on_problem = problems.append
    client.start(lambda _: 0)
    await until(lambda: problems)
    assert problems == [f"the rendezvous {host}:5464 has an unknown name"]
    await client.close()


async def test_ports_of_calls_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers come and go; a port that isn't used any more is closed, one in use stays."""
    monkeypatch.setattr(client_module, "MAX_LISTENERS", 3)
    await bench.register()
    used = bench.caller.local_endpoint(bench.peer, COORDINATOR)
    gone = bench.caller.local_endpoint(f"{1:016x}", CONTROL)
    for peer in range(2, 12):
        assert bench.caller.local_endpoint(f"{peer:016x}", CONTROL)
        assert bench.caller.local_endpoint(bench.peer, COORDINATOR) == used
    await until(lambda: len(bench.caller._accepting) == 3)
    assert await talk(await bench.call()) == b"L"
    with pytest.raises(ConnectionRefusedError):
        await bench.connect(int(gone.rpartition(":")[2]))


@pytest.mark.parametrize(
    "peer",
    [
        "-123456789abcdef",
        " 123456789abcdef",
        "0x23456789abcdef",
        "1_23456789abcdef",
        "123456789ABCDEF0",
        "\x1b[2J0123456789ab",
        "1" * 17,
        "\u0661" * 16,
    ],
)
def test_a_leader_of_nonsense_is_not_called(caplog: pytest.LogCaptureFixture, peer: str) -> None:
    """A hostile token names it."""
    address = RendezvousAddress(SECRET, "127.0.0.1", 1)
    caller = RendezvousClient(address, KeyPair.generate(), "127.0.0.1")
    assert caller.local_endpoint(peer, COORDINATOR) == ""
    assert [one.message.isprintable() for one in caplog.records] == [True]


#: How a hostile rendezvous passes on a chunk.
Pass = Callable[[bytes, asyncio.StreamWriter], None]


def alter(data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(data[:-1] + bytes([data[-1] ^ 1]))


def repeat(data: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(data + data)


def hold(data: bytes, writer: asyncio.StreamWriter) -> None:
    pass


class Reorderer:
    """Passes each chunk on after the next one."""

    def __init__(self) -> None:
        self._held: dict[asyncio.StreamWriter, bytes] = {}

    def __call__(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        if writer in self._held:
            writer.write(data + self._held.pop(writer))
        else:
            self._held[writer] = data


def lie(monkeypatch: pytest.MonkeyPatch, passes: Pass, is_honest: Callable[[], bool]) -> None:
    """From then on the rendezvous passes bytes on by ``passes``, unless it is honest."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if is_honest():
                writer.write(data)
            else:
                passes(data, writer)

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


class Leader:
    """A coordinator's socket behind the rendezvous, and a member that calls it."""

    def __init__(self, bench: Bench, net: Net) -> None:
        self.asked: list[int] = []
        server = net.server(control_codec(), self._handle)
        self._server = server
        bench.registered.start(lambda wanted: server.port if wanted == COORDINATOR else 0)
        endpoint = bench.caller.local_endpoint(bench.peer, COORDINATOR)
        self.client = net.client(control_codec(), net.member("member"), 0, addresses=[endpoint])

    def _handle(
        self, sender: MessageSender, message: ControlMessage, _payload: memoryview | None
    ) -> None:
        assert isinstance(message, StatusRequest)
        self.asked.append(message.ref)
        reply = StatusReply(ref=message.ref, payload=Payload("u8", (2,)))
        self._server.send(sender.identity, reply, b"{}")


@pytest.mark.parametrize(
    "passes", [alter, repeat, Reorderer(), hold], ids=["alter", "repeat", "reorder", "hold"]
)
@pytest.mark.parametrize("begins", ["at once", "later"])
async def test_what_a_liar_alters_is_never_read(
    net: Net, bench: Bench, monkeypatch: pytest.MonkeyPatch, passes: Pass, begins: str
) -> None:
    """Each request is read once and as it was sent, or not at all.

    Chunks are altered, repeated, reordered or held back; all works again once the rendezvous is
    honest.
    """
    honest = [begins == "later"]
    lie(monkeypatch, passes, lambda: honest[0])
    leader = Leader(bench, net)
    if honest[0]:
        await leader.client.send_request(StatusRequest(ref=0), timeout=20.0)
    honest[0] = False
    for _ in range(2):
        with suppress(MolinkError):
            await leader.client.send_request(StatusRequest(ref=0), timeout=0.1)
    assert len(leader.asked) == len(set(leader.asked))
    honest[0] = True
    leader.client.reconnect_now()

    async def is_answered() -> bool:
        with suppress(MolinkError):
            await leader.client.send_request(StatusRequest(ref=0), timeout=2.0)
            return True
        return False

    async with asyncio.timeout(30):
        while not await is_answered():
            pass
    assert len(leader.asked) == len(set(leader.asked))


async def test_a_liar_connects_to_another_peer(net: Net, bench: Bench) -> None:
    """The other peer admits everybody, but the caller knows the leader's key."""
    served: list[ControlMessage] = []
    keys, net.keys = net.keys, KeyPair.generate()
    impostor = net.server(control_codec(), lambda _, message, __: served.append(message))
    net.keys = keys
    bench.registered.start(lambda _: impostor.port)
    endpoint = bench.caller.local_endpoint(bench.peer, COORDINATOR)
    client = net.client(control_codec(), net.member("member"), 0, addresses=[endpoint])
    await until(lambda: client.failure is not None)
    assert "another key" in str(client.failure)
    assert not client.is_connected
    assert served == []
