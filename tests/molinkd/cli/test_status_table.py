"""``molink status`` for people."""

import pytest

from molink.swarm.terms import next_epoch, next_term
from molinkd.cli.status_table import show_status

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


def test_copies(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    peers = [{**STATE["peers"][0], "copied": copied} for copied in (0, 43, 100)]  # type: ignore[index]
    show_status({**STATE, "peers": peers, "files": "Only pc has all files of m"}, demo=False)
    out = capsys.readouterr().out
    assert "Only pc has all files of m" in out
    words = [line.split() for line in out.splitlines() if "[red]" in line]
    assert [("%" in line, "whole" in line) for line in words] == [
        (False, False),
        (True, False),
        (False, True),
    ]


def test_what_it_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show_status(STATE, demo=True)
    out = capsys.readouterr().out
    # What peers call themselves is text, not markup.
    for text in ("home (demo)", "[red]pc[/red]", "layers 0:4 (loading)", "why not", "epoch 3"):
        assert text in out


def test_an_epoch_after_a_change_of_leader(capsys: pytest.CaptureFixture[str]) -> None:
    term = next_term(next_term(0, "a"), "b")
    show_status(
        {**STATE, "pipelines": [{"id": "p1", "epoch": next_epoch(7, term), "ready": True}]},
        demo=False,
    )
    assert "(epoch 2.1)" in capsys.readouterr().out


def test_how_weights_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    show_status({**STATE, "quantize": "nf4"}, demo=False)
    show_status({**STATE, "quantize": "none"}, demo=False)
    quantized, plain = capsys.readouterr().out.split("Swarm ")[1:]
    assert "model m in nf4" in quantized
    assert " in " not in plain.splitlines()[0]


def test_an_unreachable_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    show_status({**STATE, "coordinator": {"state": "unreachable"}, "trouble": "gone"}, demo=False)
    assert "Only what this PC knows: gone" in capsys.readouterr().out


def test_what_peers_say_drives_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;PWNED\x07\x1b[2J"
    peer = {**STATE["peers"][0], "name": evil, "device": evil, "endpoint": evil}
    pipeline = {"id": evil, "epoch": 1, "ready": False, "reason": evil}
    cut_off = {"peer": evil, "name": evil, "by": "us", "reason": evil}
    changes = {"model": evil, "peers": [peer], "pipelines": [pipeline], "cut_off": [cut_off]}
    show_status({**STATE, **changes}, demo=False)
    out = capsys.readouterr().out
    assert "PWNED" in out
    assert not set("\x1b\x07") & set(out)


def test_members_that_were_cut_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cut_off = {"peer": "p", "name": "pc", "by": "this PC's control socket", "reason": "nonsense"}
    show_status({**STATE, "cut_off": [cut_off]}, demo=False)
    out = capsys.readouterr().out
    assert "pc (p) was cut off by this PC's control socket: nonsense" in out


def test_why_there_is_no_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    show_status({**STATE, "pipelines": [], "trouble": "no model was asked for"}, demo=False)
    assert "No pipeline: no model was asked for" in capsys.readouterr().out


def test_transfers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fetched = {"model": "m", "bytes": 2_000_000, "total": 10_000_000, "rate": 4_000_000}
    copied = {**fetched, "rate": 0, "from": "tv", "copy": True}
    transfers = [{**fetched, "eta_s": 2.0, "from": "nas", "copy": False}, copied]
    peer = {**STATE["peers"][0], "name": "pc", "transfers": transfers}  # type: ignore[index]
    show_status({**STATE, "peers": [peer]}, demo=False)
    out = capsys.readouterr().out
    assert "pc fetches m from nas: 2 of 10 MB, 4.0 MB/s, 2 s left" in out
    assert "pc copies m from tv: 2 of 10 MB\n" in out


def test_versions_are_shown_where_they_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (one,) = STATE["peers"]  # type: ignore[misc]
    show_status({**STATE, "peers": [{**one, "version": "1.0"}] * 2}, demo=False)
    assert "1.0" not in capsys.readouterr().out
    show_status(
        {**STATE, "peers": [{**one, "version": "1.0"}, {**one, "version": "1.1"}]}, demo=False
    )
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
    show_status({**STATE, "models": models, "pipelines": pipelines}, demo=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Swarm home, models m in nf4, n (1 of 2 replicas ready), o (stopped)"
    assert [line for line in lines if line.startswith("Pipeline")] == [
        "Pipeline p1 of m (epoch 3) is ready",
        "Pipeline p2 of n (epoch 3) is ready",
        "Pipeline p3 of n (epoch 3) is not ready",
    ]
