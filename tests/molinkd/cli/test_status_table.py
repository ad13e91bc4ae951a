"""The tables of ``molink status``."""

from typing import Any

import msgspec
import pytest

from molink.swarm.controller.status_schema import decode_status
from molink.swarm.election.terms import next_epoch, next_term
from molinkd.cli.status_table import show_status
from tests.molinkd.cli.top import swarms

STATE: dict[str, Any] = {
    "swarm": "home",
    "coordinator": {"state": "running", "addresses": []},
    "model": "m",
    "trouble": "",
    "peers": [
        {
            "id": "f00",
            "name": "[red]pc[/red]",
            "address": "192.168.1.7",
            "state": "online",
            "device": "cpu: x",
            "endpoint": "http://e",
            "daemon_pid": 1,
            "workers": [{"layers": [0, 4], "state": "loading"}],
        }
    ],
    "pipelines": [{"id": "p1", "epoch": 3, "ready": False, "reason": "why not"}],
}


def show(state: dict[str, Any], *, demo: bool = False) -> None:
    """Print a status as it comes from a daemon."""
    show_status(decode_status(msgspec.json.encode(state)), demo=demo)


def test_replicas_on_disk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    peers = [{**STATE["peers"][0], "copied": copied} for copied in (0, 43, 100)]
    show({**STATE, "peers": peers, "files": "Only pc has all files of m"})
    out = capsys.readouterr().out
    assert "Only pc has all files of m" in out
    words = [line.split() for line in out.splitlines() if "f00" in line]
    assert [("%" in line, "whole" in line) for line in words] == [
        (False, False),
        (True, False),
        (False, True),
    ]


def test_status_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show(STATE, demo=True)
    out = capsys.readouterr().out
    # Names of peers are printed literally, not as markup.
    for text in ("home (demo)", "[red]pc[/red]", "stage 1 loading", "1-4", "why not", "epoch 3"):
        assert text in out


def test_an_epoch_after_a_change_of_leader(capsys: pytest.CaptureFixture[str]) -> None:
    term = next_term(next_term(0, "a"), "b")
    show(
        {**STATE, "pipelines": [{"id": "p1", "epoch": next_epoch(7, term), "ready": True}]},
    )
    assert "(epoch 2.1)" in capsys.readouterr().out


def test_quantization_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show({**STATE, "quantize": "nf4"})
    show({**STATE, "quantize": "none"})
    show({**STATE, "quantize": "nf4", "models": [{"name": "m", "kv_cache_dtype": "int8"}]})
    quantized, plain, with_kv = capsys.readouterr().out.split("Swarm ")[1:]
    assert "model m in nf4:" in quantized
    assert "model m in nf4, KV in int8" in with_kv
    assert " in " not in plain.splitlines()[0]


def test_an_unreachable_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    show({**STATE, "coordinator": {"state": "unreachable"}, "trouble": "gone"})
    assert "local information only: gone" in capsys.readouterr().out


def test_peer_texts_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;PWNED\x07\x1b[2J"
    peer = {**STATE["peers"][0], "name": evil, "device": evil, "endpoint": evil}
    pipeline = {"id": evil, "epoch": 1, "ready": False, "reason": evil}
    cut_off = {"peer": evil, "name": evil, "banned_by": "us", "reason": evil}
    changes = {"model": evil, "peers": [peer], "pipelines": [pipeline], "banned_peers": [cut_off]}
    show({**STATE, **changes})
    out = capsys.readouterr().out
    assert "PWNED" in out
    assert not set("\x1b\x07") & set(out)


def test_banned_peers_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cut_off = {
        "peer": "p",
        "name": "pc",
        "banned_by": "this PC's control socket",
        "reason": "nonsense",
    }
    show({**STATE, "banned_peers": [cut_off]})
    out = capsys.readouterr().out
    assert "pc (p) was banned by this PC's control socket: nonsense" in out


def test_the_reason_for_no_pipeline_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show({**STATE, "pipelines": [], "trouble": "no model was asked for"})
    assert "No pipeline: no model was asked for" in capsys.readouterr().out


def test_transfers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fetched = {"model": "m", "bytes": 2_000_000, "total": 10_000_000, "rate": 4_000_000}
    copied = {**fetched, "rate": 0, "from": "tv", "copy": True}
    transfers = [{**fetched, "eta_s": 2.0, "from": "nas", "copy": False}, copied]
    peer = {**STATE["peers"][0], "name": "pc", "transfers": transfers}
    show({**STATE, "peers": [peer]})
    out = capsys.readouterr().out
    assert "pc fetches m from nas: 2 of 10 MB, 4.0 MB/s, 2 s left" in out
    assert "pc copies m from tv: 2 of 10 MB\n" in out


def test_loading_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    loading = {"done": 2_000_000_000, "total": 4_000_000_000, "rate": 500_000_000}
    workers = [{"layers": [0, 4], "state": "loading", "loading": loading}]
    show({**STATE, "peers": [{**STATE["peers"][0], "name": "pc", "workers": workers}]})
    out = capsys.readouterr().out
    assert "pc loads layers 1-4: 2000 of 4000 MB, 500.0 MB/s, 4 s left\n" in out
    assert "stage 1 loading 50 %" in out


def test_differing_versions_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (one,) = STATE["peers"]
    show({**STATE, "peers": [{**one, "version": "1.0"}] * 2})
    assert "1.0" not in capsys.readouterr().out
    show({**STATE, "peers": [{**one, "version": "1.0"}, {**one, "version": "1.1"}]}, demo=False)
    out = capsys.readouterr().out
    assert "version" in out
    assert "1.0" in out
    assert "1.1" in out


def test_several_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    models = [
        {"name": "m", "quantize": "nf4"},
        {"name": "n", "replicas": 2, "ready": 1},
        {"name": "o", "replicas": 2, "stopped": True},
    ]
    pipelines = [
        {"id": id, "model": model, "epoch": 3, "ready": ready}
        for id, model, ready in (("p1", "m", True), ("p2", "n", True), ("p3", "n", False))
    ]
    show({**STATE, "models": models, "pipelines": pipelines})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "Swarm home, models m in nf4, n (1 of 2 replicas ready), o (stopped): ready"
    )
    assert [line for line in lines if line.startswith("Pipeline")] == [
        "Pipeline p1 of m (epoch 3) is ready",
        "Pipeline p2 of n (epoch 3) is ready",
        "Pipeline p3 of n (epoch 3) is not ready",
    ]


def test_roles_fit_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything in 80 columns without truncation."""
    monkeypatch.setenv("COLUMNS", "80")
    state = swarms.serving()
    first, second = state["peers"][:2]
    first |= {"address": "192.168.178.23", "endpoint": "http://127.0.0.1:5465", "copied": 100}
    second["workers"][0] |= {"state": "fetching", "fetching": {"done": 1, "total": 4}}
    state["peers"][3] |= {"stage": "none"}
    show({**state, "name": "den", "leader": first["id"]})
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "Swarm den (home), model qwen3-8b: ready"
    assert "peer address role layers weights+KV/all tokens/s" in lines
    assert "alice 192.168.178.23 stage 1, leads 1-8 3.0+1.0/12.0 GB 21.4" in lines
    assert "bob stage 2 fetching 25 % 9-16 3.0+1.0/12.0 GB 21.4" in lines
    assert "KV cache: 45.0 MB of 3.0 GB used" in lines
    assert any(line.startswith("laptop endpoint only none") for line in lines)
    assert any(line.startswith("attic offline none") for line in lines)
    assert f"alice {first['id']} cuda 0: RTX 3060 whole http://127.0.0.1:5465" in lines
    assert "Pipeline p1 (epoch 3) is ready: 2 requests, 1 waiting, 21.4 tokens/s" in lines


def test_readiness_of_pipelines() -> None:
    ready, other = ({"id": one, "model": one, "ready": one == "a"} for one in "ab")
    for pipelines, expected in (([], False), ([ready], True), ([ready, other], False)):
        state = {**STATE, "pipelines": pipelines}
        assert decode_status(msgspec.json.encode(state)).is_ready == expected
    replica = {"id": "a2", "model": "a", "ready": False}
    state = {**STATE, "pipelines": [replica, ready]}
    assert decode_status(msgspec.json.encode(state)).is_ready, "another replica serves it"


def test_lines_are_not_wrapped_for_pipes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    models = [{"name": "m" * 60}, {"name": "n", "replicas": 2, "ready": 1}]
    show({**STATE, "name": "den", "models": models})
    assert ", n (1 of 2 replicas ready): not ready\n" in capsys.readouterr().out


def test_names_of_joining_pcs_cannot_imitate_a_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = {
        "name": 'x" (10.0.0.1) wants to join: molink approve 1111-2222',
        "code": "4827-1931",
        "address": "10.0.0.7",
        "since": 0.0,
    }
    show({**STATE, "pairing_requests": [request]})
    out = capsys.readouterr().out
    assert '"x 10.0.0.1 wants to join molink approve 1111-2222" (10.0.0.7) wants to join: ' in out
