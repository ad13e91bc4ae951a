"""Workloads and smallest runs of the scheduling benchmark."""

import argparse
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from molink.facts.settings import PREEMPTION_MODES
from molink.scheduler.request_state import Emission, RequestState
from molink.scheduler.scheduler import Scheduler
from molink.sim.scenario import Scenario
from tools.scheduling import command
from tools.scheduling.order import STEP, find_highest, short_behind_long
from tools.scheduling.preemption import ORACLE, compare_modes, measure_preemption
from tools.scheduling.processes import mean_latency, plan_burst, simulate_ring
from tools.scheduling.report import render_report
from tools.scheduling.requests import LIMIT, SIZES, log_normal, plan_poisson, sizes_of
from tools.scheduling.serving import NO_WORKLOAD, simulate_plan


def test_sizes_have_stated_mean() -> None:
    rng = random.Random(1)
    drawn = [log_normal(rng, 338.0, 1.0, 1 << 20) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(338, rel=0.03)
    assert max(log_normal(rng, 338.0, 1.0, 512) for _ in range(1000)) == 512


def test_ratio_keeps_total_tokens() -> None:
    (prompt, spread), (output, _) = SIZES["sharegpt"]
    draw = sizes_of("sharegpt", 4.0)
    rows = [draw(random.Random(seed)) for seed in range(4000)]
    outputs = sum(row.output_tokens for row in rows) / len(rows)
    assert outputs == pytest.approx((prompt + output) / 5, rel=0.1)
    assert spread > 0


def test_request_sizes_are_equal_at_every_rate() -> None:
    slow, fast = (plan_poisson(sizes_of("alpaca"), rate, 30.0, 7) for rate in (1.0, 2.0))
    assert [each.output_tokens for each in slow] == [each.output_tokens for each in fast][
        : len(slow)
    ]
    assert [each.arrival_s for each in slow[:9]] == [2 * each.arrival_s for each in fast[:9]]


@pytest.mark.parametrize("policy", ["gittins", "srpt"])
def test_only_oracle_knows_answer_lengths(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, int] = {}
    submit = Scheduler.submit_request

    def listen(head: Scheduler, state: RequestState, now: float) -> list[Emission]:
        asked[state.key] = state.request.max_tokens
        return submit(head, state, now)

    monkeypatch.setattr(Scheduler, "submit_request", listen)
    plan = plan_poisson(sizes_of("sharegpt"), 5.0, 2.0, 1)
    scenario = Scenario(NO_WORKLOAD, 1, max_num_seqs=8, scheduling_policy=policy)
    samples, _, _ = simulate_plan(scenario, plan)
    answers = [request.output_tokens for request in plan]
    assert [sample.output_tokens for sample in samples] == answers
    assert max(answers) < LIMIT
    assert list(asked.values()) == (answers if policy == "srpt" else [LIMIT] * len(plan))


@pytest.mark.parametrize("bound", [0.3, 7.0])
def test_highest_rate_is_found_by_bisection(bound: float) -> None:
    assert find_highest(lambda step: float(STEP**step), bound) == pytest.approx(bound, rel=0.02)


def test_short_prompt_overtakes_long_one() -> None:
    options = argparse.Namespace(policies=["fcfs", "skip-join-mlfq", "gittins"])
    fcfs, *others = short_behind_long(options)["rows"]
    assert fcfs["short_ttft_s"] > 5
    for row in others:
        assert row["short_ttft_s"] < 1.5
        assert row["long_by_alone"] < 1.1


@pytest.mark.slow
def test_proactive_swapping_shortens_waits(tmp_path: Path) -> None:
    """Reactive copies make steps wait longer; neither mode recomputes."""
    card = Path(__file__).parents[2] / "configs" / "devices" / "rtx4090.toml"
    text = card.read_text(encoding="utf-8").replace("memory_gb = 24", "memory_gb = 20")
    (tmp_path / "small.toml").write_text(text, encoding="utf-8")
    device = str(tmp_path / "small.toml")
    options = argparse.Namespace(
        stages=1,
        device=device,
        model="qwen-7b",
        orders=["skip-join-mlfq"],
        ratios=[1.0],
        loads=[6.0],
        seconds=3.0,
        seeds=[1],
        swap_gb=32.0,
    )
    found = measure_preemption(options)
    rows = {row["side"]: row for row in found["rows"]}
    recompute, reactive, proactive = (rows[mode] for mode in PREEMPTION_MODES)
    bound = rows[ORACLE]
    assert recompute["swaps"] == recompute["waited"] == bound["waited"] == 0
    assert min(reactive["swaps"], proactive["swaps"], bound["swaps"]) > 10
    assert 0 < proactive["waited"] < 0.5 * reactive["waited"]
    assert recompute["recomputed"] > 0.1 > proactive["recomputed"]
    for row in rows.values():
        assert row["till_first"] + row["paused"] < 1
    times = {(pair["slow"], pair["fast"]): pair["times"] for pair in found["against"]}
    assert times["recompute", ORACLE] == pytest.approx(recompute["mean_s"] / bound["mean_s"])


def test_modes_are_compared_seed_by_seed() -> None:
    rows = [
        {"side": side, "seed": seed, "mean_s": mean}
        for seed, means in ((1, (2.0, 1.5, 1.0, 1.0)), (2, (8.0, 2.0, 2.0, 1.0)))
        for side, mean in zip((*PREEMPTION_MODES, ORACLE), means, strict=True)
    ]
    found = {(pair["slow"], pair["fast"]): pair for pair in compare_modes(rows)}
    pair = found["recompute", "proactive-swap"]
    assert (pair["times"], pair["least"], pair["most"]) == (3.0, 2.0, 4.0)
    assert found["reactive-swap", ORACLE]["most"] == 2.0


def test_short_requests_overtake_long_ones_in_burst() -> None:
    plan = plan_burst(16)
    means = {
        policy: mean_latency(simulate_plan(simulate_ring(policy), plan)[0])
        for policy in ("fcfs", "skip-join-mlfq")
    }
    assert means["skip-join-mlfq"] < 0.8 * means["fcfs"]


def test_report_is_up_to_date() -> None:
    page = (command.RESULTS / "scheduling.md").read_text(encoding="utf-8")
    assert page == render_report(command.RESULTS)
    assert page.count("## ") >= 8


@pytest.mark.parametrize("traces", [(), ("--trace", "a.csv", "--conversations", "b.jsonl")])
@pytest.mark.parametrize("jobs", ["1", "3"])
def test_all_runs_every_figure_in_own_process(
    traces: tuple[str, ...],
    jobs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made: list[tuple[str, str]] = []

    def run(arguments: Sequence[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert arguments[:2] == [sys.executable, "-m"]
        if arguments[2] == "tools.routing":
            made.append(("routing", " ".join(arguments[3:-2])))
        else:
            options = command._make_parser().parse_args(arguments[3:])
            made.append((options.figure_name, options.out.name))
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(subprocess, "run", run)
    command.main(["--all", "--jobs", jobs, "--out", str(tmp_path), *traces])
    told = capsys.readouterr().out
    assert {name for name, _ in made} == {*command.FIGURES, "routing", "report"}
    assert [name for name, _ in made[-2:]] == ["processes", "report"]
    assert len(set(made)) == len(made)
    assert told.count("python -m tools.") == len(made)
    assert ("skipped" in told) is not bool(traces)
    assert (("slo", "scheduling-slo-trace.json") in made) is bool(traces)
    count = len(made)
    command.main(["--all", "--out", str(tmp_path), "--without", "processes,latency", *traces])
    assert {name for name, _ in made[count:]}.isdisjoint({"processes"})
    assert [what for name, what in made[count:] if name == "routing"] == ["speed"]


def test_all_stops_at_failed_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: Sequence[str], check: bool) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(arguments, int("ratios" in arguments))

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"failed: python -m tools\.scheduling ratios"):
        command.main(["--all", "--out", str(tmp_path)])
