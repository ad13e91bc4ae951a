"""Forecasts of rings."""

import pytest

from molink.errors import UsageError
from molink.sim.forecast import plan_ring, ring_times
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.workload import Workload
from molink.swarm.controller.estimates import predict_ttft

LOAD = Workload(rate=1.0, duration=1.0)


def scenario(stages: int = 3, latency_ms: float = 30.0) -> Scenario:
    return Scenario(LOAD, stages=stages, link=LinkProfile(100.0, latency_ms), policy="fifo")


def test_forecast_of_three_stages() -> None:
    planned = plan_ring(scenario(), streams=16, prompt_tokens=256, output_tokens=8)
    assert planned.layers == ((0, 11), (11, 22), (22, 32))
    assert [each.count for each in planned.curve] == [3, 4, 5, 6]
    assert planned.micro_batches in (3, 4, 5, 6)
    assert planned.token_s >= planned.floor_s > 3 * 0.03
    # A single request doesn't wait.
    assert planned.tpot_s == pytest.approx(planned.floor_s, rel=0.05)
    assert planned.ttft_s > planned.tpot_s


def test_lower_latency_is_faster() -> None:
    slow, fast = (plan_ring(scenario(latency_ms=latency), 4, 64, 4) for latency in (30.0, 1.0))
    assert fast.floor_s < slow.floor_s
    assert fast.ttft_s < slow.ttft_s


def test_predicted_ttft_is_near_the_simulated() -> None:
    """The links are so fast that packing and cut-through hardly matter."""
    described = Scenario(LOAD, link=LinkProfile(1000.0, 1.0))
    simulated = plan_ring(described, streams=1, prompt_tokens=512, output_tokens=2).ttft_s
    assert predict_ttft(ring_times(described), 512) == pytest.approx(simulated, rel=0.2)


def test_a_single_stage_has_no_links() -> None:
    planned = plan_ring(scenario(stages=1), streams=2, prompt_tokens=64, output_tokens=4)
    assert planned.layers == ((0, 32),)
    assert planned.tpot_s == pytest.approx(planned.floor_s, rel=0.05)


def test_impossible_forecasts_are_rejected() -> None:
    with pytest.raises(UsageError, match="--streams"):
        plan_ring(scenario(), streams=0, prompt_tokens=64, output_tokens=4)
    with pytest.raises(UsageError, match="can't be served"):
        plan_ring(scenario(), streams=1, prompt_tokens=1_000_000, output_tokens=4)


def test_the_floor_matches_a_manual_round_trip() -> None:
    """Qwen-7B in 16 bits on three RTX 4090, 100 Mbps at 95 % efficiency, 30 ms.

    A layer has 4096 * 128 * 128 + 3 * 4096 * 11,008 = 202,375,168 weights. Reading 32 layers and
    the logits (151,936 * 4096), 14.19667 GB, at 0.92 of 1008 GB/s takes 15.30869 ms. Three passes
    add 0.3 ms each, the KV of the 128 tokens of a measurement (524,288 bytes each) 0.07236 ms. A
    row of 8192 bytes takes 0.68985 ms at 11.875 MB/s, on two links; the 64 bytes of a token take
    0.00539 ms on the third. Three latencies are 90 ms.
    """
    planned = plan_ring(scenario(), streams=1, prompt_tokens=64, output_tokens=2)
    milliseconds = 15.30869 + 3 * 0.3 + 0.07236 + 2 * 0.68985 + 0.00539 + 90
    assert planned.floor_s == pytest.approx(milliseconds / 1000, rel=1e-5)
