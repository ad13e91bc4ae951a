"""``molink ps``."""

import json
from typing import Any

import msgspec
import pytest

from molinkd.cli import daemon_client
from molinkd.cli.main import run

GB = 10**9


def worker(pipeline: str, layers: list[int], weights: int) -> dict[str, Any]:
    return {"pipeline": pipeline, "layers": layers, "load": {"weights": weights, "kv": GB}}


STATE: dict[str, Any] = {
    "models": [{"name": "big"}, {"name": "small"}, {"name": "off", "stopped": True}],
    "peers": [
        {"id": "a", "name": "desk", "workers": [worker("p1", [0, 20], 9 * GB)]},
        {"id": "a2", "name": "desk:1", "pc": "a", "workers": [worker("p1", [20, 30], 4 * GB)]},
        {"id": "b", "name": "lap", "workers": [worker("p1", [30, 48], 4 * GB)]},
    ],
    "pipelines": [
        {
            "id": "p1",
            "model": "big",
            "ready": True,
            "state": "ready",
            "stages": [
                {"peer": "a", "layers": [0, 20]},
                {"peer": "a2", "layers": [20, 30]},
                {"peer": "b", "layers": [30, 48]},
            ],
            "scheduler": {"running": 2, "waiting": 1},
        },
        {"id": "p2", "model": "small", "state": "waiting", "reason": "too little memory"},
    ],
}


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> None:
    text = msgspec.json.encode(STATE)
    monkeypatch.setattr(daemon_client, "wait_until_ready", lambda *_: (None, text))


def test_a_line_per_pipeline(status: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ps"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model  size     PCs  stages  layers  requests      state",
        "big    20.0 GB  2    3       48      2, 1 waiting  ready",
        "small                                              waiting",
        "off                                                stopped",
    ]


def test_json(status: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ps", "--json"]) == 0
    first, *others = json.loads(capsys.readouterr().out)
    assert first == {
        "model": "big",
        "size": 20 * GB,
        "pcs": 2,
        "stages": 3,
        "layers": 48,
        "running": 2,
        "waiting": 1,
        "state": "ready",
    }
    assert [(one["model"], one["state"]) for one in others] == [
        ("small", "waiting"),
        ("off", "stopped"),
    ]


def test_without_a_daemon(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path))
    assert run(["ps"]) == 6
    assert "molink is not running here" in capsys.readouterr().err
