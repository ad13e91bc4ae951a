"""A simulated ring with its clients."""

from collections.abc import Sequence

from molink.bench.planned_requests import PlannedRequest
from molink.sim.clients import Clients
from molink.sim.event_queue import EventQueue
from molink.sim.pc import SimPc
from molink.sim.ring import SimRing
from molink.sim.ring_template import RingTemplate
from molink.sim.scenario import Scenario
from molink.sim.timeline import Timeline
from molink.sim.uplink import Uplink

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
