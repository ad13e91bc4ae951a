"""``molink plan``: JSON, table and errors."""

import json
import re
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from molink.checkpoint.gguf_import import import_gguf
from molink.checkpoint.hub import NullCounter
from molink.checkpoint.model_source import find_demo_model
from molink.errors import Unavailable
from molinkd.cli.main import run
from molinkd.cli.plan import explain_rings, print_plan
from tests.support.gguf_models import Kind, write_gguf
from tests.support.models import MakeModel

RING = ("plan", "--stages", "2", "--prompt-tokens", "64", "--output-tokens", "4")


def test_plan_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*RING, "--streams", "4", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    # The second stage includes the output head.
    assert planned["layers"] == [[0, 18], [18, 32]]
    assert [each["count"] for each in planned["curve"]] == [2, 3, 4]
    assert 0 < planned["floor_s"] <= planned["token_s"]


def test_plan_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*RING, "--bandwidth", "20", "--latency", "2"]) == 0
    shown = capsys.readouterr().out
    assert "qwen-7b on 2 x rtx4090, links of 20 Mbps and 2 ms one way" in shown
    rows = [line.split()[:3] for line in shown.splitlines()]
    assert ["1", "rtx4090", "1-18"] in rows
    assert ["2", "rtx4090", "19-32"] in rows
    assert "Bottleneck: comput" in shown
    assert "Another rtx4090 would not help" in shown
    assert "<" in shown


def test_a_ring_has_one_time_per_token(capsys: pytest.CaptureFixture[str]) -> None:
    devices = ("--device", "rtx3060,rtx3090", "--model-profile", "llama-2-13b")
    assert run(["plan", *devices, "--bandwidth", "1000", "--latency", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    (alone,) = re.findall(r"then one every ([0-9.]+) ms", shown)
    assert set(re.findall(r"instead of ([0-9.]+) ms per token", shown)) == {alone}
    assert "Least time" not in shown


@pytest.mark.parametrize(
    "device", ["RTX 4090", "NVIDIA GeForce RTX 4090", "4090", "rtx-4090", "RTX 4060 Laptop GPU"]
)
def test_devices_as_people_write_them(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model-profile", "qwen2.5-0.5b", "--device", device]
    assert run([*RING, *options, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["stages"]) == 2


OBJECTIVES = ("latency", "throughput")
UNEQUAL = ("plan", "--prompt-tokens", "64", "--output-tokens", "4", "--json")


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run([*UNEQUAL, *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_unequal_pcs_get_layers_by_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(
        capsys,
        *("--device", "rtx3060, rtx3060,rtx3090", "--latency", "1"),
        *("--model-profile", "llama-2-13b"),
    )
    stages = found["stages"]
    assert [one["device"] for one in stages].count("rtx3090") == 1
    assert [one["layers"] for one in stages] == found["layers"]
    counts = {one["device"]: one["layers"][1] - one["layers"][0] for one in stages}
    assert counts["rtx3090"] > 2 * counts["rtx3060"]
    assert sum(one["step_s"] + one["link_s"] for one in stages) == pytest.approx(found["floor_s"])
    assert min(one["kv_tokens"] for one in stages) >= 8192
    assert found["bottleneck"].startswith("computing")
    more = {one["device"]: one for one in found["more"]}
    assert more["rtx3090"]["round_trip_s"] < found["now"]["round_trip_s"]
    assert more["rtx3060"]["round_trip_s"] <= found["now"]["round_trip_s"]


def test_a_pc_that_slows_the_ring_gets_no_stage(capsys: pytest.CaptureFixture[str]) -> None:
    far = planned(capsys, "--device", "rtx3090,rtx3060")
    assert [one["device"] for one in far["stages"]] == ["rtx3090"]
    assert far["spares"] == ["rtx3060"]
    assert far["stages"][0]["link_s"] == 0
    both = planned(capsys, "--device", "rtx3090,rtx3060", "--stages", "2")
    assert len(both["stages"]) == 2
    assert both["tpot_s"] > far["tpot_s"]
    assert both["bottleneck"].startswith("the links' latency")


def test_many_streams_justify_more_stages(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "rtx3060,rtx3060,rtx3060", "--latency", "1", "--bandwidth", "1000")
    options += ("--model-profile", "llama-3-8b")
    one, many = (planned(capsys, *options, "--objective", name) for name in OBJECTIVES)
    assert len(many["stages"]) > len(one["stages"])
    assert many["now"]["tokens_per_s"] > 100
    assert "for each micro-batch of 16 rows" in many["bottleneck"]


def test_a_model_folder(capsys: pytest.CaptureFixture[str]) -> None:
    folder = find_demo_model().path
    found = planned(capsys, "--device", "rtx3060", "--stages", "1", "--model", str(folder))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert found["model"] == folder.name
    assert found["layers"] == [[0, config["num_hidden_layers"]]]
    named = planned(capsys, "--device", "rtx3060", "--stages", "1", "--model", "molink-demo")
    assert named["layers"] == found["layers"]


def test_a_gguf_file_is_sized_by_its_blocks(
    capsys: pytest.CaptureFixture[str], make_model: MakeModel, tmp_path: Path
) -> None:
    """Blocks stay quantized on devices that multiply them, and become bf16 on others."""
    folder = make_model(tmp_path / "model", "llama", 3)
    plain = "memory_gbs = 60\ntflops = 1\nmemory_gb = 8\nmemory_efficiency = 0.7\nstep_ms = 0.5\n"
    plain += 'compute_efficiency = 0.6\nsource = "a test"\n'
    for name, more in (("numbers", ""), ("blocks", "blocks = true\n")):
        (tmp_path / f"{name}.toml").write_text(plain + more, encoding="utf-8")
    whole = write_gguf(folder, tmp_path / "tiny.gguf", Kind.Q8_0)
    part = write_gguf(folder, tmp_path / "parts.gguf", Kind.Q8_0, part=8)
    # Unpacked as `molink up` does, and read as a PC does that fetches it.
    unpacked_one = import_gguf(whole, tmp_path / "unpacked", NullCounter(), Event())
    stages = {
        (name, path): planned(
            capsys, "--stages", "1", "--device", f"{tmp_path}/{name}.toml", "--model", str(path)
        )["stages"][0]
        for name in ("numbers", "blocks")
        for path in (whole, part, unpacked_one)
    }
    kept, numbers = stages["blocks", whole], stages["numbers", whole]
    # 34 bytes for 32 weights; norms are not in blocks.
    assert kept["weights"] == pytest.approx(numbers["weights"] * 34 / 64, rel=0.02)
    assert kept["step_s"] < numbers["step_s"]
    assert stages["blocks", part] == kept
    assert stages["blocks", unpacked_one] == kept
    assert stages["numbers", unpacked_one] == numbers


def test_a_card_of_unknown_capability_is_assumed_to_have_kernels(
    capsys: pytest.CaptureFixture[str], make_model: MakeModel, tmp_path: Path
) -> None:
    """The plan states this assumption; cards before RTX 20 have no such kernels."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    folder = make_model(tmp_path / "model", "llama", 3, **wide)
    file, weights = write_gguf(folder, tmp_path / "tiny.gguf", Kind.Q8_0), []
    card = "memory_gbs = 300\ntflops = 9\nmemory_gb = 8\nmemory_efficiency = 0.9\nstep_ms = 0.5\n"
    card += 'compute_efficiency = 0.6\nsource = "a test"\ncapability = '
    for capability in (6.1, 7.5):
        device = tmp_path / f"card{capability}.toml"
        device.write_text(card + str(capability), encoding="utf-8")
        options = ("--stages", "1", "--device", str(device), "--model", str(file))
        weights.append(planned(capsys, *options)["stages"][0]["weights"])
        assert run(["plan", *options]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("stay packed on card7.5 if the card passes" in text) is (capability == 7.5)
    assert weights[1] == pytest.approx(weights[0] * 34 / 64, rel=0.02)
    assert run(["plan", "--device", "RTX 4090", "--model", str(folder)]) == 0
    assert "stay packed" not in capsys.readouterr().out


def test_a_short_name_needs_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--device", "rtx3060,rtx3090", "--model", "qwen3:8b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "qwen3:8b"
    assert sum(stage["weights"] for stage in found["stages"]) == pytest.approx(4.7e9, rel=0.1)


def test_a_model_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "rtx3060,cpu-8core", "--model-profile", "qwen2.5-32b")
    assert run([*UNEQUAL, *options]) == 2
    assert "qwen2.5-32b needs" in capsys.readouterr().err
    assert run([*UNEQUAL, "--model", "nowhere"]) == 5
    assert "no model 'nowhere'" in capsys.readouterr().err
    assert run([*UNEQUAL, "--model", "owner/name/file.gguf"]) == 2
    assert "owner/name/file.gguf is not on this PC" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "rtx9090", "rtx4090"),
        ("--device", "rtx3060,,rtx3090", "--device takes"),
        ("--device", "rtx3060,rtx9090", "rtx4090"),
        ("--objective", "speed", "--objective"),
        ("--bandwidth", "-3", "bandwidth_mbps"),
        ("--latency", "nan", "latency_ms"),
        ("--streams", "0", "--streams"),
        ("--model-profile", "nothing", "qwen-7b"),
        ("--model", "owner/none", "`molink pull owner/none`"),
    ],
)
def test_invalid_options_are_rejected(
    capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert run([*RING, option, value]) == 2
    assert message in capsys.readouterr().err


def test_help_lists_lazy_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "simulate" in shown
    assert "plan" in shown


def test_a_pc_with_two_devices_has_two_stages_and_a_fast_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", "--device", "rtx3060+rtx3060,rtx3060", "--stages", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    links = sorted(stage["link_s"] for stage in found["stages"])
    assert links[0] < 0.002
    assert min(links[1:]) > 0.03
    assert found["tpot_s"] < 0.07 + sum(stage["step_s"] for stage in found["stages"])
    # With one more PC the plan offers each of both devices; two devices of one PC need no link.
    assert {one["device"] for one in found["more"]} == {"rtx3060+rtx3060", "rtx3060"}
    assert run(["plan", "--device", "rtx3060 + rtx3060", "--json", "--stages", "2"]) == 0
    (first, second) = json.loads(capsys.readouterr().out)["stages"]
    assert max(first["link_s"], second["link_s"]) < 0.002
    assert run(["plan", "--device", "rtx3060+,rtx3060"]) == 2
    assert "a PC with both" in capsys.readouterr().err


def stage(peer: str, step_s: float, link_s: float, *, measured: bool = True) -> dict[str, Any]:
    found = {"peer": peer, "layers": [0, 3], "device": "cpu: CPU", "decode_s": step_s}
    return {**found, "link_s": link_s, "link_measured": measured}


def status(*stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    pipeline = {"id": "p1", "ready": True, "stages": list(stages), "reason": ""}
    peers = [
        {"id": peer, "name": peer.upper(), "state": state, "reason": "a standby" * (peer == "c")}
        for peer, state in (("a", "online"), ("b", "online"), ("c", "online"), ("d", "offline"))
    ]
    return {"model": "toy", "peers": peers, "pipelines": [pipeline], "trouble": "", **more}


def test_the_links_are_the_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = explain_rings(
        status(stage("a", 0.010, 0.030), stage("b", 0.005, 0.020, measured=False))
    )
    assert plan.round_trip_s == pytest.approx(0.065)
    assert plan.bottleneck == "network, mostly A to B: 77 % of the time per token"
    assert plan.idle_peers == {"C": "a standby"}
    assert plan.as_json()["stages"][1]["measured"] is False
    print_plan(plan)
    shown = capsys.readouterr().out
    for text in ("30.0 ms", "20.0 ms (assumed)", "65.0 ms", "No stage: C (a standby)"):
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
    # Placement estimates 65 ms for this ring and 40 ms were measured, so estimates of others are
    # scaled.
    assert "one token every 40.0 ms" in shown
    assert "Another cuda: fast: 1 stage, 12.3 ms per token instead of 40.0 ms per token" in shown
    assert "Another cpu: slow would not help (estimated)" in shown
    assert plan.as_json()["prospects"][0]["round_trip_s"] == 0.02
    (plan,) = explain_rings(status(stage("a", 0.01, 0.03), scale_out={}))
    assert plan.prospects == ()


def test_memory_and_the_first_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    report = status(stage("a", 0.010, 0.030), stage("b", 0.005, 0.020))
    load = {"weights": 3 * 10**9, "kv": 2 * 10**9}
    worker = {"pipeline": "p1", "stage": 0, "load": load}
    report["peers"][0] |= {"memory": 12 * 10**9, "workers": [{**worker, "pipeline": "p0"}, worker]}
    report["peers"][1] |= {"memory": 1, "workers": [{**worker, "stage": 1, "load": None}]}
    report["scale_out"] = {"p1": {"prompt": 512, "first_token_s": 1.25}}
    (plan,) = explain_rings(report)
    assert [(one.weights, one.kv, one.memory) for one in plan.stages] == [
        (3 * 10**9, 2 * 10**9, 12 * 10**9),
        (0, 0, 0),
    ]
    assert plan.as_json()["first_token_s"] == 1.25
    print_plan(plan)
    shown = " ".join(capsys.readouterr().out.split())
    assert "512 prompt tokens: first token in about 1250 ms, then one token every 65.0 ms" in shown
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
    report = status(stage("a", 0.010, 0.0))
    (one,) = report["pipelines"]
    other = {**one, "model": "other", "stages": [stage("b", 0.005, 0.0)]}
    report |= {"pipelines": [one, other], "models": [{"name": "other", "objective": "throughput"}]}
    first, second = explain_rings(report)
    assert (first.model, second.model) == (report["model"], "other")
    assert second.objective == "throughput"
    assert second.round_trip_s == 0.005
    assert not {stage.peer for stage in second.stages} & second.idle_peers.keys()


def test_experts_in_ram(capsys: pytest.CaptureFixture[str]) -> None:
    mixture = ("plan", "--model", "glm4.5:106b-a12b", "--device", "rtx4090,rtx4060")
    assert run(mixture) != 0
    assert "--expert-memory for experts" in capsys.readouterr().err
    assert run([*mixture, "--expert-memory", "56GB,26GB", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    beside = {one["device"]: one["host_weights"] for one in planned["stages"]}
    assert 30e9 < beside["rtx4090"] < 56e9
    assert 10e9 < beside["rtx4060"] < 26e9
    assert run([*mixture, "--expert-memory", "64GB"]) == 0
    assert "in RAM" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("1GB,2GB,3GB", "--expert-memory has 3 amounts for 2 PCs"),
        ("much", "not a size: 'much'"),
        ("64", "64 bytes? Write 64GiB"),
    ],
)
def test_nonsense_amounts_of_ram(
    capsys: pytest.CaptureFixture[str], given: str, message: str
) -> None:
    options = ["--model", "gpt-oss:120b", "--device", "rtx4090,rtx4060", "--expert-memory", given]
    assert run(["plan", *options]) != 0
    assert message in capsys.readouterr().err
