"""``molink search``."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from molink.checkpoint.hub_catalog import load_catalog
from molink.errors import UsageError
from molink.facts.device import Device
from molinkd.cli import daemon_client, swarm_capacity
from molinkd.cli.main import run
from molinkd.cli.swarm_capacity import check_fit
from molinkd.peer.home import Home, RunFile

GB = 10**9


@pytest.fixture(autouse=True)
def pc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PC with 16 GB and without a GPU, on which molink never ran."""
    monkeypatch.setenv("MOLINK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(swarm_capacity, "_read_card", lambda: None)
    memory = psutil.virtual_memory()._replace(total=16 * GB, available=12 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def card(memory: int, rate: float) -> dict[str, Any]:
    return {
        "kind": "cuda",
        "name": "NVIDIA Some Card",
        "memory": memory,
        "read_rate": rate,
        "has_block_kernels": True,
        "reads_pages": True,
    }


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The status of a running swarm of two GPUs, which the test may change."""
    status: dict[str, Any] = {
        "peers": [
            {"id": "a", "name": "desk", "state": "online", "stage": "auto"},
            {"id": "b", "name": "lap", "state": "online", "stage": "auto"},
            {"id": "c", "name": "old", "state": "offline"},
            {"id": "d", "name": "tablet", "state": "online", "stage": "none", "memory": GB},
        ]
    }
    for peer in status["peers"][:2]:
        peer |= {"capacity": card(12 * GB, 400e9), "memory": 12 * GB, "device": "cuda 0: Card"}
    run_file = RunFile(pid=1, started=0.0, control_port=1, endpoint="")
    found = daemon_client.RunningDaemon(Home(tmp_path), run_file)
    monkeypatch.setattr(daemon_client, "find_daemon", lambda _: found)
    monkeypatch.setattr(daemon_client, "fetch_status", lambda _: status)
    return status


def search(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert run(["search", *words, "--json"]) == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)}


def test_the_table_has_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (eight,) = [line.split() for line in lines if line.startswith("qwen3:8b ")]
    assert eight[:7] == ["qwen3:8b", "8.2", "B", "5.0", "GB", "6.4", "GB"]
    assert eight[7] == "yes"
    assert lines[0].split() == [
        *("model", "params", "download", "memory", "fits", "tokens/s", "PCs"),
    ]
    assert "on this PC, 8.0 GB of memory" in "\n".join(lines)
    assert "Not measured yet" in "\n".join(lines)


def test_words_choose_models(capsys: pytest.CaptureFixture[str]) -> None:
    found = search(capsys, "qwen3-coder")
    assert list(found) == [f"qwen3-coder:{tag}" for tag in ("30b-a3b", "80b-a3b", "480b-a35b")]
    assert "qwen3-coder:30b-a3b-bf16" in search(capsys, "qwen3-coder", "--all")
    assert run(["search", "nothing-like-that"]) == 5
    error = capsys.readouterr().err
    assert "no model in molink's catalog matches 'nothing-like-that'" in error
    assert "OWNER/NAME" in error
    assert list(search(capsys, "qwen3-coder", "bf16")) == [
        "qwen3-coder:30b-a3b-bf16",
        "qwen3-coder:80b-a3b-bf16",
    ]
    assert run(["search", "qwen4"]) == 5
    assert "Did you mean qwen3" in capsys.readouterr().err


def test_facts_of_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = search(capsys, "llama3.3").values()
    assert found["source"] == (
        "bartowski/Llama-3.3-70B-Instruct-GGUF/Llama-3.3-70B-Instruct-Q4_K_M.gguf"
    )
    assert found["download_bytes"] == pytest.approx(42.5e9, rel=0.01)
    assert (found["fits"], found["tokens_per_s"]) == (False, None)
    assert "needs" in found["reason"]


def test_a_running_swarm(swarm: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = search(capsys)
    assert (found["qwen3:8b"]["fits"], found["qwen3:8b"]["stages"]) == (True, 1)
    assert (found["qwen3:30b-a3b"]["fits"], found["qwen3:30b-a3b"]["stages"]) == (True, 2)
    assert not found["llama3.3:70b"]["fits"]
    assert found["qwen3:8b"]["tokens_per_s"] > 30
    assert run(["search", "qwen3:8b"]) == 0
    assert "on this swarm of 2 PCs, 24.0 GB of memory" in capsys.readouterr().out


def test_links_of_a_running_ring_count(
    swarm: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    near = search(capsys, "qwen3:30b")["qwen3:30b-a3b"]["tokens_per_s"]
    link = {"latency_s": 0.05, "rate": 1e6}
    for index, peer in enumerate(swarm["peers"][:2]):
        load = {"link": link}
        peer["workers"] = [{"pipeline": "p", "stage": index, "layers": [0, 1], "load": load}]
    swarm["pipelines"] = [
        {"id": "p", "stages": [{"peer": one, "layers": [0, 1]} for one in ("a", "b")]}
    ]
    far = search(capsys, "qwen3:30b")["qwen3:30b-a3b"]["tokens_per_s"]
    assert 1 / far > 1 / near + 0.09


def test_a_pc_of_an_older_version_tells_its_memory(
    swarm: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for peer in swarm["peers"][:2]:
        del peer["capacity"]
    found = search(capsys, "qwen3:8b")["qwen3:8b"]
    assert (found["fits"], found["tokens_per_s"]) == (True, None)


def test_a_measured_pc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured = Device(
        kind="cpu", name="CPU", memory=32 * GB, read_rate=40e9, has_block_kernels=True
    )
    monkeypatch.setattr(swarm_capacity, "read_measured_device", lambda *_: measured)
    assert search(capsys, "qwen3:8b")["qwen3:8b"]["tokens_per_s"] == pytest.approx(8, rel=0.2)


def test_a_model_that_does_not_fit_is_refused_before_the_download(
    swarm: dict[str, Any], tmp_path: Path
) -> None:
    catalog = load_catalog()
    too_large, fitting = catalog.find_entry("qwen3:32b-bf16"), catalog.find_entry("qwen3:8b")
    assert too_large is not None
    assert fitting is not None
    check_fit(fitting, Home(tmp_path), swarm)
    with pytest.raises(UsageError) as refused:
        check_fit(too_large, Home(tmp_path), swarm)
    said = str(refused.value)
    assert "qwen3:32b-bf16 needs" in said
    assert "the swarm offers 22.8 GB on 2 peers" in said
    assert "Of qwen3, qwen3:0.6b, " in said
    assert "qwen3:30b-a3b would fit" in said
    assert "Nothing was downloaded" in said
    swarm["peers"] = []
    check_fit(too_large, Home(tmp_path), swarm)
