"""Iteration-level scheduling: composes the next micro-batch."""

import math
from collections.abc import Sequence
from itertools import islice

from molink.facts.images import count_uncut
from molink.facts.ring_times import RingTimes
from molink.scheduler.batch import (
    MIN_DECODE_ROOM,
    ControlIssuer,
    MicroBatch,
    VolumeBuilder,
    VolumeWithTokens,
)
from molink.scheduler.blocks import HostCopy
from molink.scheduler.chunk_size import ChunkSize
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.in_flight import InFlightTracker
from molink.scheduler.kv_cache_manager import KVCacheManager
from molink.scheduler.micro_batches import MicroBatchCount
from molink.scheduler.prefix_tree import PrefixMatch
from molink.scheduler.request_queues import RequestQueues
from molink.scheduler.request_state import RequestState
from molink.scheduler.speculation.round_trip_costs import RingLoad
from molink.scheduler.speculation.speculation import Speculation
from molink.scheduler.swap_manager import SwapManager


class Batcher:
    """Composes micro-batches from the request queues and the KV cache.

    Decode rows come from requests whose last token is back, spread evenly over the ``K``
    micro-batches. Prefill rows are chunks of running requests, and of waiting requests that can be
    admitted with the available slots and blocks. The scheduling policy orders requests and selects
    preemption candidates. An admitted request gets blocks for all its known tokens, from the prefix
    cache where possible, and grows block by block afterwards. A decode row that lacks a block
    preempts other requests. While a request is *starved* this way, none is admitted, and requests
    that it could preempt issue no prefill rows. Drafts preempt nothing. The swap manager decides
    whether preempted KV is copied to host memory.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        cache: KVCacheManager,
        in_flight: InFlightTracker,
        speculation: Speculation,
        swap: SwapManager,
    ) -> None:
        self._config = config
        self.speculation = speculation
        self.queues = queues
        self.cache = cache
        self.in_flight = in_flight
        self.swap = swap
        self._controls = ControlIssuer(
            cache,
            in_flight,
            sends_tokens=config.has_mtp_drafts,
            whole_images=config.whole_images,
        )
        self.micro_batches = MicroBatchCount(
            config.micro_batches,
            config.num_stages,
            config.profiles,
            config.row_bytes,
            allows_prefill_only=config.prefill_only_batches,
        )
        self._chunk_size = ChunkSize(
            config.max_num_batched_tokens, config.profiles, self.micro_batches.count
        )
        #: Prefill volumes in flight without piggybacked decode rows.
        self._prefill_only_seqs: set[int] = set()
        #: Whether chunks are sent without decode rows because prompts queue; see
        #: :meth:`_next_prefill_rows`.
        self._chunks_leave_alone = False
        #: Requests admitted for this micro-batch, with the host copies from which they resume.
        self._newly_admitted: list[tuple[RequestState, HostCopy | None]] = []
        #: Requests that lacked a block when decode rows were last composed.
        self._starved: list[RequestState] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_prefill_rows = 0

    def set_times(self, times: RingTimes) -> None:
        """Update stage and link times."""
        self.micro_batches.set_times(times)
        self._chunk_size.set_profiles(times.profiles)
        self.speculation.set_times(times)
        self.queues.policy.set_times(times)
        self.swap.set_times(times)

    def compose_batch(self, now: float, *, prefill: bool = True) -> MicroBatch | None:
        """Compose the next micro-batch; ``None`` if there is nothing to send."""
        decode, chunk = VolumeBuilder(prefill=False), VolumeBuilder(prefill=True)
        self._newly_admitted = []
        self.queues.clear_next_admitted()
        if not self.in_flight.is_window_full:
            if prefill:
                self._preempt_for_waiting(now)
            for state in self.swap.proactive_candidates(now):
                self._preempt(state)
            running = self.queues.decode_order(now)
            streams = len(running)
            context = sum(len(state.tokens) for state in running) // max(1, streams)
            count = self.micro_batches.update_count(streams, context)
            self._chunk_size.set_micro_batches(count)
            if self._has_decode_slot:
                self._ask_draft_model(running, streams, context)
                self._add_decode_rows(decode, running, now)
                self._add_drafts(decode, streams, context)
            if prefill:
                rows = self._next_prefill_rows(streams, context, now, piggyback=len(decode) > 0)
                self._add_prefill(chunk, rows, now)
            resumed = self._admit_swapped(now)
            if not self.swap.resumes_early and self._has_decode_slot:
                for state in resumed:
                    if state.phase == "decode" and decode.block_room >= 1:
                        self._add_rows(decode, state, 1, now)
            if not len(decode) and not len(chunk):
                self._add_lookahead(decode, streams, context)
        control = [
            each
            for pending in self.queues.pop_pending_releases()
            for each in self._controls.issue_release(pending)
        ]
        for state, copy in self._newly_admitted:
            control += self._controls.issue_admission(state, copy)
            self.swap.free_copy(state)
        mtp_bounds = self._bound_mtp_drafts(decode)
        volumes = tuple(
            self._issue_volume(each, now, mtp_bounds) for each in (decode, chunk) if len(each)
        )
        if len(chunk) and not len(decode):
            self._prefill_only_seqs.add(self.in_flight.last_seq)
        return MicroBatch(tuple(control), volumes) if control or volumes else None

    def _bound_mtp_drafts(self, decode: VolumeBuilder) -> tuple[int, float]:
        """See :meth:`.Speculation.bound_mtp_drafts`."""
        if not self._config.has_mtp_drafts:
            return 0, 0.0
        running = self.queues.num_running
        context = sum(len(state.tokens) for state in decode.requests) // max(1, len(decode))
        load = self._ring_load(max(1, len(decode)), max(1, running), context)
        return self.speculation.bound_mtp_drafts(load)

    def _issue_volume(
        self, builder: VolumeBuilder, now: float, mtp_bounds: tuple[int, float]
    ) -> VolumeWithTokens:
        interleaved = builder.prefill and self._chunks_leave_alone
        volume = builder.build_volume(
            self.in_flight.issue_seq(), interleaved=interleaved, mtp_bounds=mtp_bounds
        )
        self.in_flight.record_volume(volume.header, now)
        return volume

    def _decode_quota(self, streams: int) -> int:
        """Return the decode rows per volume, for ``streams`` spread over all micro-batches."""
        return max(1, math.ceil(streams / self._num_decode_volumes))

    @property
    def _has_decode_slot(self) -> bool:
        return self.in_flight.count_volumes(prefill=False) < self._num_decode_volumes

    @property
    def _num_decode_volumes(self) -> int:
        """Maximum decode volumes in flight: ``K``, or one if chunks carry no decode rows."""
        alone = self._chunks_leave_alone and self.in_flight.count_volumes(prefill=True)
        return 1 if alone else self.micro_batches.count

    def _ask_draft_model(self, running: Sequence[RequestState], streams: int, context: int) -> None:
        """Request drafts for the requests of the next volume; some then wait for them."""
        if self.speculation.draft_queue.has_model:
            ready = (state for state in running if self._is_ready(state))
            requests = list(islice(ready, self._decode_quota(streams)))
            load = self._ring_load(len(requests), streams, context)
            self.speculation.ask_draft_model(requests, load)

    def _is_ready(self, state: RequestState) -> bool:
        """Whether a decode row of the request can be issued."""
        waiting = state.awaited_seqs or self.speculation.draft_queue.is_waiting(state)
        return state.phase == "decode" and not waiting

    def _add_decode_rows(
        self, builder: VolumeBuilder, running: Sequence[RequestState], now: float
    ) -> None:
        quota = self._decode_quota(len(running))
        self._starved = []
        for state in running:
            if len(builder) == quota or builder.block_room < 1:
                return
            if not self._is_ready(state):  # or preempted it for an earlier request
                continue
            if self._grow_blocks(state):
                self._add_rows(builder, state, 1, now)
            else:
                self._starved.append(state)
                self._preempt_for_starved(state, now)

    def _add_drafts(self, builder: VolumeBuilder, streams: int, context: int) -> None:
        """Append drafts to decode rows, limited by available blocks."""
        load = self._ring_load(len(builder), streams, context)
        for state, drafts in self.speculation.choose_drafts(
            builder.requests, load, builder.draft_room, self.in_flight.decode_volume_rows
        ):
            drafts, blocks = self._allocate_drafts(state, drafts)
            if drafts:
                released = self.cache.allocator.latest_release(blocks)
                builder.add_drafts(state, drafts, blocks, released)

    def _add_lookahead(self, builder: VolumeBuilder, streams: int, context: int) -> None:
        """Fill the volume with lookahead drafts if nothing else is schedulable."""
        room = self._config.lookahead_volumes - self.in_flight.num_lookahead
        if room <= 0 or self.queues.num_waiting:
            return
        load = self._ring_load(math.ceil(streams / self.micro_batches.count), streams, context)
        if load.has_prefill:
            return
        requests, rows = self.queues.decodes_in_flight(), self.in_flight.decode_volume_rows
        for state, drafts in self.speculation.choose_lookahead(
            requests, load, rows, builder.draft_room
        ):
            drafts, blocks = self._allocate_drafts(state, drafts)
            if drafts:
                released = self.cache.allocator.latest_release(blocks)
                builder.add_lookahead_drafts(state, drafts, blocks, released)

    def _ring_load(self, piggybacked: int, streams: int, context: int) -> RingLoad:
        """Return the ring's load with ``piggybacked`` decode rows per volume."""
        volumes = math.ceil(streams / piggybacked) if piggybacked else 0
        volumes = min(self.micro_batches.count, volumes)
        has_prefill = self.in_flight.count_volumes(prefill=True) > 0 or self.queues.has_prefills
        return RingLoad(piggybacked, volumes, context, has_prefill)

    def _allocate_drafts(
        self, state: RequestState, drafts: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the leading ``drafts`` for which blocks exist, and the blocks to announce."""
        before = len(state.tokens) + len(state.draft_path)
        if self._starved or not self._grow_blocks(state, len(state.draft_path) + len(drafts)):
            drafts = drafts[: max(0, len(state.blocks) * self._config.block_size - before)]
        upto = self._config.blocks_for(before + len(drafts))
        return drafts, state.blocks[state.num_announced : max(upto, state.num_announced)]

    def _grow_blocks(self, state: RequestState, drafts: int = 0) -> bool:
        """Allocate blocks for the last token and ``drafts`` after it, if enough are available."""
        lacking = self._config.blocks_for(len(state.tokens) + drafts) - len(state.blocks)
        if lacking > 0:
            blocks = self.cache.allocate_blocks(lacking)
            if blocks is None:
                return False
            state.blocks += blocks
        return True

    def _preempt_for_starved(self, state: RequestState, now: float) -> None:
        """Preempt until the releasing blocks cover all starved requests."""
        candidates = self.queues.preemption_candidates(state, now)
        while self._num_releasing < len(self._still_starved()):
            candidate = next(candidates, None)
            if candidate is None or not self.queues.is_idle(candidate):
                return
            self._preempt(candidate)

    def _preempt(self, state: RequestState) -> None:
        self.swap.swap_out(state)
        self.queues.preempt_request(state)
        self.num_preemptions += 1

    @property
    def _num_releasing(self) -> int:
        """Number of blocks whose releases are in flight or pending."""
        return self.cache.collect_releasing(self.queues.pending_releases).count

    def _still_starved(self) -> list[RequestState]:
        return [state for state in self._starved if self.queues.get_by_id(state.id) is state]

    def _add_prefill(self, builder: VolumeBuilder, left: int, now: float) -> None:
        """Add up to ``left`` prefill rows.

        Waiting requests are admitted in the order of fair shares, then of the policy.
        """
        starved = self._still_starved()
        closed, seen = bool(starved), set[RequestState]()
        while left > 0 and builder.block_room >= 1:
            prompts = self.queues.prefill_order(now, closed=closed)
            state = next((state for state in prompts if state not in seen), None)
            if state is None:
                return
            if state.phase == "waiting":
                closed = state.host_copy is not None or not self._admit(state, now)
            if state.phase != "waiting":
                seen.add(state)
                preempted = (self.queues.can_be_preempted(state, each, now) for each in starved)
                if not any(preempted):
                    left -= self._add_chunk(builder, state, left, now)

    def _next_prefill_rows(self, streams: int, context: int, now: float, *, piggyback: bool) -> int:
        """Return the rows of the next prefill volume; 0 for none.

        ``streams`` requests decode, with ``context`` tokens each on average. Each of the ``K``
        micro-batches carries one chunk, together with its decode rows if it has any (``piggyback``:
        SARATHI's decode-maximal batches). If chunks were sent whenever stage 0 is idle, decode
        volumes would wait behind them, and weights would be read twice. Prefill-only chunks use the
        round trip's idle time instead (:mod:`molink.scheduler.micro_batches`). If prompts queue and
        decode rows cost little (:meth:`.ChunkSize.leaves_alone`), chunks are sent without decode
        rows: as many as keep the slowest stage or link busy, while all decode rows share one
        volume.
        """
        self._chunks_leave_alone = False
        requests = self.queues.prefill_order(now, closed=self.queues.has_prefills)
        if not requests:
            return 0
        admitted = self.queues.has_prefills
        left = sum(len(state.tokens) - (state.num_issued if admitted else 0) for state in requests)
        in_flight, count = self.in_flight, self.micro_batches.count
        self._prefill_only_seqs = set(filter(in_flight.has_volume, self._prefill_only_seqs))
        volumes = in_flight.count_volumes(prefill=True)
        standalone = in_flight.count_volumes(prefill=False) + len(self._prefill_only_seqs) < count
        queued, prompts = self.queues.num_waiting_tokens, self.queues.num_waiting
        if admitted:
            queued, prompts = queued + left, prompts + len(requests)
        if self.micro_batches.allows_prefill_only and streams <= MIN_DECODE_ROOM:
            self._chunks_leave_alone = self._chunk_size.leaves_alone(
                streams, context, queued, prompts
            )
        if self._chunks_leave_alone and piggyback and volumes:
            return 0
        is_regular = volumes < count and (piggyback or standalone or self._chunks_leave_alone)
        if not is_regular and not self.micro_batches.allows_prefill_only:
            return 0
        before = requests[0].num_issued if admitted else 0
        alone = self._chunks_leave_alone
        rows = self._chunk_size.choose_rows(
            streams, left, before, context, queued, prompts, alone=alone
        )
        if not self._config.max_num_batched_tokens:
            rows = min(rows, self.micro_batches.link_chunk_rows or rows)
        if is_regular:
            return rows
        has_room = in_flight.num_prefill_rows + rows <= self._config.max_prefill_only_rows
        window = self.micro_batches.prefill_only_window(rows, before, streams, context)
        awaited_at = in_flight.oldest_awaited_at
        is_open = alone or awaited_at is None or now - awaited_at <= window.window_s
        return rows if has_room and is_open and volumes < window.max_volumes else 0

    def _add_chunk(
        self, builder: VolumeBuilder, state: RequestState, maximum: int, now: float
    ) -> int:
        """Add up to ``maximum`` prefill rows of a request; return their number."""
        limit = (state.num_announced + builder.block_room) * self._config.block_size
        count = min(maximum, min(len(state.tokens), limit) - state.num_issued)
        whole = state.image_spans if self._config.whole_images else ()
        count = count_uncut(whole, state.num_issued, count)
        if state.num_issued + count > limit:
            return maximum  # the next volume has room
        before_snapshot = state.snapshot_end - state.num_issued
        if 0 < before_snapshot <= count and before_snapshot == count_uncut(
            whole, state.num_issued, before_snapshot
        ):
            kept = self.cache.states.allocate_slot()
            if kept is not None:
                count, state.kept_slot = before_snapshot, kept
        self._add_rows(builder, state, count, now)
        self.num_prefill_rows += count
        return count

    def _preempt_for_waiting(self, now: float) -> None:
        """Preempt for the next waiting requests if they lack only slots or blocks.

        Do nothing while other prefills come first, or while blocks are already being released.
        Called before idle requests enter a volume.
        """
        if not self.queues.num_waiting or self._still_starved():
            return
        first = next(iter(self.queues.prefill_order(now)), None)
        if first is None or first.phase != "waiting":
            return
        config, running = self._config, self.queues.num_running
        releasing = self.cache.collect_releasing(self.queues.pending_releases)
        has_single = self.queues.policy.max_preemptors == 1
        if has_single and releasing.count and running < config.max_num_seqs:
            return
        available, matched = self.cache.num_available + releasing.count, set[int]()
        for number, preemptor in enumerate(self.queues.next_preemptors(now)):
            cached = self.cache.find_prefix(preemptor).blocks
            tokens = min(len(preemptor.tokens) + 1, preemptor.kv_end)
            lacking = config.blocks_for(tokens) - len(cached)
            # A request's cached blocks are not available to itself.
            lacking += self.cache.allocator.count_settled(set(cached) - matched)
            matched.update(cached)
            reserved = self.swap.reserved_blocks(now) if preemptor.host_copy is not None else 0
            candidates = self.queues.preemption_candidates(preemptor, now, number)
            selected = list[RequestState]()
            while running and (
                running >= config.max_num_seqs
                or lacking + config.growth_blocks(running) + reserved > available
            ):
                state = next(candidates, None)
                if state is None:
                    return
                available += releasing.add_blocks(
                    each for each in state.blocks if each not in matched
                )
                running -= 1
                selected.append(state)
            idle = [state for state in selected if self.queues.is_idle(state)]
            for state in idle:
                self._preempt(state)
            if len(idle) < len(selected):  # the others are preempted when their rows are back
                return
            available, running = available - lacking, running + 1

    def _admit_swapped(self, now: float) -> list[RequestState]:
        """Admit swapped-out requests while they come first and there is room."""
        admitted: list[RequestState] = []
        while not self._still_starved():
            state = self.queues.next_swapped(now)
            if state is None or not self._admit(state, now):
                break
            admitted.append(state)
        return admitted

    def _admit(self, state: RequestState, now: float) -> bool:
        """Admit a waiting request if there is room."""
        found = self._find_admissible(state, now)
        if found is None:
            return False
        blocks = self.cache.allocate_table(found, self._config.blocks_for(len(state.tokens)))
        if blocks is None:
            return False
        copy, restored = state.host_copy, 0
        if copy is not None and copy.num_tokens > found.num_tokens:
            restored = len(copy.blocks) - len(found.blocks)
            self.swap.num_swap_ins += 1
        self.queues.admit_request(state, blocks, found, restored)
        state.state_slot = self.cache.allocate_state_slot(found)
        state.snapshot_end = self.cache.choose_snapshot_end(state, found)
        self._newly_admitted.append((state, copy if restored else None))
        if state.num_admissions == 1:
            self.num_prompt_tokens += state.num_prompt_tokens
            self.cache.count_lookup(state)
        return True

    def _find_admissible(self, state: RequestState, now: float) -> PrefixMatch | None:
        """Return the cached prefix to start a request from; ``None`` if it can't be admitted now.

        A partial block to copy from, or a snapshot, is given up if holding it would prevent
        admission.
        """
        running = self.queues.num_running
        if running >= self._config.max_num_seqs:
            return None
        need = self._config.blocks_for(min(len(state.tokens) + 1, state.kv_end))
        need += self._config.growth_blocks(running)
        found = self.cache.find_prefix(state)
        if state.host_copy is not None:
            need += self.swap.reserved_blocks(now) if running else 0
            if state.host_copy.num_tokens > found.num_tokens:
                found = self.cache.keep_full_blocks(found)
        matches = self.cache.list_matches(found)
        return next((each for each in matches if self.cache.can_allocate(each, need)), None)

    def _add_rows(
        self, builder: VolumeBuilder, state: RequestState, count: int, now: float
    ) -> None:
        upto = self._config.blocks_for(state.num_issued + count)
        blocks = state.blocks[state.num_announced : max(upto, state.num_announced)]
        builder.add_rows(state, count, blocks, self.cache.allocator.latest_release(blocks))
        self.queues.on_issued(state, now)
