import os
import socket
import sys

import pytest

from molink.wire.sockets.congestion import avoid_bbr


def test_what_is_no_connection_is_left_alone() -> None:
    ours, theirs = os.pipe()
    avoid_bbr(ours)
    os.close(ours)
    os.close(theirs)
    avoid_bbr(ours)


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
