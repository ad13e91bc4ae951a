"""What a head counts, and what others are told of it."""

from collections.abc import Mapping
from itertools import islice
from typing import Literal

from molink.scheduler.batcher import Batcher
from molink.scheduler.in_flight import InFlightTracker
from molink.scheduler.kv_cache_manager import KVCacheManager
from molink.scheduler.request_queues import RequestQueues
from molink.scheduler.request_state import RequestState
from molink.scheduler.speculation.speculation import Speculation
from molink.scheduler.swap_manager import SwapManager
from molink.wire.messages.load import (
    MAX_PEER_ID,
    MAX_QUEUES,
    MAX_REQUESTS,
    RequestLoad,
    SchedulerLoad,
)

#: Longest time until a turn that people are told of.
MAX_SCHEDULED_MS = 3_600_000


def report_request(
    job: RequestState, turns: Mapping[RequestState, float], now: float
) -> RequestLoad:
    """Until its first token a request is in prefill for people, though all its rows are issued."""
    assert job.phase != "gone", "a job that is over is in no roster"
    phase: Literal["waiting", "swapped", "prefill", "decode"]
    phase = "prefill" if job.phase == "decode" and not job.num_generated else job.phase
    if job in turns:
        phase = "swapped"
    taken, prompt = now - job.first_token_at, job.num_prompt_tokens
    return RequestLoad(
        job.peer[:MAX_PEER_ID],
        phase,
        prompt,
        0 if job.phase == "waiting" else job.num_computed,
        len(job.tokens) - prompt,
        round(1000 * (job.num_generated - 1) / taken) if job.num_generated > 1 and taken > 0 else 0,
        max(0, int(now - job.arrived_at)),
        min(MAX_SCHEDULED_MS, round(1000 * turns.get(job, 0.0))),
    )


#: What the head itself counts.
COUNTER_NAMES = (
    "requests",
    "admitted",
    "queue_seconds",
    "tokens",
    "finished",
    "cancelled",
    "displaced",
    "refused",
    "late",
    "expired",
    "failed",
    "volumes",
    "iterations",
    "strays",
)


class SchedulerStats:
    """The figures of one head: :attr:`counts`, which it keeps itself, and those of its parts."""

    def __init__(
        self,
        queues: RequestQueues,
        cache: KVCacheManager,
        in_flight: InFlightTracker,
        batcher: Batcher,
        speculation: Speculation,
        swap: SwapManager,
    ) -> None:
        self._queues, self._cache, self._in_flight = queues, cache, in_flight
        self._batcher, self._speculation, self._swap = batcher, speculation, swap
        #: By the names in :data:`COUNTS`.
        self.counts: dict[str, float] = dict.fromkeys(COUNTER_NAMES, 0)
        #: When others were told last: seconds until the first job came back from host memory.
        self._first_swapped_s = 0.0

    def read_counters(self) -> dict[str, float]:
        """What has been counted in this epoch, by name."""
        batcher, cache, swap = self._batcher, self._cache, self._swap
        counters = {f"head_{name}_total": float(count) for name, count in self.counts.items()}
        counters["head_prompt_tokens_total"] = float(batcher.num_prompt_tokens)
        counters["head_prefill_rows_total"] = float(batcher.num_prefill_rows)
        counters["head_preemptions_total"] = float(batcher.num_preemptions)
        counters["head_swaps_out_total"] = float(swap.num_swap_outs)
        counters["head_swaps_in_total"] = float(swap.num_swap_ins)
        counters["head_swap_fallbacks_total"] = float(swap.num_fallbacks)
        counters["head_draft_tokens_total"] = float(self._speculation.num_drafted)
        counters["head_draft_tokens_accepted_total"] = float(self._speculation.num_accepted)
        asking = self._speculation.draft_queue
        counters["head_guessed_tokens_total"] = float(asking.num_drafted)
        counters["head_guess_seconds_total"] = asking.draft_seconds
        counters["head_prefix_hit_tokens_total"] = float(cache.num_hit_tokens)
        counters["head_prefix_lookup_tokens_total"] = float(cache.num_lookup_tokens)
        counters["head_prefix_evictions_total"] = float(cache.num_evictions)
        return counters

    def read_gauges(self) -> dict[str, float]:
        """How it is now, by name.

        ``head_cancel_iterations_*`` is how many iterations of the ring began between a cancel of an
        admitted request and the moment when its blocks could be used again, the first one included.
        Blocks are ``used``, ``free``, or ``cached`` only and so as good as free.
        """
        cache, in_flight, queues, host = (
            self._cache,
            self._in_flight,
            self._queues,
            self._swap.host_blocks,
        )
        blocks = cache.allocator
        gauges = {
            "head_blocks": blocks.total,
            "head_blocks_used": blocks.total - cache.num_available,
            "head_blocks_releasing": blocks.num_releasing,
            "head_blocks_free": blocks.num_free,
            "head_blocks_cached": blocks.num_settled,
            "head_prefix_hit_rate": round(cache.hit_rate, 4),
            "head_host_blocks": host.total,
            "head_host_blocks_used": host.num_held,
            "head_swapped": queues.num_swapped,
            "head_micro_batches": self._batcher.micro_batches.count,
            "head_running": queues.num_running,
            "head_waiting": queues.num_waiting,
            "head_clients": queues.fair_shares.num_clients,
            "head_decode_in_flight": in_flight.count_volumes(prefill=False)
            + in_flight.num_lookahead,
            "head_prefill_in_flight": in_flight.count_volumes(prefill=True),
            "head_prefill_rows_in_flight": in_flight.num_prefill_rows,
            "head_cancel_iterations_last": in_flight.cancel_iterations_last,
            "head_cancel_iterations_max": in_flight.cancel_iterations_max,
            "head_swapped_turn_seconds": self._first_swapped_s,
            **{
                f"head_queue_{level}": requests
                for level, requests in enumerate(queues.queue_lengths, 1)
            },
        }
        return {name: float(value) for name, value in gauges.items()}

    def report_load(self, pipeline: str, now: float) -> SchedulerLoad:
        """What others are told of it, under the name of its pipeline."""
        blocks, turns = self._cache.allocator, self._queues.estimate_swapped(now)
        self._first_swapped_s = min(turns.values(), default=0.0)
        queues = list(self._queues.queue_lengths[:MAX_QUEUES])
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
                report_request(state, turns, now) for state in islice(self._queues, MAX_REQUESTS)
            ),
            len(turns),
            self._swap.host_blocks.total,
            self._swap.host_blocks.num_held,
            min(100, round(100 * self._cache.hit_rate)),
            tuple(queues),
            self._swap.num_fallbacks,
        )
