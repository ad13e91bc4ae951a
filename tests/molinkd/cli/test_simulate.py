"""``molink simulate``: JSON, table, timeline, replay and errors."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from molink.link.policies.base import MessageSentEvent, RowsProducedEvent
from molink.link.policies.create import create_policy
from molink.link.recording import RecordingPolicy
from molink.wire.messages.data_plane import Channel
from molinkd.cli.main import run

SHORT = ("--rate", "0.5", "--duration", "4", "--input-tokens", "64", "--output-tokens", "4")
KEYS = {
    *("policy", "completed", "failed", "duration_s", "requests_per_s", "output_tokens_per_s"),
    *("ttft_s", "tpot_s", "itl_s", "latency_s"),
    *("switches", "floor_s", "micro_batches", "bubble_share", "link_utilisation", "seed"),
}


def simulate(*arguments: str) -> int:
    return run(["simulate", *arguments])


def test_several_policies_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*SHORT, "--policy", "fifo, adaptive", "--stages", "2", "--json", "--seed", "1")
    timeline = ("--timeline", "unused.png")
    assert simulate(*arguments, *timeline) == 2
    assert "must be an .svg file, not unused.png" in capsys.readouterr().err
    assert simulate(*arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in found] == ["fifo", "adaptive"]
    for each in found:
        assert each.keys() >= KEYS
        assert each["ttft_s"].keys() == {"mean", "p50", "p90", "p99"}
        assert len(each["bubble_share"]) == len(each["link_utilisation"]) == 2
        assert each["failed"] == 0


def test_the_reason_of_failed_requests_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*SHORT, "--policy", "fifo", "--input-tokens", "9000000") == 0
    assert "failed; first error: 9000000 tokens and up to" in capsys.readouterr().out


def test_one_policy_is_an_object_and_options_apply(capsys: pytest.CaptureFixture[str]) -> None:
    switches = ("--no-cut-through", "--compression", "none", "--micro-batches", "3")
    more = (
        "--max-num-batched-tokens",
        "128",
        "--tensors",
        "2",
        "--bandwidth",
        "200",
        "--latency",
        "5",
    )
    assert simulate(*SHORT, "--policy", "fifo", *switches, *more, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["switches"] == {
        "policy": "fifo",
        "scheduling_policy": "fcfs",
        "preemption_mode": "recompute",
        "cut_through": False,
        "prefill_only_batches": True,
        "compression": "none",
        "micro_batches": 3,
        "tensors": 2,
        "max_num_batched_tokens": 128,
    }
    assert (found["bandwidth_mbps"], found["latency_ms"]) == (200.0, 5.0)
    assert found["congestion"] == "none"


@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
def test_congestion_control(congestion: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*SHORT, "--congestion", congestion, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["congestion"] == congestion
    assert found["failed"] == 0
    assert simulate(*SHORT, "--congestion", "vegas") == 2
    assert "vegas" in capsys.readouterr().err


def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": n, "output_length": 3} for n in (20, 9000, 30)]
    trace.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    load = ("--trace", str(trace), "--rate", "1", "--duration", "5")
    assert simulate(*load, "--policy", "fifo", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["completed"] > 0
    assert found["output_tokens"] == 3 * found["completed"]
    assert found["input_tokens"] <= 30 * found["completed"]
    assert simulate(*load, "--input-tokens", "5") == 2


def test_a_bad_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,374,44\nyesterday,1,1\n",
        encoding="utf-8",
    )
    assert simulate("--trace", str(trace)) == 2
    assert "trace.csv, row 3: " in capsys.readouterr().err


def test_table_and_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "ring.svg"
    where = ("--timeline", str(picture), "--window", "0:30")
    assert simulate(*SHORT, "--policy", "fifo", *where) == 0
    out = capsys.readouterr().out
    assert "fifo" in out
    assert "107.6 ms" in out
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    texts = {"".join(each.itertext()) for each in root.iter() if each.tag.endswith("text")}
    assert {"stage 1", "link 1", "stage 3", "link 3", "fifo", "0.00 s", "30.00 s"} <= texts
    assert sum(each.tag.endswith("rect") for each in root.iter()) > 20


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--scheduling-policy", "lottery"), "no scheduling policy 'lottery': choose one of fcfs"),
        (("--device", "abacus"), "no profile 'abacus' among the devices: a100-40gb, cpu-8core"),
        (("--model-profile", "gpt-9"), "no profile 'gpt-9' among the models: "),
        (("--link", "string"), "no profile 'string' among the links: "),
        (("--policy", "fifo,random"), "unknown link policy 'random'"),
        (("--bandwidth", "0"), "bandwidth_mbps must be above 0"),
        (("--latency", "-1"), "latency_ms must be 0 or more"),
        (("--rate", "0"), "--rate and --duration must be above 0"),
        (("--stages", "0"), "--stages must be from 1 to 64, not 0"),
        (("--stages", "33"), "qwen-7b has 32 layers: too few for 33 stages"),
        (("--micro-batches", "0"), "--micro-batches must be a positive number or auto"),
        (("--micro-batches", "many"), "--micro-batches must be a positive number or auto"),
        (("--micro-batches", "1000"), "--micro-batches must be from 0 to 64"),
        (("--timeline", "x.svg", "--window", "5:1"), "--window must be A:B in seconds"),
        (("--window", "1:5"), "--window needs --timeline"),
        (("--arrivals", "trace"), "--arrivals trace needs a --trace"),
        (("--trace", "nowhere.csv"), "can't read the trace nowhere.csv"),
        (("--replay", "nowhere.jsonl"), "can't read the recording nowhere.jsonl"),
    ],
)
def test_clear_errors(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate("--duration", "6", *arguments) == 2
    assert complaint in capsys.readouterr().err


def test_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[bytes] = []
    recorder = RecordingPolicy(create_policy("fifo"), lines.append)
    for name in range(2):
        recorder.handle(RowsProducedEvent(name, Channel.BULK, 10, 100), 1.0)
        recorder.choose_action(1.0, list(Channel))
        recorder.handle(MessageSentEvent(Channel.BULK, 1000), 1.0)
    recorder.choose_action(2.0, list(Channel))
    recording = tmp_path / "link.jsonl"
    recording.write_bytes(b"".join(lines))
    assert simulate("--replay", str(recording)) == 0
    assert "All decisions match." in capsys.readouterr().out

    recording.write_bytes(b"".join(lines).replace(b'"send":[1,10]', b'"send":[1,9]'))
    assert simulate("--replay", str(recording), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["differences"]) == 1
    assert simulate("--replay", str(recording)) == 1
    assert "1 decisions differ." in capsys.readouterr().out
    recording.write_bytes(b"nonsense\n")
    assert simulate("--replay", str(recording)) == 2
    assert "line 1 of the recording" in capsys.readouterr().err


FLEET = ("--pipelines", "2", "--stages", "2", "--router", "round-robin", "--churn", "30")


def test_many_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*SHORT, *FLEET, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= KEYS - {"floor_s", "micro_batches", "bubble_share", "link_utilisation"}
    assert (found["failed"], found["lost"], found["peers"]) == (0, 0, 4)
    assert len(found["pipelines"]) == 2
    assert found["cpu_s"] > 0
    assert simulate(*SHORT, *FLEET, "--policy", "fifo,adaptive") == 0
    shown = capsys.readouterr().out
    for word in ("fifo", "adaptive", "requests per pipeline", "CPU seconds per virtual minute"):
        assert word in shown


def test_options_of_many_pipelines_need_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*SHORT, "--churn", "2") == 2
    assert "--churn needs --pipelines" in capsys.readouterr().err
    assert simulate(*SHORT, "--pipelines", "2", "--timeline", "unused.svg") == 2
    assert "omit --pipelines" in capsys.readouterr().err
