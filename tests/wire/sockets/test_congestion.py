import os
import socket
import sys
from collections.abc import Callable

import pytest

from molink.wire.sockets.congestion import avoid_bbr, spread_out


@pytest.mark.parametrize("change", [avoid_bbr, spread_out])
def test_what_is_no_connection_is_left_alone(change: Callable[[int], None]) -> None:
    ours, theirs = os.pipe()
    change(ours)
    os.close(ours)
    os.close(theirs)
    change(ours)


@pytest.mark.skipif(sys.platform != "linux", reason="SO_MAX_PACING_RATE is Linux's")
def test_a_connection_is_paced() -> None:
    option, unlimited = 47, b"\xff" * 4
    with socket.socket() as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, option, 4) == unlimited
        spread_out(connection.fileno())
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
