"""Decides how many drafts each request of a micro-batch gets.

A draft is an additional row in a decode volume. Its expected gain in tokens is the product of its
probability and those of all drafts before it. Drafts pay off if these gains outweigh the longer
round trip of the whole volume: the stages' computation and the links' transfer of their rows
(:mod:`molink.facts.ring_times`). If latency dominates, rows cost almost nothing; if stages are
always busy, there are no drafts.

Tokens that a grammar forces are certain drafts, whose rows must be computed anyway.

Drafts that don't fit into their pass, or don't pay off there, may follow in a *lookahead* volume of
their own while stages and links have time. All drafts of a request in flight form one path. When a
different token comes back, the rows on the rest of the path are wrong: they still go round the
ring, but the last stage ignores them, and the next rows overwrite their KV.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from molink.facts.drafts import AUTO_DRAFTS, MAX_DRAFTS, DraftTokens
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.scheduler.config import SchedulerConfig
from molink.scheduler.request_state import RequestState
from molink.scheduler.speculation.answer_history import AnswerHistory
from molink.scheduler.speculation.base import DraftSource
from molink.scheduler.speculation.draft_model_queue import (
    MARGIN,
    MAX_MODEL_DRAFTS,
    MIN_SUCCESS,
    DraftModelQueue,
)
from molink.scheduler.speculation.request_drafter import DraftRecord, DraftYield, RequestDrafter
from molink.scheduler.speculation.round_trip_costs import RingLoad, RoundTripCosts
from molink.wire.messages.data_plane import MtpDrafts, SampledId

#: Maximum tokens proposed at once.
_MAX_PROPOSED = 128
#: Share of a round trip for which decode volumes may occupy the slowest stage or link if lookahead
#: is sent.
_LOOKAHEAD_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class _DraftCandidate:
    """Proposed drafts of a request with their conditional ``probabilities``.

    Their expected gain must be at least ``margin`` times their cost.
    """

    state: RequestState
    drafts: Sequence[int]
    probabilities: Sequence[float]
    margin: float = MARGIN


class Speculation:
    """Chooses drafts for one scheduler, whose requests each have a :class:`RequestDrafter`.

    ``num_speculative_tokens`` drafts per row, or as many as pay off. Requests get their drafts from
    sources made by ``create_source``, from ``history``, to which their answers are added, and from
    the draft model if there is one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        create_source: Callable[[], DraftSource],
        history: AnswerHistory | None = None,
    ) -> None:
        self._config = config
        self._create_source = create_source
        self._auto = config.num_speculative_tokens == AUTO_DRAFTS
        links = (LinkFacts(),) * config.num_stages
        self._costs = RoundTripCosts(RingTimes(config.profiles, links, config.row_bytes))
        fixed = 0 if self._auto else config.num_speculative_tokens
        model = config.draft_model if config.num_speculative_tokens else None
        self.draft_queue = DraftModelQueue(model, self._costs, fixed)
        shares = config.prefix_cache and config.num_speculative_tokens
        self._history = (history or AnswerHistory()) if shares else None
        self._history_record = DraftRecord()
        self.num_drafted = 0
        self.num_accepted = 0

    def set_times(self, times: RingTimes) -> None:
        """Update stage and link times."""
        self._costs.set_times(times)

    def ask_draft_model(self, requests: Iterable[RequestState], load: RingLoad) -> None:
        """Request drafts from the model for requests that can decode further."""
        each = [(state, self._drafter_of(state), _draft_room(state)) for state in requests]
        self.draft_queue.request_drafts(each, load.rounded_context)

    def bound_mtp_drafts(self, load: RingLoad) -> tuple[int, float]:
        """Return the maximum MTP tokens after each sampled token, and a minimum probability.

        The last stage stops when the probability that all are right falls below the minimum, since
        each token costs its own time and that of one more row.
        """
        if not self._config.has_mtp_drafts:
            return 0, 0.0
        if not self._auto:
            return self._config.num_speculative_tokens, 0.0
        load = replace(load.rounded_context, has_prefill=False)
        before, after = (self._costs.round_trip_s(drafts, load) for drafts in (0, 1))
        if not before:
            return 0, 0.0
        cost = load.rows * (after - before) + self._costs.mtp_s
        success = max(MIN_SUCCESS, self.draft_queue.draft_record.success_ratio)
        least = MARGIN * cost / before / success
        return (MAX_MODEL_DRAFTS, least) if least < 1 else (0, 0.0)

    def choose_drafts(
        self,
        requests: Sequence[RequestState],
        load: RingLoad,
        room: int,
        rows_in_flight: Sequence[int] = (),
    ) -> list[tuple[RequestState, Sequence[int]]]:
        """Choose drafts for the requests of a volume; at most ``room`` in all.

        ``rows_in_flight`` are the rows of each decode volume in flight.
        """
        if not self._config.num_speculative_tokens or not requests:
            return []
        load = load.rounded_context
        least = self._min_probability(load) if self._auto else 0.0
        most = self._max_per_pass(load, rows_in_flight)
        candidates = [
            candidate
            for state in requests
            if (candidate := self._draft_candidate(state, least, most, load.has_prefill))
        ]
        chosen = [
            (candidate.state, candidate.drafts[:count])
            for candidate, count in self._choose_counts(candidates, load, room)
        ]
        drafted = {state.id: len(drafts) for state, drafts in chosen}
        for state in requests:
            drafter = self._drafter_of(state)
            drafter.on_issued(len(state.tokens), drafted.get(state.id, 0))
            if state.id not in drafted:
                drafter.on_no_drafts()
        return chosen

    def choose_lookahead(
        self,
        requests: Iterable[RequestState],
        load: RingLoad,
        rows_in_flight: Sequence[int],
        room: int,
    ) -> list[tuple[RequestState, Sequence[int]]]:
        """Choose lookahead drafts that continue those in flight; at most ``room`` in all.

        ``rows_in_flight`` are the rows of each decode volume in flight.
        """
        load = load.rounded_context
        left = min(room, self._lookahead_rows(load, rows_in_flight))
        if left < 1:
            return []
        offers = [
            offer for state in requests if (offer := self._lookahead_candidate(state)) is not None
        ]
        offers.sort(key=lambda offer: -offer.probabilities[0])
        round_trip, chosen = (
            self._costs.round_trip_s(0, load),
            list[tuple[RequestState, Sequence[int]]](),
        )
        # The mean delay of a volume behind a volume of wrong drafts.
        lost = self._costs.bottleneck_s(left, load.context) / 2 * load.rows
        for offer in offers:
            probability = offer.probabilities[0]
            if left < 1 or (self._auto and probability * round_trip < (1 - probability) * lost):
                break
            chosen.append((offer.state, offer.drafts[:left]))
            left -= len(chosen[-1][1])
        return chosen

    def on_verified(self, state: RequestState, drafts: int, right: int) -> None:
        """Record that the first ``right`` of a request's drafts were right."""
        self.num_accepted += right
        self._drafter_of(state).on_verified(len(state.tokens), drafts, right)

    def drop_request(self, state: RequestState) -> None:
        """Drop an ended request; add its answer to the history, as later answers may repeat it."""
        self.draft_queue.drop_request(state)
        if self._history is not None:
            self._history.add_answer(
                state.request.cache_scope, state.tokens, state.num_prompt_tokens
            )

    def on_forced(self, state: RequestState, tokens: Sequence[int]) -> None:
        """Record that a grammar forces ``tokens`` after those of the request."""
        self._drafter_of(state).on_forced(len(state.tokens), tokens)

    def on_mtp_drafts(self, state: RequestState, drafts: MtpDrafts) -> None:
        """Record the last stage's MTP drafts after the request's tokens."""
        probabilities = tuple(percent / 100 for percent in drafts.percents)
        self._drafter_of(state).on_model_drafts(
            len(state.tokens), DraftTokens(-1, drafts.tokens, probabilities)
        )

    def _drafter_of(self, state: RequestState) -> RequestDrafter:
        if state.drafter is None:
            record = DraftRecord(self.draft_queue.draft_record)
            draft_yield = DraftYield(self.draft_queue.draft_yield)
            state.drafter = RequestDrafter(
                self._create_source(),
                record,
                draft_yield,
                self._history,
                DraftRecord(self._history_record),
                state.request.cache_scope,
            )
        return state.drafter

    def _max_per_pass(self, load: RingLoad, rows_in_flight: Sequence[int]) -> int:
        """Return the maximum number of drafts after a decode row.

        It is half of a lookahead volume if two such volumes fit, since their tokens are hardly
        later and don't delay the row itself.
        """
        if not self._auto:
            return self._config.num_speculative_tokens
        if load.has_prefill or not self._config.lookahead_volumes:
            return MAX_DRAFTS
        rows = self._lookahead_rows(load, rows_in_flight := (*rows_in_flight, load.rows))
        again = rows and self._lookahead_rows(load, (*rows_in_flight, rows))
        return max(1, rows // 2) if again else MAX_DRAFTS

    def _draft_candidate(
        self, state: RequestState, least: float, per_pass: int, has_prefill: bool
    ) -> _DraftCandidate | None:
        """Propose drafts after the request's tokens, if any."""
        drafter = self._drafter_of(state)
        first = len(state.tokens)
        is_forced = drafter.is_forced(first)
        is_known = is_forced or drafter.model_drafts_position == first
        if self._auto and (least == math.inf if is_known else drafter.best_probability <= least):
            return None
        most = _MAX_PROPOSED if self._config.lookahead_volumes else per_pass
        most = min(most, _draft_room(state))
        drafts = drafter.propose_drafts(state.tokens, most)[:per_pass] if most > 0 else ()
        if not drafts or not self._auto:
            return _DraftCandidate(state, drafts, [1.0] * len(drafts)) if drafts else None
        probabilities = [drafter.probability_at(first + at) for at in range(len(drafts))]
        if is_forced:
            return _DraftCandidate(state, drafts, probabilities, margin=1.0)
        if probabilities[0] <= least or (has_prefill and not drafter.is_proven):
            return None
        return _DraftCandidate(state, drafts, probabilities)

    def _lookahead_candidate(self, state: RequestState) -> _DraftCandidate | None:
        """Propose drafts after those in flight; the first's probability includes these."""
        drafter, room = state.drafter, _draft_room(state)
        if drafter is None or room < 1:
            return None
        room = min(_MAX_PROPOSED, room)
        drafts = drafter.remaining_drafts(state.tokens, state.draft_path, room)[:MAX_DRAFTS]
        if not drafts:
            return None
        first, path = len(state.tokens), state.draft_path
        probabilities = (drafter.probability_at(first + at) for at in range(1 + len(path)))
        return _DraftCandidate(state, drafts, [math.prod(probabilities)])

    def _lookahead_rows(self, load: RingLoad, rows_in_flight: Sequence[int]) -> int:
        """Return the rows of a lookahead volume; 0 if there is no time for one."""
        if not self._auto:
            return self._config.num_speculative_tokens
        round_trip = self._costs.round_trip_s(0, load)
        if not round_trip:
            return 0
        rows = self._costs.balanced_rows(load.context)
        busy = sum(self._costs.bottleneck_s(each, load.context) for each in (*rows_in_flight, rows))
        return rows if busy <= _LOOKAHEAD_SHARE * round_trip else 0

    def _min_probability(self, load: RingLoad) -> float:
        """Return the probability above which a draft pays off without chunks, or infinity."""
        load = replace(load, has_prefill=False)
        before, after = self._costs.round_trip_s(0, load), self._costs.round_trip_s(1, load)
        return MARGIN * load.rows * (after - before) / before if before else math.inf

    def _choose_counts(
        self, candidates: Sequence[_DraftCandidate], load: RingLoad, room: int
    ) -> list[tuple[_DraftCandidate, int]]:
        """Choose how many drafts each candidate gets, best first."""
        order = self._order_by_gain(candidates, room)
        count = self._best_count(order, load) if self._auto else len(order)
        counts = [0] * len(candidates)
        for index, _ in order[:count]:
            counts[index] += 1
        return [each for each in zip(candidates, counts, strict=True) if each[1]]

    def _order_by_gain(
        self, candidates: Sequence[_DraftCandidate], room: int
    ) -> list[tuple[int, float]]:
        """Yield candidates in order of their next draft's gain, with the gains."""
        heap = [(-each.probabilities[0], index, 1) for index, each in enumerate(candidates)]
        heapify(heap)
        order: list[tuple[int, float]] = []
        while heap and len(order) < room:
            gain, index, count = heappop(heap)
            candidate = candidates[index]
            order.append((index, -gain / candidate.margin))
            if count < len(candidate.drafts):
                heappush(heap, (gain * candidate.probabilities[count], index, count + 1))
        return order

    def _best_count(self, order: Sequence[tuple[int, float]], load: RingLoad) -> int:
        """Return the number of these drafts that yields the most tokens per second."""
        tokens = float(load.rows)
        best, most = 0, tokens / (self._costs.round_trip_s(0, load) or 1.0)
        for count, (_, gain) in enumerate(order, 1):
            tokens += gain
            if tokens / self._costs.round_trip_s(count, load) > most:
                best, most = count, tokens / self._costs.round_trip_s(count, load)
        return best


def _draft_room(state: RequestState) -> int:
    """Return how many drafts may still be added to those in flight; one token follows the last."""
    left = min(state.max_remaining, state.credit_window - (len(state.tokens) - state.num_credited))
    return left - 1 - len(state.draft_path)


def are_expected(choices: Sequence[SampledId], position: int, drafts: Sequence[int]) -> bool:
    """Whether the tokens start at ``position`` and all but the last match ``drafts``.

    Otherwise the KV would belong to other tokens.
    """
    if not 1 <= len(choices) <= 1 + len(drafts):
        return False
    tokens = [choice.token for choice in choices]
    positions = [choice.position for choice in choices]
    right = all(token == draft for token, draft in zip(tokens[:-1], drafts, strict=False))
    return right and positions == list(range(position, position + len(choices)))


def compare_drafts(state: RequestState, choices: Sequence[SampledId]) -> tuple[int, int]:
    """Count the path drafts that ``choices`` cover, and the leading right ones among them."""
    pairs = list(zip(choices, state.draft_path, strict=False))
    wrong = (at for at, (choice, draft) in enumerate(pairs) if choice.token != draft)
    return len(pairs), next(wrong, len(pairs))


def advance_path(state: RequestState, new: int, right: int) -> None:
    """Advance the path by ``new`` tokens, the first ``right`` of which matched, or clear it."""
    del state.draft_path[:new]
    if (
        right < new
        or not state.awaited_seqs
        or state.in_flight[state.awaited_seqs[0]] != len(state.tokens) - 1
    ):
        state.clear_draft_path()
    else:
        state.num_issued = len(state.tokens)
