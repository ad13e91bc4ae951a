"""How often what one source of drafts says comes true."""

#: Where nothing is known: what drafts are expected to be, and are.
USUAL = 0.4
#: No draft is surer.
SUREST = 0.97
#: Weight of the last draft in the running means; of the first ones more, as if :data:`USUAL` were
#: what so many drafts had told; and of all, where less than half are right that were to be.
_SMOOTHING, _SMOOTHING_WHERE_BAD = 0.05, 0.15
_WEIGHT_OF_PRIOR = 4
#: How far, with each pass without drafts, what was learnt falls back towards what is expected:
#: texts change, and a request whose drafts were wrong gets one again later.
_FORGETTING = 0.001


class Record:
    """Running means of a source's drafts: how many were to be right, and were.

    It begins as that of all requests is (``whole``), which learns what it learns.
    """

    __slots__ = ("_known", "_whole", "expected", "right")

    def __init__(self, whole: "Record | None" = None) -> None:
        self._whole = whole
        self.expected = whole.expected if whole else USUAL
        self.right = whole.right if whole else USUAL
        self._known = 0

    @property
    def success(self) -> float:
        """How many times as often as expected they are right."""
        return self.right / self.expected

    def chance(self, expected: float) -> float:
        """Of a draft that is to be right with the chance ``expected``."""
        return min(SUREST, expected * self.success)

    def learn(self, expected: float, *, right: bool) -> None:
        """A draft that was to be right with the chance ``expected`` was, or was not."""
        self._known += 1
        smoothing = _SMOOTHING if self.success >= 0.5 else _SMOOTHING_WHERE_BAD
        weight = max(smoothing, 1 / (_WEIGHT_OF_PRIOR + self._known))
        self.expected += weight * (expected - self.expected)
        self.right += weight * (right - self.right)
        if self._whole is not None:
            self._whole.learn(expected, right=right)

    def rested(self) -> None:
        """A pass went without drafts."""
        self.right += _FORGETTING * max(0.0, self.expected - self.right)
        if self._whole is not None:
            self._whole.rested()
