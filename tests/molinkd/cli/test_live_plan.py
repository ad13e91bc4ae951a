"""``molink plan --live``: the plan of a status."""

from typing import Any

import pytest

from molink.errors import Unavailable
from molinkd.cli.live_plan import explain_rings, print_plan
from molinkd.cli.main import run


def stage(peer: str, step_s: float, link_s: float, *, measured: bool = True) -> dict[str, Any]:
    found = {"peer": peer, "layers": [0, 3], "device": "cpu: CPU", "decode_s": step_s}
    return {**found, "link_s": link_s, "link_measured": measured}


def status(*stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    pipeline = {"id": "p1", "ready": True, "stages": list(stages), "reason": ""}
    peers = [
        {"id": peer, "name": peer.upper(), "state": state, "reason": "a spare" * (peer == "c")}
        for peer, state in (("a", "online"), ("b", "online"), ("c", "online"), ("d", "offline"))
    ]
    return {"model": "toy", "peers": peers, "pipelines": [pipeline], "trouble": "", **more}


def test_the_links_are_the_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = explain_rings(
        status(stage("a", 0.010, 0.030), stage("b", 0.005, 0.020, measured=False))
    )
    assert plan.round_trip_s == pytest.approx(0.065)
    assert plan.bottleneck == "network, mostly A to B: 77 % of the time per token"
    assert plan.spare_peers == {"C": "a spare"}
    assert plan.as_json()["stages"][1]["measured"] is False
    print_plan(plan)
    shown = capsys.readouterr().out
    for text in ("30.0 ms", "20.0 ms (assumed)", "65.0 ms", "No stage: C (a spare)"):
        assert text in shown


def test_one_stage_is_the_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = explain_rings(status(stage("a", 0.010, 0.0)))
    assert plan.bottleneck == "computation, mostly on A: 100 % of the time per token"
    print_plan(plan)
    assert "assumed" not in capsys.readouterr().out
    assert explain_rings(status(stage("a", 0.0, 0.0)))[0].bottleneck == "nothing measured yet"


def test_prospects_of_another_pc(capsys: pytest.CaptureFixture[str]) -> None:
    now = {"device": "", "stages": 2, "round_trip_s": 0.065, "tokens_per_s": 15.4}
    more = [
        {**now, "device": "cuda: fast", "stages": 1, "round_trip_s": 0.02, "tokens_per_s": 50.0},
        {**now, "device": "cpu: slow"},
    ]
    scale_out = {"p1": {"now": now, "more": more}}
    (plan,) = explain_rings(status(stage("a", 0.010, 0.030), scale_out=scale_out))
    print_plan(plan)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Another cuda: fast: 1 stage, 20.0 ms per token instead of 65.0 ms per token" in shown
    assert "either way (estimated)" in shown
    assert "Another cpu: slow would not help: 65.0 ms per token either way" in shown
    assert plan.as_json()["prospects"][0]["round_trip_s"] == 0.02
    (plan,) = explain_rings(status(stage("a", 0.01, 0.03), scale_out={}))
    assert plan.prospects == ()


def test_memory_and_the_first_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = status(stage("a", 0.010, 0.030), stage("b", 0.005, 0.020))
    load = {"weights": 3 * 10**9, "kv": 2 * 10**9}
    worker = {"pipeline": "p1", "stage": 0, "load": load}
    told["peers"][0] |= {"memory": 12 * 10**9, "workers": [{**worker, "pipeline": "p0"}, worker]}
    told["peers"][1] |= {"memory": 1, "workers": [{**worker, "stage": 1, "load": None}]}
    told["scale_out"] = {"p1": {"prompt": 512, "first_token_s": 1.25}}
    (plan,) = explain_rings(told)
    assert [(one.weights, one.kv, one.memory) for one in plan.stages] == [
        (3 * 10**9, 2 * 10**9, 12 * 10**9),
        (0, 0, 0),
    ]
    assert plan.as_json()["first_token_s"] == 1.25
    print_plan(plan)
    shown = " ".join(capsys.readouterr().out.split())
    assert "512 prompt tokens: first token in about 1250 ms, then one every 65.0 ms" in shown
    assert "of 12.0 GB" in shown
    assert "unknown" in shown


def test_no_ring() -> None:
    waiting = {"ready": False, "stages": [], "reason": "waiting for peers"}
    with pytest.raises(Unavailable, match="no ring is ready: waiting for peers"):
        explain_rings(status(pipelines=[waiting]))
    with pytest.raises(Unavailable, match="no model is served"):
        explain_rings(status(pipelines=[]))


def test_no_daemon(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--live", "--home", str(tmp_path)]) == Unavailable.exit_code
    assert "molink" in capsys.readouterr().err


def test_each_model_has_its_ring() -> None:
    told = status(stage("a", 0.010, 0.0))
    (one,) = told["pipelines"]
    other = {**one, "model": "other", "stages": [stage("b", 0.005, 0.0)]}
    told |= {"pipelines": [one, other], "models": [{"name": "other", "objective": "throughput"}]}
    first, second = explain_rings(told)
    assert (first.model, second.model) == (told["model"], "other")
    assert second.objective == "throughput"
    assert second.round_trip_s == 0.005
    assert not {stage.peer for stage in second.stages} & second.spare_peers.keys()
