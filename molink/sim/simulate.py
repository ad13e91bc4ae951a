"""Runs a scenario in virtual time."""

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from molink.bench.report import Report, summarize
from molink.bench.workload import PlannedRequest
from molink.errors import InvariantError
from molink.facts.layer_range import stage_number
from molink.sim.clients import Clients
from molink.sim.event_queue import EventQueue
from molink.sim.pc import SimPc, Uplink
from molink.sim.ring import SimRing
from molink.sim.ring_template import RingTemplate
from molink.sim.scenario import Scenario
from molink.sim.timeline import Timeline

#: Virtual seconds without a token after which a busy ring counts as stuck.
_STUCK_S = 600.0
#: Virtual seconds between samples of the KV blocks in use.
_COUNT_INTERVAL_S = 1.0


class SimPipeline:
    """The ring of ``scenario`` with clients that send ``plan``."""

    def __init__(self, scenario: Scenario, plan: Sequence[PlannedRequest]) -> None:
        self.event_queue = EventQueue()
        #: Why the ring failed; empty while it works.
        self.failure = ""
        #: Maximum share of KV blocks in use.
        self.kv_peak = 0.0
        self.template = RingTemplate.from_scenario(scenario)
        links = [scenario.link_from(stage) for stage in range(scenario.stages)]
        self._pcs = [SimPc(Uplink(link.rate, link.queue)) for link in links]
        self.clients = Clients(self.event_queue, plan, lambda _: self.ring, scenario.texts)
        self.ring = SimRing(
            self.event_queue, self.template, self._pcs, lambda _: self.clients, self._on_broken
        )

    def run(self, until: float) -> None:
        """Serve the plan to its end, or until ``until`` virtual seconds."""
        self.ring.start()
        self.clients.start()
        self._check_progress()
        self._sample_kv_usage()
        self.event_queue.run(until)

    def slow_stage(self, stage: int, factor: float, at: float) -> None:
        """Multiply a stage's step times by ``factor`` from ``at`` seconds on."""
        self.event_queue.schedule_at(at, setattr, self._pcs[stage], "slowdown", factor)

    def _check_progress(self) -> None:
        if self.clients.silence_s > _STUCK_S:
            self._stop_failed(f"no token for {_STUCK_S:g} s")
        self.event_queue.schedule_at(self.event_queue.now + _STUCK_S, self._check_progress)

    def _sample_kv_usage(self) -> None:
        gauges = self.gauges
        share = gauges["scheduler_blocks_used"] / gauges["scheduler_blocks"]
        self.kv_peak = max(self.kv_peak, share)
        due = self.event_queue.now + _COUNT_INTERVAL_S
        self.event_queue.schedule_at(due, self._sample_kv_usage)

    def _stop_failed(self, failure: str) -> None:
        self.failure = self.failure or failure
        self.event_queue.stop()

    def _on_broken(self, stage: int, reason: str) -> None:
        self._stop_failed(f"stage {stage_number(stage)}: {reason}")

    @property
    def counters(self) -> dict[str, float]:
        """Counters of the first stage and the scheduler."""
        return self.ring.stage_stats()[0]

    @property
    def gauges(self) -> dict[str, float]:
        """Gauges of the first stage and the scheduler."""
        return self.ring.stage_stats()[1]

    @property
    def computed_s(self) -> list[float]:
        """Seconds in which each stage computed."""
        return [pc.busy_s for pc in self._pcs]


#: Minimum virtual seconds for the last requests to end, in addition to the run's length.
GRACE_S = 3600.0
#: Maximum number of processes; Windows can't wait for more at once.
_MAX_PROCESSES = 60


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """Results of a simulation.

    ``floor_s`` is the minimum seconds per token: one-row steps of all stages, latencies, and
    uncompressed one-row transfers at nominal bandwidth. ``bubble_share`` is each stage's idle share
    of the time with live requests, ``link_utilisation`` each link's busy share (the last leads back
    to the first stage). ``micro_batches`` is ``K`` at the end. ``kv_peak`` is the maximum share of
    KV blocks in use; with ``preemptions``, or a peak near 1, the ring was saturated. ``accepted``
    of the ``drafted`` tokens were right. ``tpots`` are the seconds per output token by request.
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
        """Return the report and the simulation's figures as plain values."""
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
    """Simulate ``scenario`` to its end; deterministic.

    All requests that arrive in time are served to their last token. ``timeline`` records steps and
    transfers.

    Raises:
        UsageError: the scenario is impossible: an unknown policy, or a model too large.
        InvariantError: a stage failed, or something was lost.
    """
    workload = scenario.workload
    pipeline = SimPipeline(scenario, workload.plan_requests())
    if timeline is not None:
        pipeline.ring.record_timeline(timeline)
    end = workload.warmup + workload.duration
    with disable_gc():
        pipeline.run(2 * end + GRACE_S)
    if pipeline.failure:
        raise InvariantError(f"the ring stopped: {pipeline.failure}")
    samples = pipeline.clients.collect_samples(workload.warmup)
    last = max((sample.finished_at for sample in samples), default=end)
    first = min((sample.sent_at for sample in samples), default=workload.warmup)
    live, counters = pipeline.clients.live_s, pipeline.counters
    return SimulationOutcome(
        scenario,
        summarize(samples, last - first, policy=scenario.policy),
        pipeline.template.floor_s,
        int(pipeline.gauges["scheduler_micro_batches"]),
        tuple(1 - busy / live if live else 0.0 for busy in pipeline.computed_s),
        tuple(busy / live if live else 0.0 for busy in pipeline.ring.transferred_s),
        pipeline.kv_peak,
        int(counters["scheduler_preemptions_total"]),
        int(counters["scheduler_draft_tokens_total"]),
        int(counters["scheduler_draft_tokens_accepted_total"]),
        tuple(sample.tpot for sample in samples if sample.tpot is not None),
    )


@contextmanager
def disable_gc() -> Iterator[None]:
    """Disable the garbage collector: a run has millions of short-lived tuples and few cycles."""
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
    """Run scenarios on ``processes`` processes (default: one per CPU); return results in order."""
    processes = min(processes or os.cpu_count() or 1, len(scenarios), _MAX_PROCESSES)
    if processes < 2:
        return [simulate_scenario(scenario) for scenario in scenarios]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(simulate_scenario, scenarios))
