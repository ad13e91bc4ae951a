"""What a ring promises before anything of it is started."""

import pytest

from molink.errors import UsageError
from molink.sim.forecast import plan_ring
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.workload import Workload

LOAD = Workload(rate=1.0, duration=1.0)


def scenario(stages: int = 3, latency_ms: float = 30.0) -> Scenario:
    return Scenario(LOAD, stages=stages, link=LinkProfile(100.0, latency_ms), policy="fifo")


def test_a_ring_of_three() -> None:
    planned = plan_ring(scenario(), streams=16, prompt_tokens=256, output_tokens=8)
    assert planned.layers == ((0, 11), (11, 22), (22, 32))
    assert [each.count for each in planned.curve] == [3, 4, 5, 6]
    assert planned.micro_batches in (3, 4, 5, 6)
    assert planned.token_s >= planned.floor_s > 3 * 0.03
    # Alone, a request waits for nobody.
    assert planned.tpot_s == pytest.approx(planned.floor_s, rel=0.05)
    assert planned.ttft_s > planned.tpot_s


def test_less_latency_makes_it_faster() -> None:
    slow, fast = (plan_ring(scenario(latency_ms=latency), 4, 64, 4) for latency in (30.0, 1.0))
    assert fast.floor_s < slow.floor_s
    assert fast.ttft_s < slow.ttft_s


def test_a_single_stage_has_no_links() -> None:
    planned = plan_ring(scenario(stages=1), streams=2, prompt_tokens=64, output_tokens=4)
    assert planned.layers == ((0, 32),)
    assert planned.tpot_s == pytest.approx(planned.floor_s, rel=0.05)


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(UsageError, match="--streams"):
        plan_ring(scenario(), streams=0, prompt_tokens=64, output_tokens=4)
    with pytest.raises(UsageError, match="can't be served"):
        plan_ring(scenario(), streams=1, prompt_tokens=1_000_000, output_tokens=4)
