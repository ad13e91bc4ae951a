"""Requests to the draft model.

A small model with the same vocabulary, on the first stage's device, proposes drafts that n-grams
don't find. Requests wait for it, so it is used only if the expected tokens are worth the delay and
the rows. The model's own probabilities decide when to stop.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from molink.facts.drafts import DraftBatch, DraftModelFacts, DraftRequest, DraftResults, DraftTokens
from molink.scheduler.request_state import RequestState
from molink.scheduler.speculation.request_drafter import DraftRecord, DraftYield, RequestDrafter
from molink.scheduler.speculation.round_trip_costs import RingLoad, RoundTripCosts

#: Expected gains of drafts are divided by this, since profiles and probabilities are estimates.
MARGIN = 1.2
#: The divisor for requests to the draft model, which is larger since each also delays other
#: requests.
_REQUEST_MARGIN = 1.8
#: Maximum drafts per request to the model.
MAX_MODEL_DRAFTS = 8
#: Maximum unread tokens for which a request waits for its drafts; longer contexts are read in the
#: background, at most this many tokens at a time.
_SOON, _AT_ONCE = 32, 512
#: Number of tokens within which reading a prompt must pay off.
_PAYBACK_TOKENS = 64
#: Number of requests to the model before more than one per volume is made.
_MIN_TRIALS = 8
#: Initial estimate of the passes per request.
_DEFAULT_PASSES = 3.0
#: Weight of the latest result in the slowdown and the passes, maximum factor by which one result
#: raises the slowdown, and the slowdown's decay with each volume without requests.
_SMOOTHING, _SLOWER, _EASING = 0.2, 4.0, 0.002
#: Lower bound of the assumed success ratio of drafts.
MIN_SUCCESS = 0.01


@dataclass(slots=True, eq=False)
class _ModelRequest:
    """The model's state of a request, of which it has read the first ``num_tokens`` tokens.

    ``is_pending`` is set while a result is outstanding.
    """

    number: int
    drafter: RequestDrafter
    num_tokens: int = 0
    is_pending: bool = False


class DraftModelQueue:
    """Requests of one scheduler to its draft model, if there is a ``model``.

    Each request is for ``fixed`` tokens unless that is 0.
    """

    def __init__(self, model: DraftModelFacts | None, costs: RoundTripCosts, fixed: int) -> None:
        self._model = model
        self._costs = costs
        self._fixed_tokens = fixed
        self._numbers = count()
        self._model_requests: dict[RequestState, _ModelRequest] = {}
        self._by_number: dict[int, _ModelRequest] = {}
        self._requests: list[DraftRequest] = []
        self._ended_numbers: list[int] = []
        #: Requests whose rows wait for the next batch, and those waiting for each pending batch.
        self._held: list[RequestState] = []
        self._batches: deque[tuple[DraftBatch, Sequence[RequestState]]] = deque()
        self._waiting: set[RequestState] = set()
        #: Measured time relative to the profile, and mean passes per request.
        self._slowdown, self._passes = 1.0, _DEFAULT_PASSES
        #: Accuracy and yield of all its drafts.
        self.draft_record, self.draft_yield = DraftRecord(), DraftYield()
        #: Total tokens drafted, and total seconds taken.
        self.num_drafted = 0
        self.draft_seconds = 0.0

    @property
    def has_model(self) -> bool:
        """Whether there is a draft model."""
        return self._model is not None

    def is_waiting(self, state: RequestState) -> bool:
        """Whether the next row of a request waits for drafts of its volume."""
        return state in self._waiting

    def request_drafts(
        self, requests: Sequence[tuple[RequestState, RequestDrafter, int]], load: RingLoad
    ) -> None:
        """Request drafts for a volume's requests if that pays off.

        Each request comes with its maximum number of drafts. The whole volume waits for the
        results.
        """
        model = self._model
        if model is None or load.has_prefill:
            return
        able = [each for each in requests if self._can_ask(*each, model)]
        before = len(self._requests)
        if self._fixed_tokens:
            for state, drafter, room in able:
                self._add_request(state, drafter, min(self._fixed_tokens, room), 0.0)
        else:
            self._ask_if_worthwhile(able, load, model)
        if any(request.max_drafts for request in self._requests[before:]):
            self._held += [state for state, *_ in requests]
            self._waiting.update(state for state, *_ in requests)

    def _ask_if_worthwhile(
        self,
        able: Sequence[tuple[RequestState, RequestDrafter, int]],
        load: RingLoad,
        model: DraftModelFacts,
    ) -> None:
        able = sorted(able, key=lambda each: -each[1].draft_yield.tokens)
        if self.draft_yield.num_recorded < _MIN_TRIALS:
            able = able[:1]
        asked, saved = self._best_count([drafter.draft_yield for _, drafter, _ in able], load)
        least = self._min_probability(asked, load)
        if not asked:  # so that a slow model is tried again later
            self._slowdown += _EASING * (1.0 - self._slowdown)
        for state, drafter, room in able[:asked]:
            behind = len(state.tokens) - self._known_tokens(state)
            if behind <= _SOON:
                # The model's probabilities overestimate by its success ratio.
                said = least / max(MIN_SUCCESS, drafter.model_record.success_ratio)
                self._add_request(state, drafter, min(MAX_MODEL_DRAFTS, room), min(1.0, said))
            elif model.profile.prefill_s(behind) * self._slowdown <= _PAYBACK_TOKENS * saved:
                self._add_request(state, drafter, 0, 0.0)

    def pop_batch(self) -> DraftBatch | None:
        """Return the next batch to send to the model."""
        if not self._requests and not self._ended_numbers:
            return None
        batch = DraftBatch(tuple(self._requests), tuple(self._ended_numbers))
        self._batches.append((batch, self._held))
        self._requests, self._ended_numbers, self._held = [], [], []
        return batch

    def on_results(self, found: DraftResults) -> None:
        """Process the results of the oldest pending batch."""
        self.draft_seconds += found.seconds
        (requests, _), held = self._batches.popleft()
        self._waiting.difference_update(held)
        results = {result.request: result for result in found.drafts}
        for request in requests:
            result = results.get(request.request, DraftTokens(request.request))
            self.num_drafted += len(result.tokens)
            model_request = self._by_number.get(request.request)
            if model_request is not None:
                if request.max_drafts:
                    model_request.drafter.on_model_drafts(model_request.num_tokens, result)
                model_request.is_pending = False
        if found.failed:
            self._model = None
            self._model_requests, self._by_number, self._requests = {}, {}, []
            self._waiting.clear()
        else:
            self._update_slowdown(requests, found)

    def drop_request(self, state: RequestState) -> None:
        """Drop an ended request."""
        model_request = self._model_requests.pop(state, None)
        if model_request is not None:
            del self._by_number[model_request.number]
            self._ended_numbers.append(model_request.number)
            self._requests = [
                request for request in self._requests if request.request != model_request.number
            ]

    def _can_ask(
        self, state: RequestState, drafter: RequestDrafter, room: int, model: DraftModelFacts
    ) -> bool:
        """Whether the model could propose tokens that no other source has.

        It is not asked if n-grams or a grammar are as likely to be right, nor after images, which
        it can't see.
        """
        if state.image_spans:
            return False
        model_request, first = self._model_requests.get(state), len(state.tokens)
        if room < 1 or first + MAX_MODEL_DRAFTS > model.max_model_len:
            return False
        if (
            model_request is not None and model_request.is_pending
        ) or drafter.model_drafts_position == first:
            return False
        return not drafter.is_forced(first) and drafter.lookup_probability(
            state.tokens
        ) < _default_probability(drafter)

    def _known_tokens(self, state: RequestState) -> int:
        model_request = self._model_requests.get(state)
        return 0 if model_request is None else model_request.num_tokens

    def _add_request(
        self, state: RequestState, drafter: RequestDrafter, wanted: int, least: float
    ) -> None:
        """Request ``wanted`` tokens, or only send more context if ``wanted`` is 0."""
        model_request = self._model_requests.get(state)
        if model_request is None:
            model_request = self._model_requests[state] = _ModelRequest(
                next(self._numbers), drafter
            )
            self._by_number[model_request.number] = model_request
        upto = (
            len(state.tokens)
            if wanted
            else min(len(state.tokens), model_request.num_tokens + _AT_ONCE)
        )
        tokens = tuple(state.tokens[model_request.num_tokens : upto])
        self._requests.append(
            DraftRequest(model_request.number, model_request.num_tokens, tokens, wanted, least)
        )
        model_request.num_tokens, model_request.is_pending = upto, True

    def _update_slowdown(self, requests: Sequence[DraftRequest], found: DraftResults) -> None:
        """Learn the model's speed from a batch."""
        model, new = self._model, sum(len(request.tokens) for request in requests)
        if model is None or not requests:
            return
        asked = sum(request.max_drafts > 0 for request in requests)
        passes = max((len(result.tokens) for result in found.drafts), default=0)
        first = self._pass_s(new, 0) if new <= 2 * asked else model.profile.prefill_s(new)
        predicted = first + max(0, passes - 1) * self._pass_s(asked, 0)
        if predicted:
            slowdown = min(found.seconds / predicted, _SLOWER * self._slowdown)
            self._slowdown += _SMOOTHING * (slowdown - self._slowdown)
        if asked:
            self._passes += _SMOOTHING * (passes - self._passes)

    def _pass_s(self, rows: int, context: int) -> float:
        """Return the seconds of a pass of the model, by its profile."""
        return 0.0 if self._model is None else self._model.profile.decode_s(rows, context)

    def _min_probability(self, asked: int, load: RingLoad) -> float:
        """Return the probability above which one more draft and its row pay off."""
        before = self._costs.round_trip_s(0, load)
        if not before or not asked:
            return math.inf
        after = self._costs.round_trip_s(
            asked, load, self._slowdown * self._pass_s(asked, load.context)
        )
        return MARGIN * load.rows * (after / before - 1) / asked

    def _best_count(self, draft_yields: Sequence[DraftYield], load: RingLoad) -> tuple[int, float]:
        """Return the number of leading requests that pay off most, and seconds saved per token."""
        before = self._costs.round_trip_s(0, load)
        best, most, rows, tokens = 0, before, 0.0, float(load.rows)
        if not before:
            return 0, 0.0
        for asked, each in enumerate(draft_yields, 1):
            tokens += each.tokens / _REQUEST_MARGIN
            rows += each.rows
            drafting_s = self._passes * self._slowdown * self._pass_s(asked, load.context)
            round_trip = (
                self._costs.round_trip_s(round(rows), load, drafting_s) * load.rows / tokens
            )
            if round_trip < most:
                best, most = asked, round_trip
        return best, before - most


def _default_probability(drafter: RequestDrafter) -> float:
    """Return the probability of an unknown draft, if all drafts of a request are equally likely."""
    return drafter.draft_yield.tokens / (1.0 + drafter.draft_yield.tokens)
