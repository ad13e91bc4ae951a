"""The Gittins index with learned answer lengths."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from molink.facts.ring_times import UNKNOWN_COSTS, RequestCosts, RingTimes
from molink.scheduler.policies.answer_lengths import AnswerLengths
from molink.scheduler.policies.mlfq import ALPHA, DEFAULT_ITERATION_S, PROMOTION_QUANTA
from molink.scheduler.policies.ranked import Rank, RankedPolicy
from molink.scheduler.request_state import RequestPhase, RequestState

#: Levels per doubling of the index; requests of a level run in order of arrival.
LEVELS_PER_DOUBLING = 2
#: The best level's index, in seconds times tokens.
_MIN_INDEX = 1e-6
#: Minimum share of the remaining answers that must end within a horizon, since single early ends
#: are noise.
MIN_ENDING_SHARE = 0.5
#: Factor of change of a row's or token's cost after which all requests are re-evaluated.
MAX_COST_RATIO = 1.2
#: Share of growth after which an answer is re-evaluated.
_REEVALUATION_STEP = 8


@dataclass(slots=True)
class _GittinsState:
    """Scheduling state of a request."""

    arrival_number: int
    #: Time since which it has had no rows in flight; infinite while it has some.
    idle_since: float
    #: Key of the values below: phase, whether a host copy exists, and number of tokens.
    phase: RequestPhase = "waiting"
    has_host_copy: bool = False
    valid_until: int = 0
    #: Seconds until the next evaluation: of its ring share, and of wall time.
    work_s: float = 0.0
    wall_s: float = 0.0
    #: When it is promoted if it stays idle.
    promotion_due_at: float = math.inf
    #: The inverse of the index (ring seconds times answer tokens), and its level.
    index: float = 0.0
    level: int = 0
    #: Start of the promotion, its length, and the seconds already run.
    promoted_at: float | None = None
    granted_s: float = 0.0
    spent_s: float = 0.0
    counted_until: float = 0.0

    def mark_idle(self, since: float) -> None:
        """Record that it has been idle since ``since`` (seconds); infinity means that it runs."""
        self.idle_since = since
        self.promotion_due_at = since + max(ALPHA, PROMOTION_QUANTA * self.wall_s)


class Gittins(RankedPolicy):
    """Prioritizes the highest expected benefit per second of the ring (Gittins 1979).

    The objective is mean latency per token, so a finished request yields one divided by its
    answer's tokens. Answer lengths are estimated from the answers to similar prompts
    (:class:`AnswerLengths`), given the tokens generated so far, and bounded by the client's limit.
    A request's index is its maximum expected yield per second over all horizons, where the time
    covers the rest of its prompt, and tokens until the answer ends or the horizon is reached. An
    answer longer than all recorded ones is assumed to be half done; without any data this is least
    attained service first.

    *Ring time.* If memory is scarce, a token costs a share of an iteration: the request's share of
    KV blocks or slots. A prompt row costs the time that it adds to a step. A request is preempted
    for a waiting one that outranks it even after the cost of restoring it is added.

    *Fair shares* come first; the index orders the requests of one client.

    *Promotion* is as in :class:`Mlfq`: a request that has been idle for :data:`PROMOTION_QUANTA`
    times its next service time, and at least :data:`ALPHA`, precedes all others for that service
    time.
    """

    max_preemptors = 32

    def __init__(self) -> None:
        super().__init__()
        self._answer_lengths = AnswerLengths()
        self._states: dict[RequestState, _GittinsState] = {}
        self._num_arrivals = 0
        self._costs = UNKNOWN_COSTS
        self._kv_tokens, self._max_num_seqs = 1, 1
        #: Seconds per prompt row and per token at the last re-evaluation of all requests.
        self._index_costs = self._costs.token_s, DEFAULT_ITERATION_S

    def set_capacity(self, tokens: int, max_num_seqs: int) -> None:
        self._kv_tokens, self._max_num_seqs = tokens, max_num_seqs

    def set_answer_lengths(self, answers: AnswerLengths) -> None:
        self._answer_lengths = answers

    def set_times(self, times: RingTimes) -> None:
        super().set_times(times)
        self._costs = RequestCosts.from_times(times) or UNKNOWN_COSTS
        measures = self._costs.token_s, self._token_s(1.0)[0]
        if not all(map(_is_close, measures, self._index_costs)):
            self._index_costs = measures
            for entry in self._states.values():
                entry.valid_until = 0

    def on_arrived(self, state: RequestState, now: float) -> None:
        entry = self._states[state] = _GittinsState(self._num_arrivals, now)
        self._num_arrivals += 1
        self._compute_index(state, entry)

    def on_issued(self, state: RequestState, now: float) -> None:
        """Start running, promoted if it has waited too long."""
        entry = self._states[state]
        if entry.idle_since < math.inf:
            if entry.promoted_at is None and now >= entry.promotion_due_at:
                entry.promoted_at, entry.spent_s = entry.promotion_due_at, 0.0
                entry.granted_s = entry.wall_s
            entry.counted_until = now
            entry.mark_idle(math.inf)
        if state.phase == "prefill":  # less time is left
            entry.valid_until = 0

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """Account the service time."""
        entry = self._states[state]
        entry.spent_s += now - entry.counted_until
        entry.counted_until = now
        if not state.awaited_seqs:
            entry.mark_idle(now)
        if entry.promoted_at is not None and entry.spent_s >= entry.granted_s:
            entry.promoted_at = None

    def on_answered(self, state: RequestState) -> None:
        """Learn the length of the answer."""
        self._answer_lengths.add_answer(state.num_prompt_tokens, state.num_output_tokens)

    def on_removed(self, state: RequestState, now: float) -> None:
        del self._states[state]

    def _current_state(self, state: RequestState) -> _GittinsState:
        """Return the request's state, re-evaluated if outdated."""
        found = self._states[state]
        copied = state.host_copy is not None
        if (
            found.phase != state.phase
            or found.has_host_copy != copied
            or len(state.tokens) >= found.valid_until
        ):
            found.phase, found.has_host_copy = state.phase, copied
            self._compute_index(state, found)
        return found

    def _compute_index(self, state: RequestState, entry: _GittinsState) -> None:
        tokens, most = state.num_output_tokens, state.request.max_tokens
        longer = self._answer_lengths.longer_answers(tokens, state.num_prompt_tokens)
        answers = [min(answer, most) for answer in longer]
        count, before_s = len(answers), self._next_token_s(state)
        context = len(state.tokens) + (sum(answers) / count - tokens) / 2
        share_s, round_trip_s = self._token_s(context)
        best, horizon, mean, gain, run = math.inf, 0, 0.0, 0.0, 0
        for index, answer in enumerate(answers, start=1):
            gain += 1 / answer
            run += answer - tokens
            if index < MIN_ENDING_SHARE * count:
                continue
            rest = run + (count - index) * (answer - tokens)
            seconds = (count * before_s + share_s * rest) / gain
            if seconds < best:
                best, horizon, mean = seconds, answer - tokens, rest / count
        entry.index, entry.level = best, _index_level(best)
        entry.valid_until = len(state.tokens) + max(1, tokens // _REEVALUATION_STEP)
        entry.work_s, entry.wall_s = (
            before_s + share_s * mean,
            before_s + round_trip_s * horizon,
        )
        entry.mark_idle(entry.idle_since)

    def _next_token_s(self, state: RequestState) -> float:
        """Return the seconds until the next token, besides those of an iteration."""
        if state.phase != "waiting":
            return self._costs.prefill_s(
                max(0, len(state.tokens) - state.num_issued - 1), state.num_issued
            )
        if state.host_copy is not None:
            kept = state.host_copy.num_tokens
            rest = self._costs.prefill_s(max(0, len(state.tokens) - kept - 1), kept)
            return (self.restore_cost(state) or 0.0) + rest
        if state.num_admissions:
            return self._costs.prefill_s(len(state.tokens))
        return self._costs.prefill_s(state.num_uncached, len(state.tokens) - state.num_uncached)

    def _restore_s(self, state: RequestState) -> float:
        """Return the seconds to restore the request if it is preempted now."""
        seconds = self.restore_cost(state)
        return seconds if seconds is not None else self._costs.prefill_s(state.num_computed)

    def _token_s(self, context: float) -> tuple[float, float]:
        """Return a token's cost with a context: seconds of ring share, and of wall time."""
        requests = max(1.0, min(self._max_num_seqs, self._kv_tokens / context))
        seconds = self.ring_times.round_trip_s(int(requests), context) or DEFAULT_ITERATION_S
        return seconds / requests, seconds

    def rank_request(self, state: RequestState, now: float) -> Rank:
        """Rank by promotion, then by the index level, then by arrival."""
        entry = self._current_state(state)
        if entry.promoted_at is not None:
            return -1, entry.promoted_at, entry.arrival_number
        if now >= entry.promotion_due_at and not state.is_stalled:
            return -1, entry.promotion_due_at, entry.arrival_number
        return entry.level, 0.0, entry.arrival_number

    def choose_admitted(self, waiting: Sequence[RequestState], now: float) -> RequestState | None:
        """Choose the best request of the first client.

        Ranking across clients would let clients with cached prompts overtake all others.
        """
        requests = [state for state in waiting if state.client_key == waiting[0].client_key]
        return min(
            requests, key=lambda state: (state.request.priority, self.rank_request(state, now))
        )

    def can_preempt(self, preemptor: RequestState, other: RequestState, now: float) -> bool:
        """Whether ``preemptor`` outranks ``other`` even with the latter's cost of restoration."""
        first, second = self.rank_request(preemptor, now), self.rank_request(other, now)
        if first[0] < 0 or second[0] < 0:
            return first < second
        own = self._current_state(preemptor)
        share = self._restore_s(other) / own.work_s if own.work_s else 0.0
        return _index_level(own.index * (1 + share)) < second[0]

    def estimate_next_scheduled(
        self, requests: Collection[RequestState], batch: int, now: float
    ) -> Mapping[RequestState, float]:
        """Estimate the seconds until a request is promoted, or until those before it leave room."""
        tokens, slots, work_s, scheduled = self._kv_tokens, self._max_num_seqs, 0.0, {}
        asked = set(requests)
        for state in sorted(self._states, key=lambda state: self.rank_request(state, now)):
            entry = self._states[state]
            tokens, slots = tokens - len(state.tokens), slots - 1
            if state in asked:
                promoted_s = max(0.0, entry.promotion_due_at - now)
                scheduled[state] = min(work_s, promoted_s)
            if tokens < 0 or slots < 0:
                work_s += entry.work_s
        return scheduled


def _is_close(seconds: float, others: float) -> bool:
    return max(seconds, others) <= MAX_COST_RATIO * min(seconds, others)


def _index_level(index: float) -> int:
    return max(0, math.ceil(LEVELS_PER_DOUBLING * math.log2(max(index, _MIN_INDEX) / _MIN_INDEX)))
