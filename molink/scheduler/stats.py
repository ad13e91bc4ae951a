"""What a head counts, and what others are told of it."""

from itertools import islice

from molink.scheduler.batcher import Batcher
from molink.scheduler.cache import BlockCache
from molink.scheduler.ledger import Ledger
from molink.scheduler.roster import Roster
from molink.scheduler.shown import shown
from molink.scheduler.speculation.speculation import Speculation
from molink.scheduler.swapping import Swapping
from molink.wire.messages.load import MAX_QUEUES, MAX_REQUESTS, HeadLoad

#: What the head itself counts.
COUNTS = (
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


class HeadStats:
    """The figures of one head: :attr:`counts`, which it keeps itself, and those of its parts."""

    def __init__(
        self,
        roster: Roster,
        cache: BlockCache,
        ledger: Ledger,
        batcher: Batcher,
        speculation: Speculation,
        swapping: Swapping,
    ) -> None:
        self._roster, self._cache, self._ledger = roster, cache, ledger
        self._batcher, self._speculation, self._swapping = batcher, speculation, swapping
        #: By the names in :data:`COUNTS`.
        self.counts: dict[str, float] = dict.fromkeys(COUNTS, 0)
        #: When others were told last: seconds until the first job came back from host memory.
        self._first_turn_s = 0.0

    def counters(self) -> dict[str, float]:
        """What has been counted in this epoch, by name."""
        batcher, cache, swapping = self._batcher, self._cache, self._swapping
        counters = {f"head_{name}_total": float(count) for name, count in self.counts.items()}
        counters["head_prompt_tokens_total"] = float(batcher.prompt_tokens)
        counters["head_prefill_rows_total"] = float(batcher.prefill_rows)
        counters["head_preemptions_total"] = float(batcher.preemptions)
        counters["head_swaps_out_total"] = float(swapping.outs)
        counters["head_swaps_in_total"] = float(swapping.ins)
        counters["head_swap_fallbacks_total"] = float(swapping.fallbacks)
        counters["head_draft_tokens_total"] = float(self._speculation.drafted)
        counters["head_draft_tokens_accepted_total"] = float(self._speculation.accepted)
        asking = self._speculation.asking
        counters["head_guessed_tokens_total"] = float(asking.guessed)
        counters["head_guess_seconds_total"] = asking.seconds
        counters["head_prefix_hit_tokens_total"] = float(cache.hit_tokens)
        counters["head_prefix_lookup_tokens_total"] = float(cache.lookup_tokens)
        counters["head_prefix_evictions_total"] = float(cache.evictions)
        return counters

    def gauges(self) -> dict[str, float]:
        """How it is now, by name.

        ``head_cancel_iterations_*`` is how many iterations of the ring began between a cancel of an
        admitted request and the moment when its blocks could be used again, the first one included.
        Blocks are ``used``, ``free``, or ``cached`` only and so as good as free.
        """
        cache, ledger, roster, host = self._cache, self._ledger, self._roster, self._swapping.host
        blocks = cache.blocks
        gauges = {
            "head_blocks": blocks.total,
            "head_blocks_used": blocks.total - cache.available,
            "head_blocks_releasing": blocks.releasing,
            "head_blocks_free": blocks.free,
            "head_blocks_cached": blocks.settled,
            "head_prefix_hit_rate": round(cache.hit_rate, 4),
            "head_host_blocks": host.total,
            "head_host_blocks_used": host.held,
            "head_swapped": roster.swapped_count,
            "head_micro_batches": self._batcher.micro_batches.count,
            "head_running": roster.admitted,
            "head_waiting": roster.waiting,
            "head_clients": roster.shares.clients,
            "head_decode_in_flight": ledger.volumes(prefill=False) + ledger.ahead,
            "head_prefill_in_flight": ledger.volumes(prefill=True),
            "head_prefill_rows_in_flight": ledger.prefill_rows,
            "head_cancel_iterations_last": ledger.cancel_iterations_last,
            "head_cancel_iterations_max": ledger.cancel_iterations_max,
            "head_swapped_turn_seconds": self._first_turn_s,
            **{f"head_queue_{level}": jobs for level, jobs in enumerate(roster.queues, 1)},
        }
        return {name: float(value) for name, value in gauges.items()}

    def load(self, pipeline: str, now: float) -> HeadLoad:
        """What others are told of it, under the name of its pipeline."""
        blocks, turns = self._cache.blocks, self._roster.swapped(now)
        self._first_turn_s = min(turns.values(), default=0.0)
        queues = list(self._roster.queues[:MAX_QUEUES])
        while queues and not queues[-1]:
            queues.pop()
        return HeadLoad(
            pipeline,
            self._roster.admitted,
            self._roster.waiting,
            blocks.total,
            blocks.total - self._cache.available,
            self._batcher.micro_batches.count,
            tuple(shown(job, turns, now) for job in islice(self._roster, MAX_REQUESTS)),
            len(turns),
            self._swapping.host.total,
            self._swapping.host.held,
            min(100, round(100 * self._cache.hit_rate)),
            tuple(queues),
            self._swapping.fallbacks,
        )
