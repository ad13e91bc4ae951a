import asyncio
import contextlib
from functools import partial
from typing import Any

import pytest

from molink.errors import NotAuthorized, Overloaded, RequestError, Unavailable, UsageError
from molink.wire.messages.admin import StatusReply, StatusRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec, data_codec
from molink.wire.messages.control_plane import DoneReply, ErrorReply
from molink.wire.messages.serving import Cancel, PromptFragment
from molink.wire.sockets import server as server_module
from molink.wire.sockets.client import Client, is_refused
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender
from molink.wire.sockets.unread_bytes import BacklogLimits, UnreadBytes


async def test_unknown_key_differs_from_wrong_server(net: Any) -> None:
    server = net.server(control_codec(), lambda *_: None)
    told: list[str] = []
    stranger = net.client(
        control_codec(), KeyPair.generate(), server.port, on_refused=told.append, name="the swarm"
    )
    with pytest.raises(NotAuthorized, match=r"the swarm at tcp://.* doesn't know this PC"):
        await stranger.wait_connected(60)
    assert "join" in told[0]
    fooled = net.client(
        control_codec(), net.member(), server.port, server_key=KeyPair.generate().public
    )
    with pytest.raises(Unavailable):
        await fooled.wait_connected(0.1)
    await net.until(lambda: "another key" in str(fooled.failure))
    assert server.counters.unauthenticated >= 2
    assert net.authenticator.refused >= 1


async def test_missing_server_times_out(net: Any) -> None:
    client = net.client(control_codec(), net.member(), 1, name="the coordinator")
    with pytest.raises(Unavailable, match=r"coordinator doesn't answer at tcp://127\.0\.0\.1:1"):
        await client.send_request(StatusRequest(ref=0), timeout=0.1)
    with pytest.raises(Unavailable, match="not connected"):
        client.send(StatusRequest(ref=0))


async def test_invalid_address_is_rejected(net: Any) -> None:
    keys = net.member()
    client = Client(net.context, keys, control_codec(), net.keys.public, ["tcp://a b:x"])
    with pytest.raises(UsageError, match="not a valid address"):
        client.start()
    await client.close()
    client = Client(net.context, keys, control_codec(), net.keys.public, [])
    with pytest.raises(UsageError, match="has no address"):
        client.start()


async def test_the_second_address_is_tried(net: Any) -> None:
    server = net.server(control_codec(), lambda *_: None)
    addresses = ["tcp://127.0.0.1:1", f"tcp://127.0.0.1:{server.port}"]
    client = net.client(control_codec(), net.member(), 0, addresses=addresses)
    await client.wait_connected(60)


async def test_later_allowed_peer_connects(net: Any) -> None:
    server = net.server(control_codec(), lambda *_: None)
    keys = KeyPair.generate()
    client = net.client(control_codec(), keys, server.port)
    with pytest.raises(NotAuthorized):
        await client.wait_connected(60)
    net.authenticator.allow_peer(keys.public)
    await client.wait_connected(60)


async def test_reconnecting(net: Any) -> None:
    events: list[str] = []

    async def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        if isinstance(message, Cancel):
            events.append(message.key)

    server = net.server(data_codec(), handle)
    port = server.port

    def hello() -> None:
        events.append("connect")
        client.send(Cancel("hello"))

    client = net.client(
        data_codec(),
        net.member(),
        port,
        on_connect=hello,
        on_disconnect=lambda: events.append("disconnect"),
    )
    await net.until(lambda: "hello" in events)
    await server.close()
    await net.until(lambda: "disconnect" in events)
    assert not client.is_connected
    again = await rebound(net, handle, port)
    await net.until(lambda: events.count("hello") == 2)
    assert events == ["connect", "hello", "disconnect", "connect", "hello"]
    await again.close()


async def test_refused_port_means_an_ended_process(net: Any) -> None:
    server = net.server(data_codec(), lambda *_: None)
    lost: list[str] = []
    client = net.client(data_codec(), net.member(), server.port, on_lost=lost.append)
    await client.wait_connected(60)
    port = server.port
    await server.close()
    await net.until(lambda: lost)
    assert lost == [f"its process has ended: tcp://127.0.0.1:{port} refuses connections"]


async def test_broken_connection_is_no_ended_process(net: Any) -> None:
    """The server cuts its members' connections and listens again at once, as after a revocation."""
    server = net.server(data_codec(), lambda *_: None)
    lost: list[str] = []
    broken: list[bool] = []
    client = net.client(
        data_codec(),
        net.member(),
        server.port,
        on_lost=lost.append,
        on_disconnect=lambda: broken.append(True),
    )
    for round_ in range(1, 4):
        await client.wait_connected(60)
        server.drop_peer("somebody else")
        await net.until(lambda times=round_: len(broken) == times)
    await client.wait_connected(60)
    assert not await is_refused(f"tcp://127.0.0.1:{server.port}")
    assert lost == []


async def test_other_failures_are_no_refusal() -> None:
    assert not await is_refused("tcp://")
    assert not await is_refused("tcp://no.such.host.invalid:1")


async def test_stalled_connection_is_replaced(net: Any) -> None:
    senders: list[MessageSender] = []
    events: list[str] = []
    server = net.server(data_codec(), lambda sender, *_: senders.append(sender))

    def hello() -> None:
        events.append("connect")
        client.send(Cancel("hello"))

    client = net.client(
        data_codec(),
        net.member(),
        server.port,
        on_connect=hello,
        on_disconnect=lambda: events.append("disconnect"),
    )
    await net.until(lambda: senders)
    client.reconnect_now()
    await net.until(lambda: len(senders) == 2)
    assert events == ["connect", "disconnect", "connect"]
    assert senders[0].identity != senders[1].identity
    assert client.is_connected


async def test_pending_attempt_is_replaced(net: Any) -> None:
    events: list[str] = []
    client = net.client(
        data_codec(), net.member(), 1, on_disconnect=lambda: events.append("disconnect")
    )
    client.reconnect_now()
    with pytest.raises(Unavailable):
        await client.wait_connected(0.05)
    assert events == []


async def rebound(net: Any, handle: Any, port: int) -> Any:
    """A server on the port that another one has just released."""
    from molink.errors import PortInUse
    from molink.wire.sockets.server import Server

    server: Server[Any] = Server(net.context, net.keys, data_codec(), net.authenticator, handle)
    while True:
        try:
            server.bind("127.0.0.1", (port, port + 1))
        except PortInUse:
            await asyncio.sleep(0.005)
        else:
            return server


async def test_requests_fail_when_the_connection_breaks(net: Any) -> None:
    got: list[Any] = []
    server = net.server(control_codec(), lambda _, message, __: got.append(message))
    client = net.client(control_codec(), net.member(), server.port)
    request = asyncio.ensure_future(client.send_request(StatusRequest(ref=0), timeout=30))
    await net.until(lambda: got)
    await server.close()
    with pytest.raises(Unavailable, match="broke"):
        await request


async def test_requests_fail_when_the_client_is_closed(net: Any) -> None:
    got: list[Any] = []
    server = net.server(control_codec(), lambda _, message, __: got.append(message))
    client = net.client(control_codec(), net.member(), server.port)
    request = asyncio.ensure_future(client.send_request(StatusRequest(ref=0), timeout=30))
    await net.until(lambda: got)
    await client.close()
    with pytest.raises(Unavailable, match="closed"):
        await request


async def test_large_traffic_is_fine_while_read(net: Any) -> None:
    data = bytes(192 << 10)

    async def handle(sender: MessageSender, message: Any, _: memoryview | None) -> None:
        reply = StatusReply(ref=message.ref, payload=Payload("u8", (len(data),)))
        server.send(sender.identity, reply, data)

    server = net.server(control_codec(), handle)
    broken: list[None] = []
    client = net.client(
        control_codec(),
        net.member(),
        server.port,
        on_disconnect=lambda: broken.append(None),
    )
    # Several times the bytes that one party may have sent without their being read.
    for _ in range(5 * BacklogLimits().party_bytes // len(data)):
        _, payload = await client.send_request(StatusRequest(ref=0))
        assert payload == data
    assert not broken


async def test_late_reply_is_ignored(net: Any) -> None:
    senders: list[tuple[MessageSender, Any]] = []
    server = net.server(control_codec(), lambda sender, m, _: senders.append((sender, m)))
    client = net.client(control_codec(), net.member(), server.port, name="the coordinator")
    await client.wait_connected(60)
    with pytest.raises(Unavailable, match=r"didn't answer a StatusRequest in 0\.05 s"):
        await client.send_request(StatusRequest(ref=0), timeout=0.05)
    await net.until(lambda: senders)
    later = asyncio.create_task(client.send_request(StatusRequest(ref=0)))
    await net.until(lambda: len(senders) == 2)
    for sender, message in senders:
        server.send(sender.identity, DoneReply(ref=message.ref))
    assert await later == (DoneReply(ref=senders[1][1].ref), None)


async def test_the_first_reply_counts(net: Any) -> None:
    async def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        for _ in range(3):
            server.send(sender.identity, DoneReply(ref=message.ref))

    server = net.server(control_codec(), handle)
    client = net.client(control_codec(), net.member(), server.port)
    for _ in range(3):
        reply, _ = await client.send_request(StatusRequest(ref=0))
        assert isinstance(reply, DoneReply)
    assert client._pending == {}


async def test_an_error_keeps_its_class_and_param(net: Any) -> None:
    async def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        raise RequestError("too many", "models[1]")

    server = net.server(control_codec(), handle)
    client = net.client(control_codec(), net.member(), server.port)
    with pytest.raises(RequestError, match="too many") as caught:
        await client.send_request(StatusRequest(ref=0))
    assert caught.value.param == "models[1]"


async def test_an_unknown_failure_is_still_an_error(net: Any) -> None:
    async def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        server.send(sender.identity, ErrorReply(ref=message.ref, code="Iterable", message="no"))

    server = net.server(control_codec(), handle)
    client = net.client(control_codec(), net.member(), server.port)
    with pytest.raises(Exception, match="no") as caught:
        await client.send_request(StatusRequest(ref=0))
    assert type(caught.value).__name__ == "MolinkError"


async def test_failing_callback_does_not_end_the_client(net: Any) -> None:
    senders: list[MessageSender] = []
    server = net.server(data_codec(), lambda sender, *_: senders.append(sender))

    def fail(*_: object) -> None:
        raise ValueError("no")

    client = net.client(data_codec(), net.member(), server.port, on_connect=fail, on_message=fail)
    await client.wait_connected(60)
    client.send(Cancel("a"))
    await net.until(lambda: senders)
    server.send(senders[0].identity, Cancel("b"))
    client.send(Cancel("a"))
    await net.until(lambda: len(senders) == 2)


@pytest.fixture
def blocked_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sender and reader share a loop here, so a sender far ahead must not be cut."""
    limits = BacklogLimits(party_bytes=1 << 30, total_bytes=1 << 30)
    monkeypatch.setattr(server_module, "UnreadBytes", partial(UnreadBytes, limits))


@pytest.mark.usefixtures("blocked_reader")
async def test_a_slow_server_never_blocks_the_loop(net: Any) -> None:
    got: list[int] = []

    def handle(sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        got.append(message.first)

    server = net.server(data_codec(), handle)
    client = net.client(data_codec(), net.member(), server.port, max_bytes=8 << 20)
    await client.wait_connected(60)
    data = bytes(256 * 1024)
    message = PromptFragment("k", 0, Payload("u8", (len(data),)))
    sent = 0
    with contextlib.suppress(Overloaded):
        while sent < 1000:
            client.send(PromptFragment("k", sent, message.payload), data)
            sent += 1
    assert client.is_congested
    assert sent < 200
    await net.until(lambda: len(got) == sent)
    assert got == list(range(sent))
    await net.until(lambda: not client.is_congested)


@pytest.mark.usefixtures("blocked_reader")
async def test_new_connection_starts_with_an_empty_queue(net: Any) -> None:
    """The connection may break before messages are queued."""
    got: list[int] = []
    server = net.server(data_codec(), lambda _, message, __: got.append(message.first))
    client = net.client(data_codec(), net.member(), server.port)
    await client.wait_connected(60)
    data = bytes(256 * 1024)
    payload = Payload("u8", (len(data),))
    while not client.is_congested:
        client.send(PromptFragment("k", 0, payload), data)
    client._drop("the connection broke")
    assert not client.is_congested
    client.send(PromptFragment("k", 1, payload), data)
    await net.until(lambda: got[-1:] == [1])


@pytest.mark.parametrize("host", ["[", "]", "[x]", "a]:b[", "a..b", "x" * 64, "x\x00", "a;b", ""])
async def test_an_address_of_nonsense_refuses_nothing(host: str) -> None:
    """A hostile member may report it as its own."""
    assert not await is_refused(endpoints((host,), 9)[0])
