"""Counters, gauges and load reports of a scheduler."""

from collections.abc import Mapping
from itertools import islice
from typing import Literal

from molink.scheduler.batcher import Batcher
from molink.scheduler.request_state import RequestState
from molink.wire.messages.load import (
    MAX_PEER_ID,
    MAX_QUEUES,
    MAX_REQUESTS,
    RequestLoad,
    SchedulerLoad,
)

#: Maximum reported time until a swapped request resumes.
MAX_SCHEDULED_MS = 3_600_000


def report_request(
    state: RequestState, next_scheduled: Mapping[RequestState, float], now: float
) -> RequestLoad:
    """Create a request's entry in the load report. It counts as prefill until its first token."""
    assert state.phase != "gone", "ended requests are in no queue"
    phase: Literal["waiting", "swapped", "prefill", "decode"]
    phase = "prefill" if state.phase == "decode" and not state.num_generated else state.phase
    if state in next_scheduled:
        phase = "swapped"
    taken, prompt = now - state.first_token_at, state.num_prompt_tokens
    return RequestLoad(
        state.peer[:MAX_PEER_ID],
        phase,
        prompt,
        0 if state.phase == "waiting" else state.num_computed,
        len(state.tokens) - prompt,
        round(1000 * (state.num_generated - 1) / taken)
        if state.num_generated > 1 and taken > 0
        else 0,
        max(0, int(now - state.arrived_at)),
        min(MAX_SCHEDULED_MS, round(1000 * next_scheduled.get(state, 0.0))),
    )


#: Counters that the scheduler itself increments.
COUNTER_NAMES = (
    *("requests", "admitted", "queue_seconds", "tokens", "finished", "cancelled", "displaced"),
    *("refused", "late", "expired", "failed", "volumes", "iterations", "strays"),
)


class SchedulerStats:
    """Figures of a scheduler, collected from its batcher and the batcher's parts."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._queues, self._cache, self._swap = batcher.queues, batcher.cache, batcher.swap
        #: Counters by the names in :data:`COUNTER_NAMES`.
        self.counts: dict[str, float] = dict.fromkeys(COUNTER_NAMES, 0)
        #: Seconds until the first swapped-out request is scheduled, at the last report.
        self._first_swapped_s = 0.0

    def read_counters(self) -> dict[str, float]:
        """Counters of this epoch, by name."""
        batcher, cache, swap = self._batcher, self._cache, self._swap
        speculation = batcher.speculation
        counters = self.counts | {
            "prompt_tokens": batcher.num_prompt_tokens,
            "prefill_rows": batcher.num_prefill_rows,
            "preemptions": batcher.num_preemptions,
            "swaps_out": swap.num_swap_outs,
            "swaps_in": swap.num_swap_ins,
            "swap_fallbacks": swap.num_fallbacks,
            "draft_tokens": speculation.num_drafted,
            "draft_tokens_accepted": speculation.num_accepted,
            "draft_model_tokens": speculation.draft_queue.num_drafted,
            "draft_model_seconds": speculation.draft_queue.draft_seconds,
            "prefix_hit_tokens": cache.num_hit_tokens,
            "prefix_lookup_tokens": cache.num_lookup_tokens,
            "prefix_evictions": cache.num_evictions,
        }
        return {f"scheduler_{name}_total": float(count) for name, count in counters.items()}

    def read_gauges(self) -> dict[str, float]:
        """Current values, by name.

        ``*_cancel_iterations_*`` counts ring iterations from the cancellation of a running request
        until its blocks are usable again, including the first. Blocks are ``used``, ``free``, or
        ``cached`` and evictable.
        """
        cache, queues, host = self._cache, self._queues, self._swap.host_blocks
        blocks, in_flight = cache.allocator, self._batcher.in_flight
        num_decodes = in_flight.count_volumes(prefill=False) + in_flight.num_lookahead
        gauges = {
            "blocks": blocks.total,
            "blocks_used": blocks.total - cache.num_available,
            "blocks_releasing": blocks.num_releasing,
            "blocks_free": blocks.num_free,
            "blocks_cached": blocks.num_settled,
            "prefix_hit_rate": round(cache.hit_rate, 4),
            "host_blocks": host.total,
            "host_blocks_used": host.num_held,
            "swapped": queues.num_swapped,
            "micro_batches": self._batcher.micro_batches.count,
            "running": queues.num_running,
            "waiting": queues.num_waiting,
            "clients": queues.fair_shares.num_clients,
            "decode_in_flight": num_decodes,
            "prefill_in_flight": in_flight.count_volumes(prefill=True),
            "prefill_rows_in_flight": in_flight.num_prefill_rows,
            "cancel_iterations_last": in_flight.cancel_iterations_last,
            "cancel_iterations_max": in_flight.cancel_iterations_max,
            "swapped_resume_seconds": self._first_swapped_s,
        }
        for level, length in enumerate(queues.policy.queue_lengths(), 1):
            gauges[f"queue_{level}"] = length
        return {f"scheduler_{name}": float(value) for name, value in gauges.items()}

    def report_load(self, pipeline: str, now: float) -> SchedulerLoad:
        """Create the load report for other peers."""
        blocks, next_scheduled = self._cache.allocator, self._queues.estimate_swapped(now)
        self._first_swapped_s = min(next_scheduled.values(), default=0.0)
        queues = list(self._queues.policy.queue_lengths()[:MAX_QUEUES])
        while queues and not queues[-1]:
            queues.pop()
        return SchedulerLoad(
            pipeline,
            self._queues.num_running,
            self._queues.num_waiting,
            blocks.total,
            blocks.total - self._cache.num_available,
            self._batcher.micro_batches.count,
            tuple(
                report_request(state, next_scheduled, now)
                for state in islice(self._queues, MAX_REQUESTS)
            ),
            len(next_scheduled),
            self._swap.host_blocks.total,
            self._swap.host_blocks.num_held,
            min(100, round(100 * self._cache.hit_rate)),
            tuple(queues),
            self._swap.num_fallbacks,
        )
