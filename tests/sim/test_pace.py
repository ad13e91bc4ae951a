"""What the head makes of stages that become slower for a while."""

from collections.abc import Sequence

from molink.bench.planned_requests import PlannedRequest
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import SimPipeline
from molink.sim.workload import Workload


def counts_at(ring: SimPipeline, times: Sequence[float]) -> list[int]:
    """``K`` at each of these times."""
    found: list[int] = []
    for at in times:
        ring.event_queue.schedule_at(at, lambda: found.append(ring.max_micro_batches))
    ring.run(max(times) + 0.1)
    assert not ring.failure
    return found


def scenario(latency_ms: float, stages: int) -> Scenario:
    link = LinkProfile(1000.0, latency_ms)
    return Scenario(Workload(rate=1.0, duration=1.0), stages, link=link)


def test_micro_batches_follow_a_stage_that_is_slow_for_a_while() -> None:
    streams = [PlannedRequest(index, 0.0, 16, 4_000) for index in range(24)]
    ring = SimPipeline(scenario(10.0, 3), streams)
    ring.slow_stage(1, 5.0, at=8.0)
    ring.slow_stage(1, 1.0, at=16.0)
    quick, at_once, slow, again = counts_at(ring, (7.9, 9.0, 15.9, 24.0))
    assert quick == at_once, "a moment is no news"
    assert (quick, slow, again) == (6, 3, 6)
