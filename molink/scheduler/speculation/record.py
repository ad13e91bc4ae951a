"""How often what one source of drafts says comes true."""

#: Where nothing is known: what drafts are expected to be, and are.
USUAL = 0.4
#: No draft is surer.
SUREST = 0.97
#: Likewise what asking a draft model brings: tokens, for so many drafts.
_USUAL_YIELD = (1.2, 3.0)
#: Weight of the last draft in the running means; of the first ones more, as if :data:`USUAL` were
#: what so many drafts had told; and of all, where less than half are right that were to be.
_SMOOTHING, _SMOOTHING_WHERE_BAD = 0.05, 0.15
_WEIGHT_OF_PRIOR = 4
#: From so many drafts, or asks, on a request's own count, not those of all.
_OWN = 8
#: How far, with each pass without drafts, what was learnt falls back towards what is expected:
#: texts change, and a request whose drafts were wrong gets one again later.
_FORGETTING = 0.001


class GuessRecord:
    """Running means of a source's drafts: how many were to be right, and were.

    Until it has learnt enough it is as that of all requests (``whole``), which learns with it.
    """

    __slots__ = ("_expected", "_right", "_whole", "known")

    def __init__(self, whole: "GuessRecord | None" = None) -> None:
        self._whole = whole
        self._expected = self._right = USUAL
        #: Drafts that it has learnt of.
        self.known = 0

    @property
    def expected(self) -> float:
        """How many were to be right."""
        return self._origin._expected

    @property
    def right(self) -> float:
        """How many were."""
        return self._origin._right

    @property
    def success(self) -> float:
        """How many times as often as expected they are right."""
        return self.right / self.expected

    def chance(self, expected: float) -> float:
        """Of a draft that is to be right with the chance ``expected``."""
        return min(SUREST, expected * self.success)

    def learn(self, expected: float, *, right: bool) -> None:
        """A draft that was to be right with the chance ``expected`` was, or was not."""
        if self._whole is not None:
            if not self.known:
                self._expected, self._right = self._whole._expected, self._whole._right
            self._whole.learn(expected, right=right)
        self.known += 1
        smoothing = _SMOOTHING if self._right >= 0.5 * self._expected else _SMOOTHING_WHERE_BAD
        weight = max(smoothing, 1 / (_WEIGHT_OF_PRIOR + self.known))
        self._expected += weight * (expected - self._expected)
        self._right += weight * (right - self._right)

    def rested(self) -> None:
        """A pass went without drafts."""
        one = self._origin
        one._right += _FORGETTING * max(0.0, one._expected - one._right)

    @property
    def _origin(self) -> "GuessRecord":
        return self if self._whole is None or self.known >= _OWN else self._whole


class Yield:
    """What asking a draft model brings: running means of tokens for an ask, and of rows for them.

    Until it has learnt enough it is as that of all requests (``whole``), which learns with it.
    """

    __slots__ = ("_rows", "_tokens", "_whole", "known")

    def __init__(self, whole: "Yield | None" = None) -> None:
        self._whole = whole
        self._tokens, self._rows = _USUAL_YIELD
        #: Asks that it has learnt of.
        self.known = 0

    @property
    def tokens(self) -> float:
        """How many an ask is likely to bring."""
        return self._origin._tokens

    @property
    def rows(self) -> float:
        """How many drafts follow it."""
        return self._origin._rows

    def learn(self, tokens: float, rows: int) -> None:
        """An ask was followed by ``rows`` drafts, which are likely to bring ``tokens``."""
        if self._whole is not None:
            if not self.known:
                self._tokens, self._rows = self._whole._tokens, self._whole._rows
            self._whole.learn(tokens, rows)
        self.known += 1
        weight = max(_SMOOTHING_WHERE_BAD, 1 / (_WEIGHT_OF_PRIOR + self.known))
        self._tokens += weight * (tokens - self._tokens)
        self._rows += weight * (rows - self._rows)

    def rested(self) -> None:
        """A pass went without an ask."""
        one = self._origin
        tokens, rows = _USUAL_YIELD
        one._tokens += _FORGETTING * max(0.0, tokens - one._tokens)
        one._rows += _FORGETTING * max(0.0, rows - one._rows)

    @property
    def _origin(self) -> "Yield":
        return self if self._whole is None or self.known >= _OWN else self._whole
