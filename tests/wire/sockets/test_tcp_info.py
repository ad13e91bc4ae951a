import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec, data_codec
from molink.wire.messages.serving import PromptFragment
from molink.wire.sockets.tcp_info import (
    bytes_received,
    bytes_unread,
    cut_connection,
    duplicate_socket,
    remote_address,
)
from molink.wire.sockets.unread_bytes import HANDSHAKE_BYTES, OpenConnection, UnreadBytes
from tests.support.connection_counters import counted

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


@counted
async def test_bytes_of_a_connection(pair: Pair, net: Any) -> None:
    one, other = pair
    one.sendall(bytes(1000))
    one.sendall(bytes(234))
    await net.until(lambda: bytes_received(other.fileno()) == 1234)
    assert bytes_unread(other.fileno()) == 1234
    assert len(other.recv(1000)) == 1000
    assert bytes_unread(other.fileno()) == 234
    assert bytes_received(other.fileno()) == 1234
    assert bytes_received(one.fileno()) == 0


def test_what_is_no_connection(pair: Pair) -> None:
    one, _ = pair
    number = one.fileno()
    one.close()
    assert bytes_received(number) is None
    assert bytes_unread(number) == 0
    assert remote_address(number) is None
    assert not cut_connection(number, ("127.0.0.1", 1))


@pytest.mark.skipif(sys.platform == "win32", reason="a socket is no file there")
def test_a_number_that_is_used_again_for_a_file(tmp_path: Any) -> None:
    before = psutil.Process().num_fds()
    with (tmp_path / "file").open("wb") as file:
        assert bytes_received(file.fileno()) is None
        assert remote_address(file.fileno()) is None
        assert not cut_connection(file.fileno(), ("127.0.0.1", 1))
    assert psutil.Process().num_fds() == before


async def test_only_the_right_connection_is_cut(pair: Pair, net: Any) -> None:
    one, other = pair
    other_end = remote_address(other.fileno())
    assert other_end == one.getsockname()
    assert not cut_connection(other.fileno(), ("127.0.0.1", 1))
    one.sendall(b"x")
    assert other.recv(1) == b"x"
    other.setblocking(False)
    assert cut_connection(other.fileno(), other_end)
    if sys.platform == "win32":  # what comes is taken away, for its owner to close it
        one.sendall(b"x")
        number = other.fileno()
        await net.until(lambda: cut_connection(number, other_end) and not bytes_unread(number))
        other.close()
        assert not cut_connection(number, other_end)
    else:
        assert one.recv(1) == b""
        assert not os.get_blocking(other.fileno())
        assert other.gettimeout() == 0.0


@counted
async def test_bytes_that_came_are_those_that_were_read(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handshakes aside, to the byte: or a long connection would drift beyond its bound."""
    backlogs: list[UnreadBytes] = []
    monkeypatch.setattr(
        "molink.wire.sockets.server.UnreadBytes",
        lambda: backlogs.append(UnreadBytes()) or backlogs[-1],
    )
    seen = 0

    def handle(sender: Any, message: Any, payload: memoryview | None) -> None:
        nonlocal seen
        seen += 1

    server = net.server(data_codec(), handle)
    client = net.client(data_codec(), net.member(), server.port)
    await client.wait_connected(5)
    await net.until(lambda: backlogs[0].connections)
    (connection,) = backlogs[0].connections
    await net.until(lambda: (bytes_received(connection.descriptor) or 0) > 500)
    handshake = bytes_received(connection.descriptor)
    assert handshake is not None
    assert handshake <= HANDSHAKE_BYTES
    for size in (1, 200, 255, 256, 257, 5000, 200_000):
        client.send(PromptFragment("k" * 20, 0, Payload("u8", (size,))), bytes(size))
    await net.until(lambda: seen == 7)
    received = bytes_received(connection.descriptor)
    assert received is not None
    assert received - handshake == connection.delivered - HANDSHAKE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system as Linux has it")
async def test_a_host_that_vanishes_is_noticed_by_tcp(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides of each connection: after about 5 s, whether or not something is under way."""
    backlogs: list[UnreadBytes] = []
    for module in ("server", "client"):
        monkeypatch.setattr(
            f"molink.wire.sockets.{module}.UnreadBytes",
            lambda: backlogs.append(UnreadBytes()) or backlogs[-1],
        )
    server = net.server(control_codec(), lambda *_: None)
    client = net.client(control_codec(), net.member(), server.port)
    await client.wait_connected(5)

    def connections() -> list[OpenConnection]:
        return [connection for backlog in backlogs for connection in backlog.connections]

    await net.until(lambda: len(connections()) == 2)
    for connection in connections():
        with duplicate_socket(connection.descriptor) as tcp:
            assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 2
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 1
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
