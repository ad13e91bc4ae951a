"""Fleets in virtual time: no request is lost, and stages on a shared PC slow each other down."""

import json
import random
from dataclasses import replace
from statistics import fmean

import pytest

from molink.bench.workload import TraceRow
from molink.errors import UsageError
from molink.routing.cache_report import CacheReport
from molink.routing.create import ROUTERS
from molink.routing.e2 import E2Router
from molink.sim.fleet import FleetOutcome, FleetScenario, simulate_fleet
from molink.sim.profiles import LinkProfile, ModelProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import simulate_scenario
from molink.sim.workload import Workload

#: A model with small keys and values, like Qwen2.5-7B.
SMALL_KV = ModelProfile("small", "", 28, 3584, 18_944, 28, 4, 128, 152_064)


@pytest.fixture
def ring(workload: Workload) -> Scenario:
    return Scenario(replace(workload, rate=2.0), stages=2, link=LinkProfile(100, 10))


def assert_all_done(outcome: FleetOutcome) -> None:
    planned = outcome.fleet.ring.workload.plan_requests()
    assert (outcome.num_lost, outcome.num_broken) == (0, 0)
    assert outcome.report.completed == len(planned)
    assert outcome.report.output_tokens == sum(request.output_tokens for request in planned)


def mean_tpot(outcome: FleetOutcome) -> float:
    assert outcome.report.tpot_s.mean is not None
    return outcome.report.tpot_s.mean


def mean_ttft(outcome: FleetOutcome) -> float:
    assert outcome.report.ttft_s.mean is not None
    return outcome.report.ttft_s.mean


def test_a_single_pipeline_equals_its_ring(ring: Scenario) -> None:
    alone, fleet = simulate_scenario(ring).report, simulate_fleet(FleetScenario(ring, 1)).report
    assert (fleet.ttft_s, fleet.tpot_s, fleet.latency_s) == (
        alone.ttft_s,
        alone.tpot_s,
        alone.latency_s,
    )


def test_several_pipelines_share_the_load(ring: Scenario) -> None:
    outcome = simulate_fleet(FleetScenario(ring, 4))
    assert_all_done(outcome)
    assert mean_tpot(outcome) < mean_tpot(simulate_fleet(FleetScenario(ring, 1)))
    assert all(each.requests > 0 and each.formed == 1 for each in outcome.pipelines)
    assert len(outcome.busy_shares) == 8


def test_departures_cost_time_but_no_tokens(ring: Scenario) -> None:
    # Two PCs together hold the model, and so does one of them alone.
    steady = replace(ring, workload=replace(ring.workload, duration=25.0, output_tokens=40))
    churning = FleetScenario(steady, 3, peers=7, departures_per_hour=60.0, away_s=20.0)
    outcome, calm = (
        simulate_fleet(churning),
        simulate_fleet(replace(churning, departures_per_hour=0.0)),
    )
    assert_all_done(outcome)
    assert_all_done(calm)
    assert outcome.num_departures > 0
    assert outcome.num_resubmitted > 0 == calm.num_resubmitted
    assert sum(each.formed - each.lost for each in outcome.pipelines) >= 3
    assert outcome.report.latency_s.p99 is not None
    assert calm.report.latency_s.p99 is not None
    assert outcome.report.latency_s.p99 > calm.report.latency_s.p99


def test_different_rings_share_the_load(ring: Scenario) -> None:
    alike = simulate_fleet(FleetScenario(ring, 2))
    again = simulate_fleet(FleetScenario(ring, 2, rings=(ring, ring)))
    assert again.report == alike.report
    links = tuple(LinkProfile(mbps, 40) for mbps in (50, 100))
    slow = replace(ring, workload=replace(ring.workload, rate=0.2, duration=60.0))
    far = replace(slow, stages=2, links=links, devices=("rtx4090", "rtx3090"))
    mixed = simulate_fleet(
        FleetScenario(slow, 2, rings=(slow, far), departures_per_hour=60.0, away_s=10.0)
    )
    assert_all_done(mixed)
    assert mixed.num_departures > 0
    assert mean_tpot(mixed) > mean_tpot(simulate_fleet(FleetScenario(slow, 2)))
    assert len(mixed.busy_shares) == 4
    with pytest.raises(UsageError, match="counts the rings"):
        FleetScenario(ring, 3, rings=(ring, far))


def test_requests_wait_without_a_pipeline(ring: Scenario) -> None:
    # Two of the three PCs can't hold it.
    large = replace(ring, device="rtx3060", model="llama-2-13b", stages=3)
    slow = replace(large, workload=replace(ring.workload, rate=0.5, duration=40.0))
    outcome = simulate_fleet(FleetScenario(slow, 1, departures_per_hour=30.0, away_s=10.0))
    assert_all_done(outcome)
    assert outcome.report.ttft_s.p99 is not None
    assert outcome.report.ttft_s.p99 > 5.0


def test_simulations_are_deterministic(ring: Scenario) -> None:
    fleet = FleetScenario(
        ring, 2, peers=3, peers_per_uplink=2, departures_per_hour=60.0, away_s=10.0
    )
    once, again = (json.dumps(simulate_fleet(fleet).as_json()) for _ in range(2))
    assert once == again


def test_shared_pcs_or_uplinks_are_slower(ring: Scenario) -> None:
    narrow = replace(ring, link=LinkProfile(20, 10), compression="none")
    alike = FleetScenario(narrow, 4)
    own, one_home, one_pc = (
        simulate_fleet(fleet)
        for fleet in (alike, replace(alike, peers_per_uplink=8), replace(alike, peers=4))
    )
    for outcome in (own, one_home, one_pc):
        assert_all_done(outcome)
    assert own.report.ttft_s.mean is not None
    assert one_home.report.ttft_s.mean is not None
    assert one_home.report.ttft_s.mean > 1.5 * own.report.ttft_s.mean
    assert fmean(one_pc.busy_shares) > fmean(own.busy_shares)


@pytest.fixture
def sharing(ring: Scenario) -> Scenario:
    """A workload with ten shared prefixes of 1024 tokens, which are requested again and again."""
    rows = tuple(
        TraceRow(float(index), 1100, 8, (2 * begin, 2 * begin + 1, 100 + index))
        for index in range(60)
        for begin in [index * 7 % 10]
    )
    workload = replace(ring.workload, rate=3.0, duration=20.0, trace_rows=rows, warmup=0.0)
    return replace(ring, workload=workload, stages=1)


def test_prompts_go_where_their_prefix_is_cached(sharing: Scenario) -> None:
    found = {}
    for router in ROUTERS:
        found[router] = simulate_fleet(FleetScenario(sharing, 3, router=router))
        assert_all_done(found[router])
    assert found["e2"].cached_share > 1.5 * found["round-robin"].cached_share > 0
    assert mean_ttft(found["e2"]) < mean_ttft(found["round-robin"])


def test_lost_caches_cost_time_but_no_tokens(sharing: Scenario) -> None:
    load = sharing.workload
    rows = tuple(replace(row, output_tokens=60) for row in load.trace_rows)
    longer = replace(sharing, workload=replace(load, duration=40.0, trace_rows=rows))
    outcome = simulate_fleet(
        FleetScenario(longer, 3, router="e2", departures_per_hour=60.0, away_s=10.0)
    )
    assert_all_done(outcome)
    assert outcome.num_resubmitted > 0


class Deceived(E2Router):
    """Receives cache reports of another pipeline, of spans never cached, and late ones."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(1)
        self.late: list[CacheReport] = []

    def on_cache_report(self, name: str, report: CacheReport, now: float) -> None:
        self.late.append(report)
        if self.rng.random() < 0.1:
            report = self.rng.choice(self.late)
            wrong = (*report.evicted_spans, *(self.rng.getrandbits(64) for _ in range(9)))
            super().on_cache_report(
                self.rng.choice("0123"), replace(report, added_spans=wrong), now
            )


def test_wrong_cache_reports_cost_only_time(sharing: Scenario) -> None:
    assert_all_done(simulate_fleet(FleetScenario(sharing, 3), Deceived()))


def test_prompts_beyond_the_default_length(ring: Scenario) -> None:
    size, parts = 34_000, tuple(range(67))
    rows = tuple(TraceRow(float(at), size, 4, parts) for at in range(3))
    load = replace(
        ring.workload, rate=0.5, duration=6.0, warmup=0.0, trace_rows=rows, max_prompt=size
    )
    large = replace(ring, workload=load, stages=1, device="rtx4090", shape=SMALL_KV)
    outcome = simulate_fleet(FleetScenario(large, 2, router="e2"))
    assert_all_done(outcome)
    assert outcome.cached_share > 0.3


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"pipelines": 0}, "--pipelines must be from 1"),
        ({"peers": 1}, "--peers must be from 2"),
        ({"peers_per_uplink": 0}, "--peers-per-uplink"),
        ({"departures_per_hour": -1.0}, "--churn"),
        ({"away_s": 0.0}, "--away"),
        ({"router": "best"}, "--router must be one of round-robin, least-loaded, e2, not 'best'"),
    ],
)
def test_invalid_fleets_are_rejected(
    ring: Scenario, wrong: dict[str, float | str], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        FleetScenario(ring, **{"pipelines": 2, **wrong})  # type: ignore[arg-type]
