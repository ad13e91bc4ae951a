import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from molink.wire.sockets import congestion
from molink.wire.sockets.congestion import avoid_bbr, enable_pacing, has_idle_reset


@pytest.mark.parametrize("change", [avoid_bbr, enable_pacing])
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
def test_whether_windows_fall_in_pauses(
    used: str, after_idle: str, forgets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(congestion, "_LINUX", tmp_path)
    assert not has_idle_reset()
    (tmp_path / "tcp_congestion_control").write_text(f"{used}\n", encoding="ascii")
    (tmp_path / "tcp_slow_start_after_idle").write_text(f"{after_idle}\n", encoding="ascii")
    assert has_idle_reset() == forgets
