"""How often what one source of drafts says comes true."""

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
