"""The scheduler of a pipeline: requests from submission to the last token."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy

from molink.errors import InvariantError, MolinkError, Overloaded, RequestError
from molink.facts.drafts import DraftBatch, DraftResults
from molink.facts.ring_times import RequestCosts, RingTimes
from molink.routing.cache_report import CacheReport
from molink.scheduler.batch import MicroBatch
from molink.scheduler.batcher import Batcher
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.in_flight import InFlightTracker
from molink.scheduler.kv_cache_manager import KVCacheManager
from molink.scheduler.policies.base import SchedulingPolicy
from molink.scheduler.policies.fcfs import Fcfs
from molink.scheduler.prefix_tree import ROOT
from molink.scheduler.queue_limits import QueueLimits, WaitEstimator
from molink.scheduler.request_queues import RequestQueues
from molink.scheduler.request_state import Emission, RequestState
from molink.scheduler.speculation.answer_history import AnswerHistory
from molink.scheduler.speculation.base import DraftSource
from molink.scheduler.speculation.prompt_lookup import PromptLookup
from molink.scheduler.speculation.speculation import (
    Speculation,
    advance_path,
    are_expected,
    compare_drafts,
)
from molink.scheduler.stats import SchedulerStats
from molink.scheduler.swap_manager import SwapManager
from molink.util.transition_log import TransitionLog
from molink.wire.messages.data_plane import (
    Admit,
    RequestSlice,
    SampledId,
    SamplerOutput,
    TopLogprobs,
)
from molink.wire.messages.load import SchedulerLoad
from molink.wire.messages.serving import FinishReason, OutputToken, Rejected

#: Reason for a request's failure if the last stage has no token for it.
_NO_TOKEN_REASON = (
    "a stage could not compute this request (its logits were unusable, or its grammar is too"
    " complex: that PC's log says which)"
)

#: Alternatives to sampled tokens, or rows (f32) of an embedding model, by (request id, position).
TokenReports = Mapping[tuple[int, int], TopLogprobs | bytes]


class Scheduler:
    """Schedules the requests of one pipeline during one epoch. Sans-IO.

    Call ``next_batch`` whenever stage 0 can take a micro-batch, and after every event while it is
    idle; the batch goes to stage 0's scoreboard in order. The last stage's messages go to
    ``on_sampled``, ``on_tombstone`` and ``on_released``. ``now`` is in seconds of any monotonic
    clock. ``policy`` orders requests (default: first come, first served); ``create_draft_source``
    creates the draft source of a request; ``history`` has the model's answers of earlier epochs.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        epoch: int,
        policy: SchedulingPolicy | None = None,
        create_draft_source: Callable[[], DraftSource] = PromptLookup,
        history: AnswerHistory | None = None,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self._cache = KVCacheManager(config)
        policy = policy if policy is not None else Fcfs()
        policy.set_capacity(config.num_blocks * config.block_size, config.max_num_seqs)
        self._queues = RequestQueues(policy)
        self._ring_times = RingTimes(config.profiles, (), config.row_bytes)
        policy.set_times(self._ring_times)
        self._in_flight = InFlightTracker()
        self._speculation = Speculation(config, create_draft_source, history)
        self._swap = SwapManager(config, self._queues, self._cache)
        self._batcher = Batcher(
            config, self._queues, self._cache, self._in_flight, self._speculation, self._swap
        )
        self._queue_limits = QueueLimits(config)
        self._wait_estimator = WaitEstimator(config, self._queues)
        self._transitions = TransitionLog()
        self._stats = SchedulerStats(self._batcher)
        self._counts = self._stats.counts

    def submit_request(self, state: RequestState, now: float) -> list[Emission]:
        """Queue a request; return the rejection of the request that it displaced, if any.

        A peer with fewer queue slots may displace another peer's request from a full queue; see
        :meth:`QueueLimits.choose_displaced`.

        Raises:
            RequestError: a field is out of range, or the peer's key is in use.
            ContextTooLong: the request exceeds the context length or the KV cache.
            Overloaded: the queue is full and the client has its share, or the estimated wait is too
                long. Carries ``retry_after``.
        """
        if self._queues.find_request(state.peer, state.key) is not None:
            raise RequestError(f"a request {state.key!r} of this peer is already being served")
        self._queue_limits.check_request(state)
        self._wait_estimator.observe_served(now)
        self._set_arrival(state, now)
        self._check_wait(state)
        emissions = self._displace_waiting(state, now)
        self._queues.enqueue_request(state, now)
        self._swap.on_arrived(state, now)
        self._counts["requests"] += 1
        self._transitions.add_entry(now, "submit", state.peer, state.key, len(state.tokens))
        return emissions

    def expire_requests(self, now: float) -> list[Emission]:
        """Reject requests that have waited too long; call it often.

        A request expires after ``max_queue_s`` seconds, or when it can no longer meet its deadline.
        Preempted requests never expire.
        """
        self._wait_estimator.observe_served(now)
        late = [
            state
            for state in self._queues.waiting_requests
            if self._queue_limits.is_late(state, now)
        ]
        waits: dict[tuple[str, str], float | None] = {}
        emissions = []
        for state in late:
            self._counts["expired"] += 1
            self._remove_request(state, "expired", now)
            client = state.client_key
            if client not in waits:
                retry = copy(state)
                self._set_arrival(retry, now)
                waits[client] = self._wait_estimator.estimate_wait(retry)
            error = self._queue_limits.late_error(state, waits[client], now)
            emissions.append(self._reject_overloaded(state, error))
        return emissions

    def cancel_request(self, peer: str, key: str, now: float) -> None:
        """Cancel a request; an ended one is ignored."""
        state = self._queues.find_request(peer, key)
        if state is not None:
            self._cancel_state(state, now)

    def cancel_peer(self, peer: str, now: float) -> None:
        """Cancel all requests of a peer that has left."""
        for state in self._queues.requests_of_peer(peer):
            self._cancel_state(state, now)

    def grant_credit(self, peer: str, key: str, position: int) -> None:
        """Record that the client has taken all tokens below ``position``."""
        state = self._queues.find_request(peer, key)
        if state is not None:
            state.num_credited = max(state.num_credited, min(position, len(state.tokens)))

    def next_batch(self, now: float, *, prefill: bool = True) -> MicroBatch | None:
        """Compose the next micro-batch for stage 0: at most one decode and one prefill volume.

        It always includes the releases of requests that ended since the last call, for any number
        of volumes in flight. Pass ``prefill=False`` while stage 0 has a partly executed prefill
        volume.
        """
        batch = self._batcher.compose_batch(now, prefill=prefill)
        self._wait_estimator.observe_served(now)
        if batch is None:
            return None
        for control in batch.controls:
            self._transitions.add_entry(now, "issue", control.body)
            if isinstance(control.body, Admit):
                self._count_admission(control.body.request, now)
        for volume in batch.volumes:
            header = volume.header
            self._transitions.add_entry(
                now, "issue", header.seq, header.prefill, len(header.slices)
            )
        self._counts["volumes"] += len(batch.volumes)
        self._counts["iterations"] += bool(batch.volumes)
        return batch

    def on_sampled(
        self, message: SamplerOutput, reports: TokenReports, now: float
    ) -> list[Emission]:
        """Process a volume's sampled tokens; return messages for the requests' peers.

        A request fails if it should have been sampled but is in neither ``sampled`` nor ``failed``,
        or if it has tokens without rows.
        """
        slices, seconds = self._pop_volume(message.seq, now)
        choices: dict[int, list[SampledId]] = {}
        for choice in message.sampled:
            choices.setdefault(choice.request, []).append(choice)
        failed = set(message.failed)
        forced = {each.request: each.tokens for each in message.forced}
        mtp_drafts = {each.request: each for each in message.mtp_drafts}
        emissions = []
        for request_slice in slices:
            state = self._queues.get_by_id(request_slice.request)
            if state is None:
                continue
            was_awaited = self._settle_rows(state, request_slice, message.seq)
            if was_awaited:
                self._queues.policy.on_rows_returned(state, seconds, now)
            if request_slice.copy_from_block >= 0:
                self._cache.release_copy_source(state)
            if state.snapshot >= 0:
                self._cache.release_snapshot(state)
            found = choices.get(request_slice.request, [])
            if request_slice.request in failed:
                emissions.append(self._fail_request(state, _NO_TOKEN_REASON, now))
            elif request_slice.sample and was_awaited:
                emissions += self._accept_choices(state, request_slice, found, reports, now)
                if request_slice.request in forced and state.phase != "gone":
                    self._speculation.on_forced(state, forced[request_slice.request])
                if request_slice.request in mtp_drafts and found and state.phase != "gone":
                    self._speculation.on_mtp_drafts(state, mtp_drafts[request_slice.request])
            elif found:
                emissions.append(
                    self._fail_request(state, "the last stage went on from wrong drafts", now)
                )
        self._queues.charge_idle_slots(len(message.sampled))
        self._wait_estimator.observe_served(now)
        return emissions

    def on_tombstone(self, seq: int, now: float) -> list[Emission]:
        """Process a volume whose rows were all dropped.

        Only rows of ended requests may be dropped; other requests fail.
        """
        emissions = []
        slices, _ = self._pop_volume(seq, now)
        for request_slice in slices:
            state = self._queues.get_by_id(request_slice.request)
            if state is not None:
                emissions.append(
                    self._fail_request(state, "a stage dropped rows of this request", now)
                )
        return emissions

    def on_released(self, seq: int, now: float) -> None:
        """Make the blocks of a completed release usable again."""
        if not self._in_flight.pop_release(seq):
            self._count_stray("release", seq, now)
            return
        freed = self._cache.reclaim_released(seq)
        self._transitions.add_entry(now, "released", seq, freed)

    def set_times(self, times: RingTimes) -> None:
        """Update measured stage and link times.

        Stages that were unknown at first stay unknown.
        """
        self._ring_times = times
        self._batcher.set_times(times)

    def pop_draft_batch(self) -> DraftBatch | None:
        """Return the draft model's next batch, if any; call it after :meth:`next_batch`."""
        return self._speculation.draft_queue.pop_batch()

    def on_draft_results(self, found: DraftResults) -> None:
        """Process the results of the draft model's oldest pending batch."""
        self._speculation.draft_queue.on_results(found)

    def set_host_memory(self, blocks: int, block_s: float) -> None:
        """Set the host memory of every stage: KV blocks, and seconds to copy one block one way.

        Only the first call counts.
        """
        self._swap.set_host_blocks(blocks, block_s)

    @property
    def live_requests(self) -> list[tuple[str, str]]:
        """Peer and key of every request, to notify them when the epoch ends."""
        return [(state.peer, state.key) for state in self._queues]

    @property
    def num_strays(self) -> int:
        """Number of messages about volumes or releases not in flight: a stage misbehaves."""
        return int(self._counts["strays"])

    def collect_stats(self) -> tuple[dict[str, float], dict[str, float]]:
        """Collect this epoch's counters, and gauges; see :class:`SchedulerStats`."""
        return self._stats.read_counters(), self._stats.read_gauges()

    def report_load(self, pipeline: str, now: float) -> SchedulerLoad:
        """Create the load report for other peers."""
        return self._stats.report_load(pipeline, now)

    def cache_report(self, version: int) -> CacheReport:
        """Report changes of the prefix cache since ``version`` of an earlier report (-1: none)."""
        log, config = self._cache.span_log, self.config
        whole, added, evicted = log.changes_since(version)
        room = config.num_blocks * config.block_size
        return CacheReport(
            log.version, whole, added, evicted, room, RequestCosts.from_times(self._ring_times)
        )

    def validate(self) -> None:
        """Check all invariants.

        Raises:
            InvariantError: one is broken; carries the last transitions.
        """
        try:
            check_invariants(self.config, self._queues, self._cache, self._in_flight)
            self._swap.validate()
        except InvariantError as error:
            raise InvariantError(str(error), self._transitions.format_lines()) from error

    def _displace_waiting(self, new: RequestState, now: float) -> list[Emission]:
        waiting, running = self._queues.num_waiting, self._queues.num_running
        if not self._queue_limits.is_full(waiting, running):
            return []
        error = self._queue_limits.overloaded_error(
            waiting, running, self._wait_estimator.estimate_next_slot()
        )
        state = self._queue_limits.choose_displaced(new, self._queues.waiting_requests, now)
        if state is None:
            self._counts["refused"] += 1
            raise error
        self._counts["displaced"] += 1
        self._transitions.add_entry(now, "displace", state.peer, state.key, state.num_admissions)
        self._queues.remove_request(state, now)
        self._free_resources(state)
        return [self._reject_overloaded(state, error)]

    def _set_arrival(self, state: RequestState, now: float) -> None:
        costs = RequestCosts.from_times(self._ring_times) if state.deadline_s else None
        state.set_arrival(now, self._cache.find_prefix(state).num_tokens, costs)

    def _check_wait(self, state: RequestState) -> None:
        if not self._queue_limits.has_wait_bound(state):
            return
        try:
            self._queue_limits.check_wait(state, self._wait_estimator.estimate_wait(state))
        except MolinkError:
            self._counts["late"] += 1
            raise

    def _reject_overloaded(self, state: RequestState, error: Overloaded) -> Emission:
        rejected = Rejected(self.epoch, state.key, "overloaded", str(error), error.retry_after)
        return Emission(state.peer, rejected)

    def _count_admission(self, request_id: int, now: float) -> None:
        state = self._queues.get_by_id(request_id)
        if state is not None and state.num_admissions == 1:
            self._counts["admitted"] += 1
            self._counts["queue_seconds"] += now - state.arrived_at

    def _pop_volume(self, seq: int, now: float) -> tuple[tuple[RequestSlice, ...], float]:
        """Remove a returned volume; return its slices and the seconds that it took."""
        returned = self._in_flight.pop_volume(seq)
        if returned is None:
            self._count_stray("volume", seq, now)
            return (), 0.0
        request_slice, issued_at = returned
        self._transitions.add_entry(now, "back", seq, len(request_slice))
        return request_slice, now - issued_at

    def _settle_rows(self, state: RequestState, request_slice: RequestSlice, seq: int) -> bool:
        """Remove returned rows; return whether their tokens are awaited."""
        self._speculation.num_drafted += len(request_slice.drafts)
        del state.in_flight[seq]
        if seq not in state.awaited_seqs:
            return False
        state.awaited_seqs.remove(seq)
        return True

    def _accept_choices(
        self,
        state: RequestState,
        request_slice: RequestSlice,
        choices: Sequence[SampledId],
        reports: TokenReports,
        now: float,
    ) -> list[Emission]:
        """Accept the tokens of a live request, up to its end."""
        if not are_expected(choices, len(state.tokens), request_slice.verified_drafts):
            return [self._fail_request(state, "the last stage did not sample its token", now)]
        compared, right = compare_drafts(state, choices)
        if compared:
            self._speculation.on_verified(state, compared, right)
        emissions = []
        for choice in choices:
            emissions.append(self._accept_token(state, choice, reports, now))
            if state.phase == "gone":
                return emissions
        advance_path(state, len(choices), right)
        if not state.awaited_seqs:
            self._queues.mark_decode_ready(state)
            if state.is_stalled:
                state.stalled_at = now
        return emissions

    def _accept_token(
        self, state: RequestState, choice: SampledId, reports: TokenReports, now: float
    ) -> Emission:
        """Append a token to a live request and emit it."""
        self._counts["tokens"] += 1
        if not state.has_cached_blocks:
            self._cache.cache_computed(state)
        state.num_issued = len(state.tokens)  # the previous token had a row, at least as a draft
        state.tokens.append(choice.token)
        self._queues.fair_shares.on_token(state)
        if state.num_generated == 1:
            state.first_token_at = now
        finish = self._finish_reason(state)
        if finish is not None:
            self._counts["finished"] += 1
            self._wait_estimator.on_finished(state)
            self._queues.policy.on_answered(state)
            self._remove_request(state, finish, now)
        report = reports.get((choice.request, choice.position))
        top = report if isinstance(report, TopLogprobs) else None
        pairs = tuple(zip(top.tokens, top.logprobs, strict=False)) if top is not None else ()
        token = OutputToken(
            self.epoch,
            state.key,
            choice.position,
            choice.token,
            choice.logprob,
            pairs,
            finish,
            state.num_cached if state.num_generated == 1 else 0,
        )
        return Emission(state.peer, token, report if isinstance(report, bytes) else None)

    def _finish_reason(self, state: RequestState) -> FinishReason | None:
        if state.tokens[-1] in state.request.stop_token_ids:
            return "stop"
        spent = state.max_remaining <= 0
        return "length" if spent or len(state.tokens) >= self.config.max_model_len else None

    def _cancel_state(self, state: RequestState, now: float) -> None:
        self._counts["cancelled"] += 1
        counter = self._in_flight.start_cancel() if state.phase != "waiting" else None
        self._transitions.add_entry(now, "cancel", state.peer, state.key, state.phase, state.id)
        self._queues.remove_request(state, now, counter)
        self._free_resources(state)
        self._wait_estimator.observe_served(now)

    def _fail_request(self, state: RequestState, reason: str, now: float) -> Emission:
        self._counts["failed"] += 1
        state.has_valid_kv = False
        self._remove_request(state, "failed", now)
        return Emission(state.peer, Rejected(self.epoch, state.key, "failed", reason))

    def _remove_request(self, state: RequestState, why: str, now: float) -> None:
        self._transitions.add_entry(now, why, state.peer, state.key, state.id, len(state.tokens))
        self._queues.remove_request(state, now)
        self._free_resources(state)

    def _free_resources(self, state: RequestState) -> None:
        self._swap.free_copy(state)
        self._speculation.drop_request(state)

    def _count_stray(self, kind: str, seq: int, now: float) -> None:
        self._counts["strays"] += 1
        self._transitions.add_entry(now, "stray", kind, seq)


def check_invariants(
    config: SchedulerConfig,
    queues: RequestQueues,
    cache: KVCacheManager,
    in_flight: InFlightTracker,
) -> None:
    """Check blocks, rows in flight and credit windows of all requests.

    Raises:
        InvariantError: they disagree.
    """
    in_flight.validate()
    queues.validate()
    cache.validate(queues, queues.pending_releases)
    for state in queues:
        if len(state.tokens) - state.num_credited > state.credit_window:
            raise InvariantError(f"request {state.id} exceeds its credit window")
        if state.phase == "waiting":
            held = state.blocks or state.held_slots or state.copy_source >= 0
            if held or state.in_flight or state.tree_node != ROOT:
                raise InvariantError(f"request {state.key} waits with blocks or rows")
        else:
            _check_admitted(state, config, in_flight)


def _check_admitted(
    state: RequestState, config: SchedulerConfig, in_flight: InFlightTracker
) -> None:
    if len(state.blocks) < config.blocks_for(state.num_issued):
        raise InvariantError(f"request {state.id} has rows issued beyond its blocks")
    if state.in_flight.keys() != in_flight.seqs_of_request(state.id):
        raise InvariantError(f"request {state.id} has other rows in flight")
    if state.copy_source >= 0 and state.num_computed > state.num_reused:
        raise InvariantError(f"request {state.id} still holds a block that it has copied from")
    if state.snapshot >= 0 and state.num_computed > state.num_reused:
        raise InvariantError(f"request {state.id} still holds a snapshot that it has continued")
    if state.kept_slot >= 0 and state.num_issued < state.snapshot_end:
        raise InvariantError(f"request {state.id} keeps a state before its rows are issued")
    if not state.tree_depth * config.block_size <= max(state.num_reused, state.num_computed):
        raise InvariantError(f"request {state.id} shares blocks that are not computed")
