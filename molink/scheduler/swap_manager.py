"""Swapping of preempted KV to host memory: reactive, and proactive as in FastServe, §4.2."""

from collections import deque
from collections.abc import Iterator

from molink.errors import InvariantError
from molink.facts.ring_times import RingTimes
from molink.scheduler.blocks import HostBlockAllocator, HostCopy
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.kv_cache_manager import KVCacheManager
from molink.scheduler.request_queues import RequestQueues
from molink.scheduler.request_state import RequestState
from molink.wire.messages.data_plane import MAX_SWAP_BLOCKS

#: Number of round trips for whose expected arrivals blocks are reserved. Released blocks are usable
#: after one; with more, first tokens come sooner, but more requests must be swapped back in.
RESERVED_ROUND_TRIPS = 1
#: Maximum share of blocks that is reserved.
MAX_RESERVED_SHARE = 0.2
#: Number of arrivals over which the arrival rate is measured.
_MAX_ARRIVALS = 32
#: Assumed seconds of a round trip while stages are unknown.
_DEFAULT_ROUND_TRIP_S = 0.05


class SwapManager:
    """Copies preempted KV to host memory unless the mode is ``recompute`` or there is no room.

    Mode ``proactive-swap`` reserves blocks for expected arrivals. While fewer are free, it preempts
    the requests that are scheduled last, before other requests lack blocks. A swapped-out request
    resumes when more blocks are free than reserved.
    """

    def __init__(
        self, config: SchedulerConfig, queues: RequestQueues, cache: KVCacheManager
    ) -> None:
        self._mode = config.preemption_mode
        self._config = config
        self._queues = queues
        self._cache = cache
        self._ring_times = RingTimes(config.profiles, (), config.row_bytes)
        #: Times of the last arrivals, and the blocks that each needs.
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_MAX_ARRIVALS)
        #: Seconds for the slowest stage to copy a block.
        self._block_s = 0.0
        self.host_blocks = HostBlockAllocator()
        #: Numbers of requests swapped out, swapped in, and not swapped for lack of host memory.
        self.num_swap_outs = self.num_swap_ins = self.num_fallbacks = 0

    def set_host_blocks(self, blocks: int, block_s: float) -> None:
        """Set the host memory of all stages: blocks, and seconds to copy one."""
        if self._mode == "recompute" or self.host_blocks.total or not blocks:
            return
        self.host_blocks.set_total(blocks)
        self._block_s = block_s
        self._queues.policy.set_restore_cost(self._restore_s)

    def set_times(self, times: RingTimes) -> None:
        """Update stage and link times."""
        self._ring_times = times

    def swap_out(self, state: RequestState) -> None:
        """Have the KV of a request that is about to be preempted copied, if that pays off."""
        if (
            self._mode == "recompute"
            or not state.has_valid_kv
            or state.copy_source >= 0
            or not state.num_computed
        ):
            return
        if not self._is_worthwhile(state.num_computed):
            return
        held = self.host_blocks.allocate_blocks(self._config.blocks_for(state.num_computed))
        if held is None:
            self.num_fallbacks += 1
            return
        self.num_swap_outs += 1
        state.host_copy = HostCopy(held, state.num_computed)

    def free_copy(self, state: RequestState) -> None:
        """Free the host copy of a request, if any."""
        if state.host_copy is not None:
            self.host_blocks.free_blocks(state.host_copy.blocks)
            state.host_copy = None

    def proactive_candidates(self, now: float) -> Iterator[RequestState]:
        """Yield requests to preempt before others lack blocks, the one scheduled last first."""
        if not self._is_proactive:
            return
        reserved = self.reserved_blocks(now)
        if not reserved:
            return
        lacking = (
            reserved
            + self._config.growth_blocks(self._queues.num_running)
            - self._cache.num_available
        )
        coming = self._cache.collect_releasing(self._queues.pending_releases)
        lacking -= coming.count
        for state in self._queues.latest_scheduled(now):
            if lacking <= 0:
                return
            lacking -= coming.add_blocks(state.blocks)
            if (
                self._queues.is_idle(state) and not state.is_fresh
            ):  # the other requests follow when their rows are back
                yield state

    @property
    def resumes_early(self) -> bool:
        """Whether requests resume early, with rows in a later micro-batch."""
        return self._is_proactive

    def reserved_blocks(self, now: float) -> int:
        """Return the number of blocks to keep free for expected arrivals."""
        if not self._is_proactive or not self._arrivals:
            return 0
        seconds = now - self._arrivals[0][0]
        if seconds <= 0:
            return 0
        rate = sum(blocks for _, blocks in self._arrivals) / seconds
        soon = (
            rate
            * RESERVED_ROUND_TRIPS
            * (self._ring_times.round_trip_s(1) or _DEFAULT_ROUND_TRIP_S)
        )
        return int(min(soon, MAX_RESERVED_SHARE * self._config.num_blocks))

    def on_arrived(self, state: RequestState, now: float) -> None:
        """Record an arrival."""
        self._arrivals.append((now, self._config.blocks_for(state.num_uncached + 1)))

    @property
    def _is_proactive(self) -> bool:
        return self._mode == "proactive-swap" and self.host_blocks.total > 0

    def _copy_s(self, tokens: int) -> float:
        """Return the seconds to copy the blocks of ``tokens`` tokens out and in."""
        return 2 * self._config.blocks_for(tokens) * self._block_s

    def _is_worthwhile(self, tokens: int) -> bool:
        """Whether ``tokens`` fit one copy, and copying is faster than recomputation."""
        recompute_s = self._ring_times.prompt_s(tokens)
        fits = self._config.blocks_for(tokens) <= MAX_SWAP_BLOCKS
        return fits and not 0 < recompute_s < self._copy_s(tokens)

    def _restore_s(self, state: RequestState) -> float | None:
        """Return the seconds to restore a request from its actual or prospective copy, if any."""
        if state.host_copy is not None:
            return self._copy_s(state.host_copy.num_tokens)
        tokens = state.num_computed
        room = self._config.blocks_for(tokens) <= self.host_blocks.num_free
        if state.phase == "waiting" or not room or not self._is_worthwhile(tokens):
            return None
        return self._copy_s(tokens)

    def validate(self) -> None:
        """Check that each host block belongs to one waiting request, or to none.

        Raises:
            InvariantError: one doesn't.
        """
        requests = [state for state in self._queues if state.host_copy is not None]
        if any(state.phase != "waiting" for state in requests):
            raise InvariantError("a running request has a copy in host memory")
        copies = [state.host_copy for state in requests if state.host_copy is not None]
        for copy in copies:
            if len(copy.blocks) != self._config.blocks_for(copy.num_tokens) or not copy.filled_seq:
                raise InvariantError(
                    f"a copy of {copy.num_tokens} tokens in {len(copy.blocks)} blocks"
                )
        self.host_blocks.validate(copies)
