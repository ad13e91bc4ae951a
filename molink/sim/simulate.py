"""Runs a scenario: the product's rings, heads and links, in virtual time."""

import gc
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from molink.bench.planned_requests import PlannedRequest
from molink.bench.report import Report, summarize
from molink.errors import InvariantError
from molink.sim.clients import Clients
from molink.sim.event_queue import EventQueue
from molink.sim.pc import SimPc, Uplink
from molink.sim.ring import SimRing
from molink.sim.ring_template import RingTemplate
from molink.sim.scenario import Scenario
from molink.sim.timeline import Timeline

#: A ring that serves requests and has no token for so many seconds has lost something.
_STUCK_S = 600.0
#: How often the KV blocks in use are counted, in virtual seconds.
_COUNT_INTERVAL_S = 1.0


class SimPipeline:
    """Builds the ring of ``scenario`` and serves ``plan``."""

    def __init__(self, scenario: Scenario, plan: Sequence[PlannedRequest]) -> None:
        self.event_queue = EventQueue()
        #: Why a stage can't go on; empty while all can.
        self.failure = ""
        #: The largest share of the KV blocks that was in use.
        self.kv_peak = 0.0
        self._template = RingTemplate.from_scenario(scenario)
        links = [scenario.link_from(stage) for stage in range(scenario.stages)]
        self._pcs = [SimPc(Uplink(link.rate, link.queue)) for link in links]
        self.clients = Clients(self.event_queue, plan, lambda _: self._ring, scenario.texts)
        self._ring = SimRing(
            self.event_queue, self._template, self._pcs, lambda _: self.clients, self._on_broken
        )

    def run(self, until: float) -> None:
        """Serve the plan to its end, or until that time."""
        self._ring.start()
        self.clients.start()
        self._check_progress()
        self._sample_kv_usage()
        self.event_queue.run(until)

    def record_timeline(self, timeline: Timeline) -> None:
        """Tell ``timeline`` who computes and who sends."""
        self._ring.record_timeline(timeline)

    def slow_stage(self, stage: int, factor: float, at: float) -> None:
        """From ``at`` on the steps of a stage take ``factor`` times as long as its device's do."""
        self.event_queue.schedule_at(at, setattr, self._pcs[stage], "slowdown", factor)

    def _check_progress(self) -> None:
        """Whether the ring gets on."""
        if self.clients.silence_s > _STUCK_S:
            self._stop_failed(f"no token for {_STUCK_S:g} s")
        self.event_queue.schedule_at(self.event_queue.now + _STUCK_S, self._check_progress)

    def _sample_kv_usage(self) -> None:
        _, gauges = self._ring.stage_stats()
        self.kv_peak = max(self.kv_peak, gauges["head_blocks_used"] / gauges["head_blocks"])
        self.event_queue.schedule_at(
            self.event_queue.now + _COUNT_INTERVAL_S, self._sample_kv_usage
        )

    def _stop_failed(self, failure: str) -> None:
        self.failure = self.failure or failure
        self.event_queue.stop()

    def _on_broken(self, stage: int, reason: str) -> None:
        self._stop_failed(f"stage {stage}: {reason}")

    # --- figures ---------------------------------------------------------------------------------

    @property
    def floor_s(self) -> float:
        """Seconds of a turn of the ring that waits for nothing, with a single row."""
        return self._template.floor_s

    @property
    def max_micro_batches(self) -> int:
        """``K`` at the end."""
        return int(self._ring.stage_stats()[1]["head_micro_batches"])

    @property
    def num_preemptions(self) -> int:
        """How often a request gave its KV blocks up for another."""
        return int(self._ring.stage_stats()[0]["head_preemptions_total"])

    @property
    def swap_counts(self) -> tuple[int, int, int]:
        """Requests that went to host memory, came back, and that there was no room for."""
        counters, _ = self._ring.stage_stats()
        names = ("swaps_out", "swaps_in", "swap_fallbacks")
        outs, ins, fallbacks = (int(counters[f"head_{name}_total"]) for name in names)
        return outs, ins, fallbacks

    @property
    def num_prefill_rows(self) -> int:
        """Rows of prompts that were computed, and of what was lost when requests gave way."""
        return int(self._ring.stage_stats()[0]["head_prefill_rows_total"])

    @property
    def waited_s(self) -> list[float]:
        """Seconds in which the steps of each stage waited for copies from or to host memory."""
        return self._ring.waited_s

    @property
    def draft_counts(self) -> tuple[int, int]:
        """Tokens that were drafted, and those of them that were right."""
        counters, _ = self._ring.stage_stats()
        accepted = counters["head_draft_tokens_accepted_total"]
        return int(counters["head_draft_tokens_total"]), int(accepted)

    @property
    def computed_s(self) -> list[float]:
        """Seconds in which each stage computed."""
        return [pc.busy_s for pc in self._pcs]

    @property
    def transferred_s(self) -> list[float]:
        """Seconds in which each link transferred."""
        return self._ring.transferred_s


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
