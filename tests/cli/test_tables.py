"""``molink status`` for people."""

import pytest

from molink.cli.tables import show_status

STATE = {
    "swarm": "home",
    "coordinator": {"state": "running", "addresses": []},
    "model": "m",
    "trouble": "",
    "peers": [
        {
            "name": "[red]pc[/red]",
            "state": "here",
            "device": "cpu: x",
            "endpoint": "http://e",
            "daemon_pid": 1,
            "workers": [{"layers": [0, 4], "state": "loading"}],
        }
    ],
    "pipelines": [{"id": "p1", "epoch": 3, "ready": False, "reason": "why not"}],
}


def test_what_it_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show_status(STATE, demo=True)
    out = capsys.readouterr().out
    # What peers call themselves is text, not markup.
    for text in ("home (demo)", "[red]pc[/red]", "layers 0:4 (loading)", "why not", "epoch 3"):
        assert text in out


def test_an_unreachable_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    show_status({**STATE, "coordinator": {"state": "unreachable"}, "trouble": "gone"}, demo=False)
    assert "Only what this PC knows: gone" in capsys.readouterr().out
