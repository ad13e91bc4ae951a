"""How often the drafts of one request are right."""

from bisect import bisect_right
from collections.abc import Sequence

from molink.facts.drafts import MAX_DRAFTS, DraftTokens
from molink.scheduler.speculation.base import DraftProposal, DraftSource

#: Where nothing is known: what drafts are expected to be, and are.
PRIOR_RATE = 0.4
#: No draft is surer.
MAX_PROBABILITY = 0.97
#: Likewise what asking a draft model brings: tokens, for so many drafts.
_PRIOR_YIELD = (1.2, 3.0)
#: Weight of the last draft in the running means; of the first ones more, as if :data:`USUAL` were
#: what so many drafts had told; and of all, where less than half are right that were to be.
_SMOOTHING, _SMOOTHING_WHERE_BAD = 0.05, 0.15
_PRIOR_WEIGHT = 4
#: From so many drafts, or asks, on a request's own count, not those of all.
_MIN_OWN = 8
#: How far, with each pass without drafts, what was learnt falls back towards what is expected:
#: texts change, and a request whose drafts were wrong gets one again later.
_DECAY = 0.001


class DraftRecord:
    """Running means of a source's drafts: how many were to be right, and were.

    Until it has learnt enough it is as that of all requests (``whole``), which learns with it.
    """

    __slots__ = ("_expected", "_right", "_shared", "num_recorded")

    def __init__(self, whole: "DraftRecord | None" = None) -> None:
        self._shared = whole
        self._expected = self._right = PRIOR_RATE
        #: Drafts that it has learnt of.
        self.num_recorded = 0

    @property
    def expected_rate(self) -> float:
        """How many were to be right."""
        return self._effective._expected

    @property
    def right_rate(self) -> float:
        """How many were."""
        return self._effective._right

    @property
    def success_ratio(self) -> float:
        """How many times as often as expected they are right."""
        return self.right_rate / self.expected_rate

    def scale_probability(self, expected: float) -> float:
        """Of a draft that is to be right with the chance ``expected_rate``."""
        return min(MAX_PROBABILITY, expected * self.success_ratio)

    def record_draft(self, expected: float, *, right: bool) -> None:
        """A draft that was to be right with the chance ``expected_rate`` was, or was not."""
        if self._shared is not None:
            if not self.num_recorded:
                self._expected, self._right = self._shared._expected, self._shared._right
            self._shared.record_draft(expected, right=right)
        self.num_recorded += 1
        smoothing = _SMOOTHING if self._right >= 0.5 * self._expected else _SMOOTHING_WHERE_BAD
        weight = max(smoothing, 1 / (_PRIOR_WEIGHT + self.num_recorded))
        self._expected += weight * (expected - self._expected)
        self._right += weight * (right - self._right)

    def decay_record(self) -> None:
        """A pass went without drafts."""
        one = self._effective
        one._right += _DECAY * max(0.0, one._expected - one._right)

    @property
    def _effective(self) -> "DraftRecord":
        return self if self._shared is None or self.num_recorded >= _MIN_OWN else self._shared


class DraftYield:
    """What asking a draft model brings: running means of tokens for an ask, and of rows for them.

    Until it has learnt enough it is as that of all requests (``whole``), which learns with it.
    """

    __slots__ = ("_rows", "_shared", "_tokens", "num_recorded")

    def __init__(self, whole: "DraftYield | None" = None) -> None:
        self._shared = whole
        self._tokens, self._rows = _PRIOR_YIELD
        #: Asks that it has learnt of.
        self.num_recorded = 0

    @property
    def tokens(self) -> float:
        """How many an ask is likely to bring."""
        return self._effective._tokens

    @property
    def rows(self) -> float:
        """How many drafts follow it."""
        return self._effective._rows

    def record_request(self, tokens: float, rows: int) -> None:
        """An ask was followed by ``rows`` drafts, which are likely to bring ``tokens``."""
        if self._shared is not None:
            if not self.num_recorded:
                self._tokens, self._rows = self._shared._tokens, self._shared._rows
            self._shared.record_request(tokens, rows)
        self.num_recorded += 1
        weight = max(_SMOOTHING_WHERE_BAD, 1 / (_PRIOR_WEIGHT + self.num_recorded))
        self._tokens += weight * (tokens - self._tokens)
        self._rows += weight * (rows - self._rows)

    def decay_yield(self) -> None:
        """A pass went without an ask."""
        one = self._effective
        tokens, rows = _PRIOR_YIELD
        one._tokens += _DECAY * max(0.0, tokens - one._tokens)
        one._rows += _DECAY * max(0.0, rows - one._rows)

    @property
    def _effective(self) -> "DraftYield":
        return self if self._shared is None or self.num_recorded >= _MIN_OWN else self._shared


#: From so many tokens on that agree, the last drafts that were right included, a class of its own.
EVIDENCE_CLASSES = (1, 2, 3, 4, 6, 9)
#: Of a request that has had no drafts: the chance that one is right, by class. So it was with the
#: texts of ``docs/results/lookup.json``, rounded down.
CLASS_PRIORS = (0.2, 0.45, 0.65, 0.7, 0.85, 0.95)
#: Weight of the last forced tokens in the trust in them.
_TRUST_SMOOTHING = 0.15


class RequestDrafter:
    """A request's drafts, and the chance that one is right if those before it are.

    They come from ``source``, or a draft model has ``on_model_drafts`` them. The chance is what can
    be expected, by the tokens that agree or as the model says, and how such drafts have done so
    far. ``trust`` is that chance of tokens that the last stage says are forced.
    """

    __slots__ = (
        "_first_position",
        "_forced",
        "_forced_position",
        "_forced_until",
        "_model_drafts",
        "_proposal",
        "_record",
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
    ) -> None:
        """``model_record`` is how those of a draft model have done so far, ``draft_yield`` what
        they bring."""
        self.source = source
        self.trust = 1.0
        self._record = DraftRecord()
        self.model_record = model_record or DraftRecord()
        self.draft_yield = draft_yield or DraftYield()
        #: What was foretold last, and the position of its first token.
        self._proposal: DraftProposal | DraftTokens = DraftProposal()
        self._first_position = 0
        #: Those before this position are forced.
        self._forced_until = 0
        self._forced: Sequence[int] = ()
        self._forced_position = -1
        #: What the draft model says, and from which position on.
        self._model_drafts = DraftTokens(-1)
        self.model_drafts_position = -1

    def on_forced(self, position: int, tokens: Sequence[int]) -> None:
        """The last stage says that ``tokens`` have to come from ``position`` on."""
        self._forced_position, self._forced = position, tokens

    def on_model_drafts(self, position: int, drafts: DraftTokens) -> None:
        """A draft model says what may come from ``position`` on."""
        self.model_drafts_position, self._model_drafts = position, drafts

    def is_forced(self, position: int) -> bool:
        """Whether the last stage says what has to come at ``position``."""
        return position == self._forced_position and len(self._forced) > 0

    def propose_drafts(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that may follow ``tokens``."""
        self._first_position, self._forced_until = len(tokens), 0
        if self.is_forced(self._first_position):
            self._proposal = DraftProposal(self._forced[:count])
            self._forced_until = self._first_position + len(self._forced)
        else:
            self._proposal = found = self.source.propose_drafts(tokens, count)
            if self.model_drafts_position == self._first_position and self._expected_tokens(
                self._model_drafts
            ) > self._expected_tokens(found):
                self._proposal = self._model_drafts
        return self._proposal.tokens[:count]

    def remaining_drafts(
        self, tokens: Sequence[int], path: Sequence[int], count: int
    ) -> Sequence[int]:
        """Up to ``count`` tokens that may follow ``tokens`` and the drafts of ``path``.

        If what was foretold last is used up, it looks whether more is foretold now.
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
        """That of the draft at ``position``, if those before it are right."""
        if position < self._forced_until:
            return self.trust
        return self._token_probability(self._proposal, position - self._first_position)

    def lookup_probability(self, tokens: Sequence[int]) -> float:
        """The chance of the first token that ``source`` foretells; 0 if it foretells none."""
        found = self.source.propose_drafts(tokens, 1)
        return self._token_probability(found, 0) if found.tokens else 0.0

    @property
    def is_proven(self) -> bool:
        """Whether its drafts were right more often than one could expect."""
        return self._record.success_ratio > 1.0

    @property
    def best_probability(self) -> float:
        """The chance of a draft at best; of one that is neither forced nor guessed by a model."""
        return self._record.scale_probability(CLASS_PRIORS[-1])

    def on_verified(self, position: int, drafts: int, right: int) -> None:
        """Of ``drafts`` from ``position`` on the first ``right`` were; what follows a wrong one
        tells nothing."""
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
        """A pass went without drafts."""
        self._record.decay_record()
        self.model_record.decay_record()

    def on_issued(self, position: int, rows: int) -> None:
        """A pass from ``position`` on has ``rows`` drafts."""
        if self.model_drafts_position == position:
            guessed = rows if self._proposal is self._model_drafts else 0
            self.draft_yield.record_request(
                self._expected_tokens(self._model_drafts, guessed), guessed
            )
        else:
            self.draft_yield.decay_yield()

    def _token_probability(self, proposal: DraftProposal | DraftTokens, index: int) -> float:
        return self._record_of(proposal).scale_probability(_prior_probability(proposal, index))

    def _record_of(self, proposal: DraftProposal | DraftTokens) -> DraftRecord:
        return self.model_record if isinstance(proposal, DraftTokens) else self._record

    def _expected_tokens(
        self, proposal: DraftProposal | DraftTokens, most: int = MAX_DRAFTS
    ) -> float:
        """How many tokens it is likely to bring in a pass that has up to so many of it."""
        tokens, probability = 0.0, 1.0
        for index in range(min(len(proposal.tokens), most)):
            probability *= self._token_probability(proposal, index)
            tokens += probability
        return tokens

    def _record_outcome(self, position: int, *, right: bool) -> None:
        expected = _prior_probability(self._proposal, position - self._first_position)
        self._record_of(self._proposal).record_draft(expected, right=right)


def _prior_probability(proposal: DraftProposal | DraftTokens, index: int) -> float:
    """The chance of a token that was foretold, by itself."""
    if isinstance(proposal, DraftTokens):
        return proposal.probabilities[min(index, len(proposal.probabilities) - 1)]
    return CLASS_PRIORS[max(0, bisect_right(EVIDENCE_CLASSES, proposal.evidence + index) - 1)]
