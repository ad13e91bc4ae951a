"""Whole simulations: deterministic, lossless, and never faster than the ring allows."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from molink.bench.workload import PlannedRequest
from molink.errors import UsageError
from molink.link.policies.create import POLICIES
from molink.scheduler.policies import create
from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.request_state import RequestState
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import (
    SimPipeline,
    SimulationOutcome,
    simulate_scenario,
    simulate_scenarios,
)
from molink.sim.workload import Workload


def mean_tpot(outcome: SimulationOutcome) -> float:
    assert outcome.report.tpot_s.mean is not None
    return outcome.report.tpot_s.mean


def mean_ttft(outcome: SimulationOutcome) -> float:
    assert outcome.report.ttft_s.mean is not None
    return outcome.report.ttft_s.mean


@pytest.mark.parametrize("policy", POLICIES)
def test_simulations_are_deterministic(baseline: Scenario, policy: str) -> None:
    everything = Scenario(baseline.workload, policy=policy)
    once, again = (json.dumps(simulate_scenario(everything).as_json()) for _ in range(2))
    assert once == again
    other = replace(everything, workload=replace(everything.workload, seed=4))
    assert json.dumps(simulate_scenario(other).as_json()) != once


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("cut_through", "compression"), [(False, "none"), (True, "lossless")])
def test_all_tokens_arrive(
    baseline: Scenario, policy: str, cut_through: bool, compression: str
) -> None:
    scenario = replace(
        baseline,
        policy=policy,
        cut_through=cut_through,
        compression=compression,
        max_num_batched_tokens=0,
    )
    report = simulate_scenario(scenario).report
    planned = scenario.workload.plan_requests()
    assert (report.completed, report.failed, report.first_error) == (len(planned), 0, None)
    assert report.output_tokens == sum(request.output_tokens for request in planned)
    assert report.input_tokens == sum(request.input_tokens for request in planned)


def test_prompts_may_fill_the_kv_cache() -> None:
    load = Workload(1.0, 2.0, input_tokens=40_000, output_tokens=2)
    long = Scenario(
        load, stages=1, device="rtx5090", model="llama-3-8b", max_num_batched_tokens=8192
    )
    report = simulate_scenario(long).report
    assert report.completed > 0
    assert (report.failed, report.first_error) == (0, None)


def test_the_warm_up_is_not_counted(baseline: Scenario) -> None:
    scenario = replace(baseline, workload=replace(baseline.workload, warmup=2.5, duration=2.5))
    counted = [request for request in scenario.workload.plan_requests() if request.arrival_s >= 2.5]
    assert 0 < len(counted) < len(scenario.workload.plan_requests())
    assert simulate_scenario(scenario).report.completed == len(counted)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_single_stream_takes_a_round_trip_per_token(policy: str) -> None:
    alone = Workload(rate=0.03, duration=30.0, seed=1, input_tokens=200, output_tokens=20)
    outcome = simulate_scenario(Scenario(alone, policy=policy, compression="none"))
    # A link carries slightly less than its nominal rate, and 200 tokens of context cost time.
    assert outcome.floor_s <= mean_tpot(outcome) <= 1.05 * outcome.floor_s
    assert outcome.floor_s == pytest.approx(0.1077, abs=0.002)


def test_no_token_beats_the_round_trip(baseline: Scenario) -> None:
    plain = Scenario(baseline.workload, policy="adaptive", compression="none")
    for scenario in (baseline, plain):
        outcome = simulate_scenario(scenario)
        assert mean_tpot(outcome) >= outcome.floor_s
        assert all(0 < share < 1 for share in outcome.bubble_share)
        assert all(0 <= share < 1 for share in outcome.link_utilisation)


def test_a_ring_of_one_stage_has_no_links(workload: Workload) -> None:
    outcome = simulate_scenario(Scenario(workload, stages=1, policy="adaptive"))
    assert outcome.report.failed == 0
    assert outcome.link_utilisation == ()
    assert outcome.floor_s <= mean_tpot(outcome) <= 3 * outcome.floor_s
    assert outcome.floor_s == pytest.approx(0.016, abs=0.002)


def test_features_improve_latency(baseline: Scenario) -> None:
    busy = replace(baseline.workload, rate=0.9, duration=10.0, input_tokens=700, output_tokens=16)
    fifo = simulate_scenario(replace(baseline, workload=busy))
    two = simulate_scenario(replace(baseline, workload=busy, tensors_per_row=2))
    adaptive = simulate_scenario(replace(baseline, workload=busy, policy="adaptive"))
    everything = simulate_scenario(Scenario(busy, policy="adaptive"))
    assert mean_tpot(everything) < mean_tpot(adaptive) < mean_tpot(fifo) < mean_tpot(two)
    assert mean_ttft(everything) < mean_ttft(fifo) < mean_ttft(two)


def test_slower_links_increase_latency(workload: Workload) -> None:
    short = replace(workload, duration=4.0)
    near, slow, far = (
        simulate_scenario(Scenario(short, link=link, policy="adaptive"))
        for link in (LinkProfile(100, 10), LinkProfile(40, 10), LinkProfile(100, 50))
    )
    assert mean_ttft(near) < mean_ttft(slow)
    assert mean_tpot(far) - mean_tpot(near) == pytest.approx(3 * 0.04, rel=0.2)


def test_results_of_processes_keep_their_order(baseline: Scenario) -> None:
    scenarios = [replace(baseline, policy=policy) for policy in ("fifo", "molink")]
    together = simulate_scenarios(scenarios, processes=2)
    assert together == [simulate_scenario(scenario) for scenario in scenarios]


def test_a_model_that_does_not_fit_is_rejected(workload: Workload) -> None:
    scenario = Scenario(workload, device="rtx3060", model="qwen2.5-32b", stages=2)
    with pytest.raises(UsageError, match=r"qwen2\.5-32b doesn't fit into 2 x rtx3060"):
        simulate_scenario(scenario)


def test_the_scheduling_policy_is_the_scenarios(
    baseline: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[RequestState] = []

    class Listening(Fcfs):
        def on_arrived(self, state: RequestState, now: float) -> None:
            heard.append(state)

    monkeypatch.setitem(create._POLICIES, "listening", Listening)
    first = simulate_scenario(baseline)
    assert heard == []
    second = simulate_scenario(replace(baseline, scheduling_policy="listening"))
    assert len(heard) == second.report.completed == first.report.completed
    with pytest.raises(UsageError, match="no scheduling policy 'lottery'"):
        replace(baseline, scheduling_policy="lottery")


def counts_at(ring: SimPipeline, times: Sequence[float]) -> list[int]:
    """``K`` at each of these times."""
    found: list[int] = []
    for at in times:
        ring.event_queue.schedule_at(
            at, lambda: found.append(int(ring.gauges["scheduler_micro_batches"]))
        )
    ring.run(max(times) + 0.1)
    assert not ring.failure
    return found


def scenario(latency_ms: float, stages: int) -> Scenario:
    link = LinkProfile(1000.0, latency_ms)
    return Scenario(Workload(rate=1.0, duration=1.0), stages, link=link)


def test_micro_batches_follow_a_temporary_slowdown() -> None:
    streams = [PlannedRequest(index, 0.0, 16, 4_000) for index in range(24)]
    ring = SimPipeline(scenario(10.0, 3), streams)
    ring.slow_stage(1, 5.0, at=8.0)
    ring.slow_stage(1, 1.0, at=16.0)
    quick, at_once, slow, again = counts_at(ring, (7.9, 9.0, 15.9, 24.0))
    assert quick == at_once, "not after a moment"
    assert (quick, slow, again) == (6, 3, 6)
