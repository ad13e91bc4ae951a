import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from molink.wire.messages.base import Payload
from molink.wire.messages.codec import control_codec, data_codec
from molink.wire.messages.serving import PromptFragment
from molink.wire.sockets import tcp_info
from molink.wire.sockets.tcp_info import (
    avoid_bbr,
    bytes_received,
    bytes_unread,
    cut_connection,
    duplicate_socket,
    enable_pacing,
    has_idle_reset,
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
async def test_received_bytes_are_counted(pair: Pair, net: Any) -> None:
    one, other = pair
    one.sendall(bytes(1000))
    one.sendall(bytes(234))
    await net.until(lambda: bytes_received(other.fileno()) == 1234)
    assert bytes_unread(other.fileno()) == 1234
    assert len(other.recv(1000)) == 1000
    assert bytes_unread(other.fileno()) == 234
    assert bytes_received(other.fileno()) == 1234
    assert bytes_received(one.fileno()) == 0


def test_other_descriptors_have_no_address(pair: Pair) -> None:
    one, _ = pair
    number = one.fileno()
    one.close()
    assert bytes_received(number) is None
    assert bytes_unread(number) == 0
    assert remote_address(number) is None
    assert not cut_connection(number, ("127.0.0.1", 1))


@pytest.mark.skipif(sys.platform == "win32", reason="a socket is no file there")
def test_reused_descriptor_is_not_cut(tmp_path: Any) -> None:
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
    if sys.platform == "win32":  # incoming bytes are discarded, so that the owner closes it
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
async def test_received_bytes_equal_read_bytes(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact to the byte except for handshakes; otherwise long connections would drift."""
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
    await client.wait_connected(60)
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
async def test_vanished_host_is_detected(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides notice after about 5 s, with data in flight or without."""
    backlogs: list[UnreadBytes] = []
    for module in ("server", "client"):
        monkeypatch.setattr(
            f"molink.wire.sockets.{module}.UnreadBytes",
            lambda: backlogs.append(UnreadBytes()) or backlogs[-1],
        )
    server = net.server(control_codec(), lambda *_: None)
    client = net.client(control_codec(), net.member(), server.port)
    await client.wait_connected(60)

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


@pytest.mark.skipif(sys.platform == "win32", reason="a socket is no file there")
@pytest.mark.parametrize("change", [avoid_bbr, enable_pacing])
def test_other_descriptors_are_left_open_and_unchanged(change: Callable[[int], None]) -> None:
    before = psutil.Process().num_fds()
    ours, theirs = os.pipe()
    change(ours)
    assert psutil.Process().num_fds() == before + 2
    os.write(theirs, b"x")
    assert os.read(ours, 1) == b"x"
    assert os.get_blocking(ours)
    os.close(ours)
    os.close(theirs)
    change(ours)
    assert psutil.Process().num_fds() == before


@pytest.mark.skipif(sys.platform != "linux", reason="SO_MAX_PACING_RATE is Linux's")
def test_a_connection_is_paced() -> None:
    option, unlimited = 47, b"\xff" * 4
    with socket.socket() as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, option, 4) == unlimited
        enable_pacing(connection.fileno())
        assert connection.getsockopt(socket.SOL_SOCKET, option, 4) != unlimited
        assert connection.fileno() >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_CONGESTION is Linux's")
@pytest.mark.parametrize("name", [b"bbr", b"reno"])
def test_only_bbr_is_replaced(name: bytes) -> None:
    with socket.socket() as connection:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError:
            pytest.skip(f"no {name.decode()} here")
        avoid_bbr(connection.fileno())
        used = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert used.rstrip(b"\0") in ((b"cubic", b"reno") if name == b"bbr" else (name,))
        assert connection.fileno() >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="these files are Linux's")
@pytest.mark.parametrize(
    ("used", "after_idle", "forgets"),
    [("cubic", "1", True), ("reno", "1", True), ("cubic", "0", False), ("bbr", "1", False)],
)
def test_idle_reset_follows_system_settings(
    used: str, after_idle: str, forgets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_info, "_LINUX", tmp_path)
    assert not has_idle_reset()
    (tmp_path / "tcp_congestion_control").write_text(f"{used}\n", encoding="ascii")
    (tmp_path / "tcp_slow_start_after_idle").write_text(f"{after_idle}\n", encoding="ascii")
    assert has_idle_reset() == forgets
