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
from molink.sim.pipeline import Pipeline
from molink.sim.scenario import Scenario
from molink.sim.timeline import Timeline

#: Virtual seconds for the last requests to end after the last has arrived, at least; then as long
#: again as the run itself.
GRACE = 3600.0
#: Windows can wait for no more processes at once.
_MAX_PROCESSES = 60


@dataclass(frozen=True, slots=True)
class Outcome:
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


def simulate(scenario: Scenario, timeline: Timeline | None = None) -> Outcome:
    """Run ``scenario`` to its end; the same scenario always has the same outcome.

    All requests that arrive in time are served to their last token, however late. ``timeline``
    is told who computes and who sends.

    Raises:
        UsageError: the scenario makes no sense: no such policy, a model too large for the devices.
        InvariantError: a stage broke, or something was lost.
    """
    workload = scenario.workload
    pipeline = Pipeline(scenario, workload.plan())
    if timeline is not None:
        pipeline.watch(timeline)
    end = workload.warmup + workload.duration
    with no_collector():
        pipeline.run(2 * end + GRACE)
    if pipeline.trouble:
        raise InvariantError(f"the ring can't go on: {pipeline.trouble}")
    samples = pipeline.clients.samples(workload.warmup)
    last = max((sample.finished for sample in samples), default=end)
    first = min((sample.sent for sample in samples), default=workload.warmup)
    live = pipeline.clients.live_s
    return Outcome(
        scenario,
        summarize(samples, last - first, policy=scenario.policy),
        pipeline.floor_s,
        pipeline.max_micro_batches,
        tuple(1 - busy / live if live else 0.0 for busy in pipeline.computed_s),
        tuple(busy / live if live else 0.0 for busy in pipeline.transferred_s),
        pipeline.kv_peak,
        pipeline.preemptions,
        *pipeline.drafts,
        tuple(sample.tpot for sample in samples if sample.tpot is not None),
    )


@contextmanager
def no_collector() -> Iterator[None]:
    """Millions of short-lived tuples and hardly a cycle: the garbage collector stands still."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate_all(scenarios: Sequence[Scenario], processes: int | None = None) -> list[Outcome]:
    """Run them on ``processes`` processes (``None``: as many as CPUs); outcomes in their order."""
    processes = min(processes or os.cpu_count() or 1, len(scenarios), _MAX_PROCESSES)
    if processes < 2:
        return [simulate(scenario) for scenario in scenarios]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(simulate, scenarios))
