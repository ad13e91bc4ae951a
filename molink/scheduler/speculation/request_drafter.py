"""Drafts of one request, and their probabilities of being right."""

from bisect import bisect_right
from collections.abc import Sequence

from molink.facts.drafts import MAX_DRAFTS, DraftTokens
from molink.scheduler.speculation.answer_history import AnswerHistory
from molink.scheduler.speculation.base import DraftProposal, DraftSource

#: Prior of both the expected and the actual rate of right drafts.
PRIOR_RATE = 0.4
#: Upper bound of any draft's probability.
MAX_PROBABILITY = 0.97
#: Prior of a draft model request: expected tokens, and drafts.
_PRIOR_YIELD = (1.2, 3.0)
#: Weight of the latest draft in the running means, and its weight if less than half of the expected
#: drafts are right. The prior weighs as much as :data:`_PRIOR_WEIGHT` drafts.
_SMOOTHING, _SMOOTHING_WHERE_BAD = 0.05, 0.15
_PRIOR_WEIGHT = 4
#: Number of records from which a request's own means are used instead of the shared ones.
_MIN_OWN = 8
#: Recovery towards the expected rate with each pass without drafts, so that a request whose drafts
#: were wrong is tried again.
_DECAY = 0.001


class _SharedMeans:
    """A pair of running means.

    Until it has enough samples, it uses those of all requests (``shared``), which it also updates.
    """

    __slots__ = ("_shared", "means", "num_recorded")

    def __init__(self, prior: tuple[float, float], shared: "_SharedMeans | None") -> None:
        self._shared = shared
        self.means = prior
        self.num_recorded = 0

    @property
    def _effective(self) -> "_SharedMeans":
        return self if self._shared is None or self.num_recorded >= _MIN_OWN else self._shared

    def _move(self, first: float, second: float, weight: float) -> None:
        one, two = self.means
        self.means = one + weight * (first - one), two + weight * (second - two)

    def _smoothing(self) -> float:
        return _SMOOTHING_WHERE_BAD

    def _add_sample(self, first: float, second: float) -> None:
        if self._shared is not None:
            if not self.num_recorded:
                self.means = self._shared.means
            self._shared._add_sample(first, second)
        self.num_recorded += 1
        weight = max(self._smoothing(), 1 / (_PRIOR_WEIGHT + self.num_recorded))
        self._move(first, second, weight)


class DraftRecord(_SharedMeans):
    """Means of the expected probability of drafts, and of their success."""

    def __init__(self, shared: "DraftRecord | None" = None) -> None:
        super().__init__((PRIOR_RATE, PRIOR_RATE), shared)

    @property
    def success_ratio(self) -> float:
        """Ratio of right drafts to expected right drafts."""
        expected, right = self._effective.means
        return right / expected

    def scale_probability(self, expected: float) -> float:
        """Return the probability of a draft with a given expected probability."""
        return min(MAX_PROBABILITY, expected * self.success_ratio)

    def record_draft(self, expected: float, *, right: bool) -> None:
        """Record whether a draft with an expected probability was right."""
        self._add_sample(expected, right)

    def _smoothing(self) -> float:
        expected, right = self.means
        return _SMOOTHING if right >= 0.5 * expected else _SMOOTHING_WHERE_BAD

    def decay_record(self) -> None:
        """Record a pass without drafts."""
        record = self._effective
        expected, right = record.means
        record._move(expected, max(expected, right), _DECAY)


class DraftYield(_SharedMeans):
    """Means of the expected tokens of a draft model request, and of its drafts."""

    def __init__(self, shared: "DraftYield | None" = None) -> None:
        super().__init__(_PRIOR_YIELD, shared)

    @property
    def tokens(self) -> float:
        """Expected tokens of a request."""
        return self._effective.means[0]

    @property
    def rows(self) -> float:
        """Drafts that follow a request."""
        return self._effective.means[1]

    def record_request(self, tokens: float, rows: int) -> None:
        """Record a request followed by ``rows`` drafts, which are expected to yield ``tokens``."""
        self._add_sample(tokens, rows)

    def decay_yield(self) -> None:
        """Record a pass without a request."""
        record = self._effective
        tokens, rows = record.means
        record._move(max(tokens, _PRIOR_YIELD[0]), max(rows, _PRIOR_YIELD[1]), _DECAY)


#: Lower bounds of the classes by matching tokens, including preceding right drafts.
EVIDENCE_CLASSES = (1, 2, 3, 4, 6, 9)
#: Prior probability by class, measured by ``tools.measure_lookup`` at 05be9d4b.
CLASS_PRIORS = (0.2, 0.45, 0.65, 0.7, 0.85, 0.95)
#: Weight of the latest forced tokens in their trust.
_TRUST_SMOOTHING = 0.15


class RequestDrafter:
    """Drafts of a request, each with its probability given that the previous ones are right.

    Drafts come from ``source``, from the ``history`` of answers in the same cache ``scope``, or
    through ``on_model_drafts`` from a draft model or a last stage with an MTP layer. The
    probability combines the number of matching tokens, or the model's own probability, with the
    past success of such drafts. ``trust`` is the probability of tokens that the last stage declares
    as forced.
    """

    __slots__ = (
        "_first_position",
        "_forced",
        "_forced_position",
        "_forced_until",
        "_history",
        "_history_record",
        "_model_drafts",
        "_proposal",
        "_record",
        "_scope",
        "draft_yield",
        "model_drafts_position",
        "model_record",
        "source",
        "trust",
    )

    def __init__(
        self,
        source: DraftSource,
        model_record: DraftRecord | None = None,
        draft_yield: DraftYield | None = None,
        history: AnswerHistory | None = None,
        history_record: DraftRecord | None = None,
        scope: bytes = b"",
    ) -> None:
        self.source = source
        self.trust = 1.0
        self._record = DraftRecord()
        self._history, self._scope = history, scope
        self._history_record = history_record or DraftRecord()
        self.model_record = model_record or DraftRecord()
        self.draft_yield = draft_yield or DraftYield()
        #: The last proposal, and the position of its first token.
        self._proposal: DraftProposal | DraftTokens = DraftProposal()
        self._first_position = 0
        #: Tokens before this position are forced.
        self._forced_until = 0
        self._forced: Sequence[int] = ()
        self._forced_position = -1
        #: The draft model's tokens; they begin at ``model_drafts_position``.
        self._model_drafts = DraftTokens(-1)
        self.model_drafts_position = -1

    def on_forced(self, position: int, tokens: Sequence[int]) -> None:
        """Record that a grammar forces ``tokens`` from ``position`` on."""
        self._forced_position, self._forced = position, tokens

    def on_model_drafts(self, position: int, drafts: DraftTokens) -> None:
        """Record the draft model's tokens from ``position`` on."""
        self.model_drafts_position, self._model_drafts = position, drafts

    def is_forced(self, position: int) -> bool:
        """Whether the token at ``position`` is known to be forced."""
        return position == self._forced_position and len(self._forced) > 0

    def propose_drafts(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Propose up to ``count`` tokens after ``tokens``."""
        self._first_position, self._forced_until = len(tokens), 0
        if self.is_forced(self._first_position):
            self._proposal = DraftProposal(self._forced[:count])
            self._forced_until = self._first_position + len(self._forced)
        else:
            found: list[DraftProposal | DraftTokens] = [*self._look_up(tokens, count)]
            if self.model_drafts_position == self._first_position:
                found.append(self._model_drafts)
            self._proposal = max(found, key=self._expected_tokens)
        return self._proposal.tokens[:count]

    def remaining_drafts(
        self, tokens: Sequence[int], path: Sequence[int], count: int
    ) -> Sequence[int]:
        """Propose up to ``count`` tokens after ``tokens`` and the drafts of ``path``.

        The last proposal is extended if it is used up.
        """
        proposal = self._proposal
        rest = proposal.tokens[len(tokens) + len(path) - self._first_position :]
        if (
            not rest
            and proposal.tokens
            and isinstance(proposal, DraftProposal)
            and len(tokens) > self._first_position
        ):
            longer = self.propose_drafts(tokens, len(path) + count)
            if list(longer[: len(path)]) != path:
                self._proposal = DraftProposal()
            rest = self._proposal.tokens[len(path) :]
        return rest[:count]

    def probability_at(self, position: int) -> float:
        """Return the probability of the draft at ``position`` if the previous ones are right."""
        if position < self._forced_until:
            return self.trust
        return self._token_probability(self._proposal, position - self._first_position)

    def lookup_probability(self, tokens: Sequence[int]) -> float:
        """Return the maximum probability of a first draft from the source or the history."""
        return max(map(self._expected_tokens, self._look_up(tokens, 1)))

    def _look_up(self, tokens: Sequence[int], count: int) -> list[DraftProposal]:
        """Return the proposals of the source and the history."""
        found = [self.source.propose_drafts(tokens, count)]
        if self._history is not None:
            found.append(self._history.propose_drafts(self._scope, tokens, count))
        return found

    @property
    def is_proven(self) -> bool:
        """Whether drafts like the last proposal were right more often than expected."""
        return self._record_of(self._proposal).success_ratio > 1.0

    @property
    def best_probability(self) -> float:
        """Upper bound of the probability of a draft that is neither forced nor from a model."""
        records = (self._record, self._history_record)[: 1 + (self._history is not None)]
        return max(record.scale_probability(CLASS_PRIORS[-1]) for record in records)

    def on_verified(self, position: int, drafts: int, right: int) -> None:
        """Record that the first ``right`` of ``drafts`` from ``position`` on were right.

        Drafts after a wrong one carry no information.
        """
        sure = max(0, min(drafts, self._forced_until - position))
        if sure:
            self.trust += _TRUST_SMOOTHING * ((right >= sure) - self.trust)
        for at in range(position + sure, position + right):
            self._record_outcome(at, right=True)
        if right < drafts:
            if right >= sure:
                self._record_outcome(position + right, right=False)
            self._proposal = DraftProposal()

    def on_no_drafts(self) -> None:
        """Record a pass without drafts."""
        self._record.decay_record()
        self._history_record.decay_record()
        self.model_record.decay_record()

    def on_issued(self, position: int, rows: int) -> None:
        """Record a pass from ``position`` on with ``rows`` drafts."""
        if self.model_drafts_position == position:
            issued = rows if self._proposal is self._model_drafts else 0
            self.draft_yield.record_request(
                self._expected_tokens(self._model_drafts, issued), issued
            )
        else:
            self.draft_yield.decay_yield()

    def _token_probability(self, proposal: DraftProposal | DraftTokens, index: int) -> float:
        return self._record_of(proposal).scale_probability(_prior_probability(proposal, index))

    def _record_of(self, proposal: DraftProposal | DraftTokens) -> DraftRecord:
        if isinstance(proposal, DraftTokens):
            return self.model_record
        return self._history_record if proposal.first_probability else self._record

    def _expected_tokens(
        self, proposal: DraftProposal | DraftTokens, most: int = MAX_DRAFTS
    ) -> float:
        """Return the expected tokens from a pass with up to ``most`` drafts."""
        tokens, probability = 0.0, 1.0
        for index in range(min(len(proposal.tokens), most)):
            probability *= self._token_probability(proposal, index)
            tokens += probability
        return tokens

    def _record_outcome(self, position: int, *, right: bool) -> None:
        expected = _prior_probability(self._proposal, position - self._first_position)
        self._record_of(self._proposal).record_draft(expected, right=right)


def _prior_probability(proposal: DraftProposal | DraftTokens, index: int) -> float:
    """Return the prior probability of a proposed token, before any correction."""
    if isinstance(proposal, DraftTokens):
        return proposal.probabilities[min(index, len(proposal.probabilities) - 1)]
    if proposal.first_probability and not index:
        return proposal.first_probability
    return CLASS_PRIORS[max(0, bisect_right(EVIDENCE_CLASSES, proposal.evidence + index) - 1)]
