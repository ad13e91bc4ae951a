"""Output of a foreground daemon about transfers."""

import io

import pytest
from rich.console import Console

from molink.wire.messages.peer_reports import TransferState
from molinkd.cli.daemon_console import DaemonConsole
from molinkd.cli.transfer_line import PRINT_INTERVAL_S, TransferLine
from molinkd.peer.launch import ModelFoundEvent

STATE = TransferState(model="m", done=1_000_000, total=9_000_000, rate=4_000_000, source="nas")
TEXT = "Fetching m from nas: 1 of 9 MB, 4.0 MB/s, 2 s left"


def line(*, terminal: bool, times: list[float]) -> tuple[TransferLine, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    return TransferLine(console, lambda: times[0]), out


def test_a_terminal_line_is_rewritten() -> None:
    shown, out = line(terminal=True, times=[0.0])
    shown.show_transfers([STATE])
    shown.show_transfers([STATE])
    shown.show_transfers([])
    shown.clear_line()
    assert out.getvalue() == f"{TEXT}\r\x1b[2K" * 2


def test_a_pipe_gets_a_line_at_intervals() -> None:
    times = [0.0]
    shown, out = line(terminal=False, times=times)
    for time in (0.0, 0.5, PRINT_INTERVAL_S, PRINT_INTERVAL_S + 0.5):
        times[0] = time
        shown.show_transfers([STATE])
    assert out.getvalue() == f"{TEXT}\n" * 2


def test_replication_is_not_shown() -> None:
    shown, out = line(terminal=False, times=[0.0])
    shown.show_transfers([TransferState(model="m", done=1, total=9, is_replica=True)])
    assert out.getvalue() == ""


def test_transfer_texts_cannot_control_the_terminal() -> None:
    shown, out = line(terminal=False, times=[0.0])
    shown.show_transfers([TransferState(model="\x1b[2J", done=1, total=9)])
    assert "\x1b" not in out.getvalue()


def test_a_vision_model_is_announced_as_text_only(capsys: pytest.CaptureFixture[str]) -> None:
    for sees in (True, False):
        DaemonConsole().show_event(ModelFoundEvent(model="m", path="[x]", is_text_only=sees))
    assert capsys.readouterr().out.splitlines() == [
        "Serving m (text only; images are not supported) from [x]",
        "Serving m from [x]",
    ]
