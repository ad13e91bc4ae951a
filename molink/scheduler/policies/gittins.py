"""The Gittins index, by answers' lengths as they are learned."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from molink.facts.ring_times import UNKNOWN_COSTS, RequestCosts, RingTimes
from molink.scheduler.policies.answer_lengths import AnswerLengths
from molink.scheduler.policies.mlfq import ALPHA, DEFAULT_ITERATION_S, PROMOTION_QUANTA
from molink.scheduler.policies.ranked import Rank, RankedPolicy
from molink.scheduler.request_state import RequestPhase, RequestState

#: Levels by which an index doubles; jobs of one level go as they came.
LEVELS_PER_DOUBLING = 2
#: The best level's index, in seconds times tokens.
_MIN_INDEX = 1e-6
#: Of the answers that are left at least this share ends within a horizon: one that happens to end
#: next tells nothing.
MIN_ENDING_SHARE = 0.5
#: All are judged anew where rows or tokens take so many times as long, or as short.
MAX_COST_RATIO = 1.2
#: An answer is looked at anew when it has grown by one token in so many.
_REEVALUATION_STEP = 8


@dataclass(slots=True)
class _GittinsState:
    """What is known of a job."""

    #: As which of all jobs it came.
    arrival_number: int
    #: When it last had no rows in flight; no time while it has.
    idle_since: float
    #: For which the following holds: its state, whether its KV is in host memory, and up to how
    #: many tokens.
    phase: RequestPhase = "waiting"
    has_host_copy: bool = False
    valid_until: int = 0
    #: Seconds that it is to be given next: of a ring that it shares, and of its own.
    work_s: float = 0.0
    wall_s: float = 0.0
    #: When it is promoted, if it rests until then.
    promotion_due_at: float = math.inf
    #: The inverse of its index: seconds of the ring for one over the answer's tokens; its level.
    index: float = 0.0
    level: int = 0
    #: Since when it goes before all that aren't promoted, for how long, and how long it has run.
    promoted_at: float | None = None
    granted_s: float = 0.0
    spent_s: float = 0.0
    counted_until: float = 0.0

    def mark_idle(self, since: float) -> None:
        """It has rested since then, or runs."""
        self.idle_since = since
        self.promotion_due_at = since + max(ALPHA, PROMOTION_QUANTA * self.wall_s)


class Gittins(RankedPolicy):
    """Who brings most for the ring's time goes first, by what similar requests took (Gittins 1979).

    What is to be least is the mean latency per token, so that a request that is over brings one
    over its answer's tokens. How long the answer will be nobody knows, but how long those to
    similar prompts were (:class:`AnswerLengths`), that it is longer than what there is of it, and
    what the client lets it take.
    The index of a job is the most that it can bring for the time that is spent on it, over all
    horizons: the rest of its prompt, then tokens until the answer is over or the horizon reached.
    An answer that has outlived those that were like it is taken to be half done, so that without
    any knowledge this is least attained service first.

    *The ring's time.* Where memory is short, a token takes its share of an iteration: by the part
    of all KV blocks that the job holds, or of all places. A row of a prompt takes what it adds to a
    step.

    A job gives way to one that waits if that goes before it even after the time that it takes to
    bring the former back.

    *Clients* have equal shares first; the index is for those of one client.

    *Promotion* is as in :class:`Mlfq`: who rests for :data:`PATIENCE` times as long as it is to run
    next, and at least :data:`ALPHA`, goes before all that came to this later, for as long as that.
    """

    max_preemptors = 32

    def __init__(self) -> None:
        super().__init__()
        self._answer_lengths = AnswerLengths()
        self._states: dict[RequestState, _GittinsState] = {}
        self._num_arrivals = 0
        self._costs = UNKNOWN_COSTS
        self._kv_tokens, self._max_num_seqs = 1, 1
        #: Seconds of a prompt's row and of an answer's token when all were last judged anew.
        self._index_costs = self._costs.token_s, DEFAULT_ITERATION_S

    # --- events ----------------------------------------------------------------------------------

    def set_capacity(self, tokens: int, places: int) -> None:
        """As :class:`SchedulingPolicy` says."""
        self._kv_tokens, self._max_num_seqs = tokens, places

    def set_answer_lengths(self, answers: AnswerLengths) -> None:
        """As :class:`SchedulingPolicy` says."""
        self._answer_lengths = answers

    def set_times(self, times: RingTimes) -> None:
        """As :class:`SchedulingPolicy` says."""
        super().set_times(times)
        self._costs = RequestCosts.from_times(times) or UNKNOWN_COSTS
        measures = self._costs.token_s, self._token_s(1.0)[0]
        if not all(map(_is_close, measures, self._index_costs)):
            self._index_costs = measures
            for standing in self._states.values():
                standing.valid_until = 0

    def on_arrived(self, state: RequestState, now: float) -> None:
        """It is judged by its prompt."""
        standing = self._states[state] = _GittinsState(self._num_arrivals, now)
        self._num_arrivals += 1
        self._compute_index(state, standing)

    def on_issued(self, state: RequestState, now: float) -> None:
        """It runs; perhaps as one that has waited for too long until now."""
        standing = self._states[state]
        if standing.idle_since < math.inf:
            if standing.promoted_at is None and now >= standing.promotion_due_at:
                standing.promoted_at, standing.spent_s = standing.promotion_due_at, 0.0
                standing.granted_s = standing.wall_s
            standing.counted_until = now
            standing.mark_idle(math.inf)
        if state.phase == "prefill":  # less is left
            standing.valid_until = 0

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """It has run for some more time."""
        standing = self._states[state]
        standing.spent_s += now - standing.counted_until
        standing.counted_until = now
        if not state.awaited_seqs:
            standing.mark_idle(now)
        if standing.promoted_at is not None and standing.spent_s >= standing.granted_s:
            standing.promoted_at = None

    def on_answered(self, state: RequestState) -> None:
        """That is how long such answers are."""
        self._answer_lengths.add_answer(state.num_prompt_tokens, state.num_output_tokens)

    def on_removed(self, state: RequestState, now: float) -> None:
        """Forget it."""
        del self._states[state]

    # --- judgement -------------------------------------------------------------------------------

    def _current_state(self, state: RequestState) -> _GittinsState:
        """What is known of it, judged anew where it has changed."""
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

    def _compute_index(self, state: RequestState, standing: _GittinsState) -> None:
        tokens, most = state.num_output_tokens, state.request.max_tokens
        longer = self._answer_lengths.longer_answers(tokens, state.num_prompt_tokens)
        answers = [min(answer, most) for answer in longer]
        count, before_s = len(answers), self._next_token_s(state)
        context = len(state.tokens) + (sum(answers) / count - tokens) / 2
        share_s, round_trip_s = self._token_s(context)
        best, horizon, mean, brings, run = math.inf, 0, 0.0, 0.0, 0
        for index, answer in enumerate(answers, start=1):
            brings += 1 / answer
            run += answer - tokens
            if index < MIN_ENDING_SHARE * count:
                continue
            rest = run + (count - index) * (answer - tokens)
            seconds = (count * before_s + share_s * rest) / brings
            if seconds < best:
                best, horizon, mean = seconds, answer - tokens, rest / count
        standing.index, standing.level = best, _index_level(best)
        standing.valid_until = len(state.tokens) + max(1, tokens // _REEVALUATION_STEP)
        standing.work_s, standing.wall_s = (
            before_s + share_s * mean,
            before_s + round_trip_s * horizon,
        )
        standing.mark_idle(standing.idle_since)

    def _next_token_s(self, state: RequestState) -> float:
        """Seconds until it brings its next token, beside those of an iteration."""
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
        """Seconds until a job that gives way now is where it was."""
        seconds = self.restore_cost(state)
        return seconds if seconds is not None else self._costs.prefill_s(state.num_computed)

    def _token_s(self, context: float) -> tuple[float, float]:
        """What a token of a job of that context takes of the ring, and how long it takes."""
        requests = max(1.0, min(self._max_num_seqs, self._kv_tokens / context))
        seconds = self.ring_times.round_trip_s(int(requests), context) or DEFAULT_ITERATION_S
        return seconds / requests, seconds

    # --- questions -------------------------------------------------------------------------------

    def rank_request(self, state: RequestState, now: float) -> Rank:
        """By the level of its index; within one, who came first."""
        standing = self._current_state(state)
        if standing.promoted_at is not None:
            return -1, standing.promoted_at, standing.arrival_number
        if now >= standing.promotion_due_at and not state.is_stalled:
            return -1, standing.promotion_due_at, standing.arrival_number
        return standing.level, 0.0, standing.arrival_number

    def choose_admitted(
        self, waiting: Sequence[RequestState], admitted: Collection[RequestState], now: float
    ) -> RequestState | None:
        """Of the client whose turn it is, the first one.

        If indices came before shares, who asks for what is cached would go before all others.
        """
        theirs = [state for state in waiting if state.client_key == waiting[0].client_key]
        return min(
            theirs, key=lambda state: (state.request.priority, self.rank_request(state, now))
        )

    def can_preempt(self, preemptor: RequestState, other: RequestState, now: float) -> bool:
        """Whether it would do so if it took as much longer as it takes to bring ``other`` back."""
        first, second = self.rank_request(preemptor, now), self.rank_request(other, now)
        if first[0] < 0 or second[0] < 0:
            return first < second
        mine = self._current_state(preemptor)
        share = self._restore_s(other) / mine.work_s if mine.work_s else 0.0
        return _index_level(mine.index * (1 + share)) < second[0]

    def estimate_next_scheduled(
        self, requests: Collection[RequestState], batch: int, now: float
    ) -> Mapping[RequestState, float]:
        """When those who go before it and don't fit beside it are over, or it is promoted."""
        tokens, places, work_s, turns = self._kv_tokens, self._max_num_seqs, 0.0, {}
        asked = set(requests)
        for state in sorted(self._states, key=lambda state: self.rank_request(state, now)):
            standing = self._states[state]
            tokens, places = tokens - len(state.tokens), places - 1
            if state in asked:
                promoted_s = max(0.0, standing.promotion_due_at - now)
                turns[state] = min(work_s, promoted_s)
            if tokens < 0 or places < 0:
                work_s += standing.work_s
        return turns


def _is_close(seconds: float, others: float) -> bool:
    return max(seconds, others) <= MAX_COST_RATIO * min(seconds, others)


def _index_level(index: float) -> int:
    return max(0, math.ceil(LEVELS_PER_DOUBLING * math.log2(max(index, _MIN_INDEX) / _MIN_INDEX)))
