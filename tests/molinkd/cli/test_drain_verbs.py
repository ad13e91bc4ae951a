"""``molink drain`` says what it waits for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from molinkd.cli import daemon_client, drain_verbs
from molinkd.cli.main import run


def test_a_drain_that_lasts_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workers: list[list[str]] = [[], ["stage"], ["stage"]]

    def status(_: object) -> dict[str, Any]:
        return {"peers": [{"id": "me", "name": "pc", "daemon_pid": 7, "workers": workers.pop()}]}

    found = SimpleNamespace(run_file=SimpleNamespace(pid=7))
    monkeypatch.setattr(daemon_client, "require_daemon", lambda _: found)
    monkeypatch.setattr(daemon_client, "set_drain", lambda *_, **__: None)
    monkeypatch.setattr(daemon_client, "fetch_status", status)
    monkeypatch.setattr(drain_verbs, "_POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(drain_verbs, "_TELL_AFTER_S", 0.0)
    assert run(["drain", "--home", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("Other PCs load the layers") == 1
    assert "holds no layers now" in captured.out
