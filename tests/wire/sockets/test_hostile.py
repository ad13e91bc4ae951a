"""Attacks on a server by strangers and peers have no lasting effect."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import zmq

from molink.wire.messages.admin import StatusRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec, data_codec
from molink.wire.messages.control_plane import DoneReply
from molink.wire.messages.serving import Cancel, PromptFragment
from molink.wire.sockets.client import Client
from molink.wire.sockets.create_socket import create_client
from molink.wire.sockets.key_pair import KeyPair
from molink.wire.sockets.server import MessageSender, Server

_GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


class Target:
    """A server and a peer that must remain served."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.blocked: list[tuple[str, str]] = []
        self.server: Server[Any] = net.server(
            control_codec(), self.handle, on_blocked=lambda *told: self.blocked.append(told)
        )
        self.client: Client[Any] = net.client(control_codec(), net.member(), self.server.port)
        self.address = f"tcp://127.0.0.1:{self.server.port}"

    async def handle(self, sender: MessageSender, message: Any, payload: memoryview | None) -> None:
        self.server.send(sender.identity, DoneReply(ref=message.ref))

    async def serves(self) -> None:
        """Assert that the peer is still answered."""
        reply, _ = await self.client.send_request(StatusRequest(ref=0))
        assert isinstance(reply, DoneReply)


@pytest.fixture
async def target(net: Any) -> AsyncIterator[Target]:
    made = Target(net)
    await made.serves()
    # The answer may arrive before the monitor reports that the member isn't a stranger.
    await net.until(lambda: made.server.counters.unauthenticated == 0)
    before = psutil.Process().memory_info().rss
    yield made
    await made.serves()
    assert psutil.Process().memory_info().rss - before < 48 << 20


async def closed_by_server(reader: asyncio.StreamReader) -> None:
    """Wait until the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(65536):
            pass


async def test_no_curve(target: Target) -> None:
    with target.net.context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(target.address)
        strangers = target.server.counters.unauthenticated
        await target.net.until(lambda: target.server.counters.unauthenticated > strangers)
        await target.serves()
    assert target.server.counters.received == 2


async def test_unknown_key(target: Target) -> None:
    keys, server_key = KeyPair.generate(), target.net.keys.public
    with create_client(target.net.context, keys, server_key, target.address) as socket:
        with pytest.raises(zmq.Again):
            await socket.send(b"x", zmq.DONTWAIT)
        await target.net.until(lambda: target.net.authenticator.refused == 1)
        await target.net.until(lambda: target.server.counters.unauthenticated == 1)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100,
        bytes(range(256)) * 4,
        # ZMTP 1.0: a frame of 4 GiB before anything else.
        b"\xff" + struct.pack(">Q", 1 << 32) + b"\x00" + bytes(1000),
        # ZMTP 3.1: a proper greeting, then a command of 4 GiB, of 2 EiB, and a message of 4 GiB.
        _GREETING + b"\x06" + struct.pack(">Q", 1 << 32) + bytes(1000),
        _GREETING + b"\x06" + struct.pack(">Q", 1 << 61) + bytes(1000),
        _GREETING + b"\x02" + struct.pack(">Q", 1 << 32) + bytes(1000),
        _GREETING + b"\x04\x05\x05HELLO",
    ],
    ids=["http", "bytes", "zmtp1", "command", "exbibytes", "message", "hello"],
)
async def test_raw_tcp(target: Target, noise: bytes) -> None:
    strangers = target.server.counters.unauthenticated
    connections = [await asyncio.open_connection("127.0.0.1", target.server.port) for _ in range(5)]
    for reader, writer in connections:
        with contextlib.suppress(ConnectionError):
            writer.write(noise)
            await writer.drain()
            await target.serves()
            await closed_by_server(reader)
        writer.close()
    await target.net.until(lambda: target.server.counters.unauthenticated == strangers + 5)


@pytest.mark.parametrize("size", [0, 1, 3000])
async def test_message_of_800_parts_is_rejected(target: Target, size: int) -> None:
    keys, server_key = target.net.member("attacker"), target.net.keys.public
    parts = [bytes(size)] * 800
    with create_client(target.net.context, keys, server_key, target.address) as socket:
        await socket.send_multipart(parts)
        await target.net.until(lambda: target.server.counters.malformed == 1)
        header = control_codec().encode(StatusRequest(ref=7))
        await socket.send_multipart(header)
        assert control_codec().decode(await socket.recv_multipart(copy=False))[0] == DoneReply(
            ref=7
        )


async def test_misbehaving_peer_is_blocked(target: Target) -> None:
    keys, server_key = target.net.member("attacker"), target.net.keys.public
    with create_client(target.net.context, keys, server_key, target.address) as socket:
        for _ in range(40):
            await socket.send_multipart([b"not", b"a", b"message"])
        await target.net.until(lambda: target.blocked)
        assert target.blocked[0][0] == "attacker"
        assert target.net.authenticator.blocked == {"attacker"}
        await target.net.until(lambda: target.server.counters.rebuilds == 1)
        await target.net.until(lambda: target.net.authenticator.refused)
    assert target.server.counters.malformed == 16
    await target.net.until(lambda: target.client.is_connected)
    target.net.authenticator.deny_peer("attacker")
    target.net.authenticator.allow_peer(keys.public, "attacker")
    client = target.net.client(control_codec(), keys, target.server.port)
    await client.send_request(StatusRequest(ref=0))


async def test_oversized_message_is_rejected(target: Target) -> None:
    keys, server_key = target.net.member("attacker"), target.net.keys.public
    header = data_codec().encode(PromptFragment("k", 0, Payload("u8", (1,))), b"x")[0]
    with create_client(target.net.context, keys, server_key, target.address) as socket:
        await socket.send_multipart([header, bytes(300 * 1024)])
        await target.net.until(lambda: target.server.counters.malformed == 1)
        # Beyond MAXMSGSIZE libzmq itself cuts the connection.
        await socket.send_multipart([header, bytes(2 << 20)])
        await socket.send_multipart(control_codec().encode(StatusRequest(ref=1)))
        await target.serves()
    assert target.server.counters.malformed == 1


async def test_peer_cannot_choose_its_identity(target: Target) -> None:
    keys, server_key = target.net.member("attacker"), target.net.keys.public
    with create_client(target.net.context, keys, server_key) as socket:
        socket.set(zmq.ROUTING_ID, b"somebody")
        socket.connect(target.address)
        await socket.send_multipart(control_codec().encode(StatusRequest(ref=1)))
        await target.net.until(lambda: target.server.counters.malformed == 1)


async def test_a_message_of_the_other_plane(target: Target) -> None:
    keys, server_key = target.net.member("attacker"), target.net.keys.public
    with create_client(target.net.context, keys, server_key, target.address) as socket:
        await socket.send_multipart(data_codec().encode(Cancel("k")))
        await target.net.until(lambda: target.server.counters.malformed == 1)


async def test_a_server_that_sends_garbage(net: Any) -> None:
    told: list[str] = []
    senders: list[MessageSender] = []
    server = net.server(control_codec(), lambda sender, *_: senders.append(sender))
    client = net.client(
        control_codec(), net.member(), server.port, on_refused=told.append, name="the head"
    )
    await client.wait_connected(60)
    client.send(StatusRequest(ref=1))
    await net.until(lambda: senders)
    for _ in range(16):
        await server._socket.send_multipart([senders[0].identity, *[b"x"] * 900])
    await net.until(lambda: told)
    assert "the head misbehaves" in told[0]
