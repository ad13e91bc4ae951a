"""Runs a scenario: the product's rings, heads and links, in virtual time."""

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from molink.bench.report import Report, summarize
from molink.errors import InvariantError
from molink.sim.pipeline import SimPipeline
from molink.sim.scenario import Scenario
from molink.sim.timeline import Timeline

#: Virtual seconds for the last requests to end after the last has arrived, at least; then as long
#: again as the run itself.
GRACE_S = 3600.0
#: Windows can wait for no more processes at once.
_MAX_PROCESSES = 60


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """What a simulation found.

    ``floor_s`` is the least time per token that the ring allows: all stages' steps of one row, all
    latencies and the transfers of one row, uncompressed, by the nominal bandwidth.
    ``bubble_share`` is the share of the time with live requests in which each stage computed
    nothing; ``link_utilisation`` that in which each link transferred (the last leads back to the
    head). ``micro_batches`` is ``K`` at the end. ``kv_peak`` is the largest share of the KV blocks
    that was in use, and ``preemptions`` how often one request had to give them up for another:
    where there are any, or the peak is near 1, the ring was saturated. Of ``drafted`` tokens
    ``accepted`` were right. ``tpots`` are the seconds per output token of each request that has
    any, in order.
    """

    scenario: Scenario
    report: Report
    floor_s: float
    micro_batches: int
    bubble_share: tuple[float, ...]
    link_utilisation: tuple[float, ...]
    kv_peak: float
    preemptions: int
    drafted: int = 0
    accepted: int = 0
    tpots: tuple[float, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Plain values to be dumped: those of the report, and the simulation's own."""
        scenario = self.scenario
        return self.report.as_json() | {
            "rate": scenario.workload.rate,
            "seed": scenario.workload.seed,
            "stages": scenario.stages,
            "device": scenario.device,
            "model": scenario.model,
            "bandwidth_mbps": scenario.link.bandwidth_mbps,
            "latency_ms": scenario.link.latency_ms,
            "congestion": scenario.link.congestion,
            "switches": scenario.switches,
            "floor_s": self.floor_s,
            "micro_batches": self.micro_batches,
            "bubble_share": list(self.bubble_share),
            "link_utilisation": list(self.link_utilisation),
            "kv_peak": self.kv_peak,
            "preemptions": self.preemptions,
        }


def simulate_scenario(scenario: Scenario, timeline: Timeline | None = None) -> SimulationOutcome:
    """Run ``scenario`` to its end; the same scenario always has the same outcome.

    All requests that arrive in time are served to their last token, however late. ``timeline``
    is told who computes and who sends.

    Raises:
        UsageError: the scenario makes no sense: no such policy, a model too large for the devices.
        InvariantError: a stage broke, or something was lost.
    """
    workload = scenario.workload
    pipeline = SimPipeline(scenario, workload.plan_requests())
    if timeline is not None:
        pipeline.record_timeline(timeline)
    end = workload.warmup + workload.duration
    with disable_gc():
        pipeline.run(2 * end + GRACE_S)
    if pipeline.failure:
        raise InvariantError(f"the ring can't go on: {pipeline.failure}")
    samples = pipeline.clients.collect_samples(workload.warmup)
    last = max((sample.finished_at for sample in samples), default=end)
    first = min((sample.sent_at for sample in samples), default=workload.warmup)
    live = pipeline.clients.live_s
    return SimulationOutcome(
        scenario,
        summarize(samples, last - first, policy=scenario.policy),
        pipeline.floor_s,
        pipeline.max_micro_batches,
        tuple(1 - busy / live if live else 0.0 for busy in pipeline.computed_s),
        tuple(busy / live if live else 0.0 for busy in pipeline.transferred_s),
        pipeline.kv_peak,
        pipeline.num_preemptions,
        *pipeline.draft_counts,
        tuple(sample.tpot for sample in samples if sample.tpot is not None),
    )


@contextmanager
def disable_gc() -> Iterator[None]:
    """Millions of short-lived tuples and hardly a cycle: the garbage collector stands still."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate_scenarios(
    scenarios: Sequence[Scenario], processes: int | None = None
) -> list[SimulationOutcome]:
    """Run them on ``processes`` processes (``None``: as many as CPUs); outcomes in their order."""
    processes = min(processes or os.cpu_count() or 1, len(scenarios), _MAX_PROCESSES)
    if processes < 2:
        return [simulate_scenario(scenario) for scenario in scenarios]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(simulate_scenario, scenarios))
