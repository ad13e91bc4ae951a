"""What a daemon in the foreground says of its transfers."""

import io

import pytest
from rich.console import Console

from molink.wire.messages.peer_reports import TransferState
from molinkd.cli.daemon_console import PRINT_INTERVAL_S, DaemonConsole, TransferLine
from molinkd.peer.launch import ModelFoundEvent

STATE = TransferState(model="m", done=1_000_000, total=9_000_000, rate=4_000_000, source="nas")
TEXT = "Fetching m from nas: 1 of 9 MB, 4.0 MB/s, 2 s left"


def line(*, terminal: bool, times: list[float]) -> tuple[TransferLine, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    return TransferLine(console, lambda: times[0]), out


def test_on_a_terminal_one_line_is_rewritten() -> None:
    shown, out = line(terminal=True, times=[0.0])
    shown.show_transfers([STATE])
    shown.show_transfers([STATE])
    shown.show_transfers([])
    shown.clear_line()
    assert out.getvalue() == f"{TEXT}\r\x1b[2K" * 2


def test_elsewhere_it_says_so_now_and_then() -> None:
    times = [0.0]
    shown, out = line(terminal=False, times=times)
    for time in (0.0, 0.5, PRINT_INTERVAL_S, PRINT_INTERVAL_S + 0.5):
        times[0] = time
        shown.show_transfers([STATE])
    assert out.getvalue() == f"{TEXT}\n" * 2


def test_what_nobody_waits_for_is_not_told() -> None:
    shown, out = line(terminal=False, times=[0.0])
    shown.show_transfers([TransferState(model="m", done=1, total=9, is_replica=True)])
    assert out.getvalue() == ""


def test_what_is_sent_drives_no_terminal() -> None:
    shown, out = line(terminal=False, times=[0.0])
    shown.show_transfers([TransferState(model="\x1b[2J", done=1, total=9)])
    assert "\x1b" not in out.getvalue()


def test_of_a_model_that_sees_it_says_what_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    for sees in (True, False):
        DaemonConsole().show_event(ModelFoundEvent(model="m", path="[x]", has_vision=sees))
    assert capsys.readouterr().out.splitlines() == [
        "Serving m, its text model (it takes no images) from [x]",
        "Serving m from [x]",
    ]
