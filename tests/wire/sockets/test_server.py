import asyncio
import errno
import tracemalloc
from typing import Any

import pytest
import zmq

import molink.wire.sockets.server
from molink.errors import (
    ModelNotFound,
    MolinkError,
    NotAuthorized,
    PortInUse,
    Unavailable,
    UsageError,
)
from molink.facts.identity import derive_peer_id
from molink.wire.messages.admin import LeaveRequest, StatusRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec, data_codec
from molink.wire.messages.control_plane import DoneReply
from molink.wire.messages.instructions import Welcome
from molink.wire.messages.serving import PromptFragment
from molink.wire.messages.transfer import ReadReply, ReadRequest
from molink.wire.sockets.create_socket import create_client
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender, Server, ServerLimits

pytestmark = pytest.mark.filterwarnings("error")


class Echo:
    """A control server that answers every request and records senders."""

    def __init__(self, net: Any, **options: Any) -> None:
        self.seen: list[tuple[MessageSender, Any]] = []
        self.error: Exception | None = None
        self.server: Server[Any] = net.server(control_codec(), self.handle, **options)
        self.port = self.server.port

    async def handle(self, sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        self.seen.append((sender, message))
        if self.error is not None:
            raise self.error
        self.server.send(sender.identity, DoneReply(ref=message.ref))


async def test_a_request_is_authorised_and_answered(net: Any) -> None:
    echo = Echo(net)
    keys = net.member()
    client = net.client(control_codec(), keys, echo.port)
    reply, payload = await client.send_request(StatusRequest(ref=0))
    assert isinstance(reply, DoneReply)
    assert payload is None
    assert echo.seen[0][0].peer_id == derive_peer_id(keys.public)
    assert net.authenticator.accepted == 1


async def test_a_given_peer_id(net: Any) -> None:
    echo = Echo(net)
    client = net.client(control_codec(), net.member("invite:abc"), echo.port)
    await client.send_request(StatusRequest(ref=0))
    assert echo.seen[0][0].peer_id == "invite:abc"


async def test_permits_restricts_messages(net: Any) -> None:
    def permits(user: str, message: Any) -> bool:
        return not user.startswith("invite:") or isinstance(message, LeaveRequest)

    echo = Echo(net, permits=permits)
    client = net.client(control_codec(), net.member("invite:abc"), echo.port)
    await client.send_request(LeaveRequest(ref=0))
    with pytest.raises(Unavailable):
        await client.send_request(StatusRequest(ref=0), timeout=0.1)
    assert echo.server.counters.forbidden == 1


@pytest.mark.parametrize(
    ("raised", "expected", "failures"),
    [(ModelNotFound("no model m"), ModelNotFound, 0), (ValueError("secret"), MolinkError, 1)],
)
async def test_handler_errors_are_returned(
    net: Any, raised: Exception, expected: type[Exception], failures: int
) -> None:
    echo = Echo(net)
    echo.error = raised
    client = net.client(control_codec(), net.member(), echo.port)
    with pytest.raises(expected) as caught:
        await client.send_request(StatusRequest(ref=0))
    assert "secret" not in str(caught.value)
    assert echo.server.counters.failures == failures
    echo.error = None
    await client.send_request(StatusRequest(ref=0))


async def test_a_payload_in_a_reply(net: Any) -> None:
    async def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        data = bytes(range(200)) * 5
        reply = ReadReply(ref=message.ref, payload=Payload("u8", (1000,)))
        server.send(sender.identity, reply, data)

    server = net.server(control_codec(), handle)
    client = net.client(control_codec(), net.member(), server.port)
    read = ReadRequest(ref=0, root=f"{0:064}:1", part="f", index=0)
    _, payload = await client.send_request(read)
    assert bytes(payload) == bytes(range(200)) * 5


async def test_the_server_speaks_first(net: Any) -> None:
    echo = Echo(net)
    got: list[Any] = []
    client = net.client(
        control_codec(), net.member(), echo.port, on_message=lambda message, _: got.append(message)
    )
    await client.send_request(StatusRequest(ref=0))
    assert echo.server.send(echo.seen[0][0].identity, Welcome(swarm="s", peer="p"))
    await net.until(lambda: got)
    assert got == [Welcome(swarm="s", peer="p")]


async def test_sending_to_a_closed_connection_is_counted(net: Any) -> None:
    echo = Echo(net)
    assert not echo.server.send(b"\0abcd", DoneReply(ref=1))
    assert echo.server.counters.unroutable == 1


async def test_the_next_free_port_is_taken(net: Any) -> None:
    one = Echo(net)
    other = Server(net.context, net.keys, control_codec(), net.authenticator, lambda *_: None)
    with pytest.raises(PortInUse, match="--control-port"):
        other.bind("127.0.0.1", (one.port, one.port + 1), "--control-port")
    try:
        assert one.port < other.bind("127.0.0.1", (one.port, one.port + 50)) < one.port + 50
    finally:
        await other.close()
    with pytest.raises(UsageError, match="listen"):
        other.bind("203.0.113.9", (0, 1))


async def test_revocation_is_immediate_and_leaves_the_others(net: Any) -> None:
    echo = Echo(net)
    bad, good = net.member(), net.member()
    events: list[str] = []
    revoked = net.client(
        control_codec(),
        bad,
        echo.port,
        on_disconnect=lambda: events.append("gone"),
        on_refused=events.append,
    )
    broken: list[bool] = []
    member = net.client(control_codec(), good, echo.port, on_disconnect=lambda: broken.append(True))
    await revoked.send_request(StatusRequest(ref=0))
    await member.send_request(StatusRequest(ref=0))
    echo.server.drop_peer(derive_peer_id(bad.public))
    revoked.send(StatusRequest(ref=9))
    await net.until(lambda: echo.server.counters.rebuilds == 1)
    await net.until(lambda: broken)
    await member.send_request(StatusRequest(ref=0))
    await net.until(lambda: len(events) >= 2)
    with pytest.raises(NotAuthorized, match="join"):
        await revoked.send_request(StatusRequest(ref=0))
    assert sum(sender.peer_id == derive_peer_id(bad.public) for sender, _ in echo.seen) == 1
    net.authenticator.allow_peer(bad.public)
    await revoked.send_request(StatusRequest(ref=0))


async def test_revocation_is_answered(net: Any) -> None:
    """The peer that asks for it is connected to the socket that is rebound."""

    def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        server.drop_peer("somebody")
        server.send(sender.identity, DoneReply(ref=message.ref))

    server = net.server(control_codec(), handle)
    cuts: list[bool] = []
    client = net.client(
        control_codec(), net.member(), server.port, on_disconnect=lambda: cuts.append(True)
    )
    for times in range(1, 6):
        reply, _ = await client.send_request(StatusRequest(ref=0))
        assert isinstance(reply, DoneReply)
        await net.until(lambda times=times: len(cuts) == times)


@pytest.mark.parametrize("where", ["create_server", "SocketMonitor", "bind_socket"])
@pytest.mark.parametrize("error", [zmq.ZMQError(errno.EMFILE), UsageError("the address is gone")])
async def test_server_listens_again_after_errors(
    net: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    error: Exception,
) -> None:
    echo = Echo(net)
    client = net.client(control_codec(), net.member(), echo.port)
    await client.send_request(StatusRequest(ref=0))
    work, tries = getattr(molink.wire.sockets.server, where), []

    def fail_twice(*arguments: Any, **options: Any) -> Any:
        tries.append(where)
        if len(tries) <= 2:
            raise error
        return work(*arguments, **options)

    monkeypatch.setattr(molink.wire.sockets.server, where, fail_twice)
    echo.server.drop_peer("somebody")
    await net.until(lambda: echo.server.counters.rebuilds == 1)
    assert len(tries) == 3
    assert sum("can't listen" in record.message for record in caplog.records) == 1
    await client.send_request(StatusRequest(ref=0))


async def test_a_flood_fills_only_its_senders_inbox(net: Any) -> None:
    busy = asyncio.Event()
    flooder, member = net.member("flooder"), net.member("member")

    async def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        if sender.peer_id == "flooder":
            await busy.wait()
        else:
            server.send(sender.identity, DoneReply(ref=message.ref))

    limits = ServerLimits(inbox_messages=20, inbox_bytes=1 << 20)
    server = net.server(control_codec(), handle, limits=limits)
    flood = net.client(control_codec(), flooder, server.port, max_messages=10000)
    quiet = net.client(control_codec(), member, server.port)
    await flood.wait_connected(60)
    for _ in range(3000):
        flood.send(StatusRequest(ref=1))
    for _ in range(5):
        await quiet.send_request(StatusRequest(ref=0), timeout=30)
    await net.until(lambda: server.counters.overflowed == 3000 - 20)
    busy.set()


async def test_an_inbox_is_bounded_in_bytes(net: Any) -> None:
    busy = asyncio.Event()
    handled: list[int] = []

    async def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        await busy.wait()
        handled.append(message.first)

    server = net.server(data_codec(), handle, limits=ServerLimits(inbox_bytes=4 << 20))
    client = net.client(data_codec(), net.member(), server.port, max_bytes=1 << 30)
    await client.wait_connected(60)
    data = bytes(256 * 1024)
    tracemalloc.start()
    for number in range(300):
        client.send(PromptFragment("k", number, Payload("u8", (len(data),))), data)
        if number % 10 == 9:  # a connection far ahead of its reader is cut
            sent = number + 1
            await net.until(lambda: server.counters.received == sent)  # noqa: B023
    assert server.counters.overflowed == 300 - 15
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    busy.set()
    await net.until(lambda: len(handled) == 15)
    assert handled == list(range(15))


async def test_slow_receiver_does_not_block_the_server(net: Any) -> None:
    limits = ServerLimits(outbox_messages=100, outbox_bytes=4 << 20)
    seen: list[MessageSender] = []
    server = net.server(data_codec(), lambda sender, *_: seen.append(sender), limits=limits)
    keys = net.member()
    with create_client(
        net.context, keys, net.keys.public, f"tcp://127.0.0.1:{server.port}"
    ) as socket:
        prompt = PromptFragment("k", 0, Payload("u8", (4,)))
        await socket.send_multipart(data_codec().encode(prompt, b"abcd"))
        await net.until(lambda: seen)
        data = bytes(256 * 1024)
        big = PromptFragment("k", 0, Payload("u8", (len(data),)))
        sent = [server.send(seen[0].identity, big, data) for _ in range(400)]
        assert not sent[-1]
        assert server.counters.congested > 0
        for _ in range(sum(sent)):
            await socket.recv_multipart()
        assert server.send(seen[0].identity, prompt, b"abcd")
        assert len(await socket.recv_multipart()) == 2


async def test_closing_drops_waiting_messages(net: Any) -> None:
    started: list[int] = []

    async def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        started.append(message.ref)
        await asyncio.Event().wait()

    server = net.server(control_codec(), handle)
    client = net.client(control_codec(), net.member(), server.port)
    await client.wait_connected(60)
    for ref in range(5):
        client.send(StatusRequest(ref=ref))
    await net.until(lambda: started)
    await server.close()
    assert started == [0]
    assert not server.send(b"\0abcd", DoneReply(ref=1))


def test_keys_do_not_show_their_secret() -> None:
    keys = KeyPair.generate()
    assert keys.secret not in repr(keys)
