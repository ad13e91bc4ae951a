"""How often the drafts of one request are right."""

from bisect import bisect_right
from collections.abc import Sequence

from molink.head.speculation.base import DraftSource, Foretold

#: From so many tokens on that agree, the last drafts that were right included, a class of its own.
CLASSES = (1, 2, 3, 4, 6, 9)
#: Of a request that has had no drafts: the chance that one is right, by class. So it was with the
#: texts of ``docs/results/lookup.json``, rounded down.
PRIORS = (0.2, 0.45, 0.65, 0.7, 0.85, 0.95)
#: Of these, where nothing is known: what drafts are expected to be, and are.
_USUAL = 0.4
#: Weight of the last draft in the running means; of the first ones more, as if :data:`_USUAL` were
#: what so many drafts had told; and of all, where less than half are right that were to be.
_SMOOTHING, _SMOOTHING_WHERE_BAD = 0.05, 0.15
_WEIGHT_OF_PRIOR = 4
#: How far, with each pass without drafts, what was learnt falls back towards what is expected:
#: texts change, and a request whose drafts were wrong gets one again later.
_FORGETTING = 0.001
#: No draft is surer.
_SUREST = 0.97


class Drafting:
    """A request's drafts, and the chance that one is right if those before it are.

    That is what can be expected by the tokens that agree, and how its drafts have done so far.
    ``trust`` is that chance of tokens that the last stage says are forced.
    """

    __slots__ = (
        "_begin",
        "_expected",
        "_forced",
        "_forced_at",
        "_foretold",
        "_known",
        "_right",
        "_sure",
        "source",
        "trust",
    )

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        self.trust = 1.0
        #: Running means of its drafts: how many were to be right, and were.
        self._expected = self._right = _USUAL
        self._known = 0
        #: What was foretold last, and the position of its first token.
        self._foretold = Foretold()
        self._begin = 0
        #: Those before this position are forced.
        self._sure = 0
        self._forced: Sequence[int] = ()
        self._forced_at = -1

    def offered(self, position: int, tokens: Sequence[int]) -> None:
        """The last stage says that ``tokens`` have to come from ``position`` on."""
        self._forced_at, self._forced = position, tokens

    def is_forced(self, position: int) -> bool:
        """Whether the last stage says what has to come at ``position``."""
        return position == self._forced_at and len(self._forced) > 0

    def draft(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that may follow ``tokens``."""
        self._begin = len(tokens)
        if self.is_forced(self._begin):
            self._foretold = Foretold(self._forced[:count])
            self._sure = self._begin + len(self._forced)
        else:
            self._foretold, self._sure = self.source.draft(tokens, count), 0
        return self._foretold.tokens

    def rest(self, tokens: Sequence[int], path: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that may follow ``tokens`` and the drafts of ``path``.

        If what was foretold last is used up, it looks whether more is foretold now.
        """
        rest = self._foretold.tokens[len(tokens) + len(path) - self._begin :]
        if not rest and self._foretold.tokens and len(tokens) > self._begin:
            longer = self.draft(tokens, len(path) + count)
            if list(longer[: len(path)]) != path:
                self._foretold = Foretold()
            rest = self._foretold.tokens[len(path) :]
        return rest[:count]

    def chance(self, position: int) -> float:
        """That of the draft at ``position``, if those before it are right."""
        if position < self._sure:
            return self.trust
        return min(_SUREST, PRIORS[self._class(position)] * self._success)

    @property
    def is_proven(self) -> bool:
        """Whether its drafts were right more often than one could expect."""
        return self._right > self._expected

    @property
    def best(self) -> float:
        """The chance of a draft at best; of one that isn't forced."""
        return min(_SUREST, PRIORS[-1] * self._success)

    def verified(self, position: int, drafts: int, right: int) -> None:
        """Of ``drafts`` from ``position`` on the first ``right`` were; what follows a wrong one
        tells nothing."""
        sure = max(0, min(drafts, self._sure - position))
        if sure:
            self.trust += _SMOOTHING_WHERE_BAD * ((right >= sure) - self.trust)
        for at in range(position + sure, position + right):
            self._learn(at, 1.0)
        if right < drafts:
            if right >= sure:
                self._learn(position + right, 0.0)
            self._foretold = Foretold()

    def rested(self) -> None:
        """A pass went without drafts."""
        self._right += _FORGETTING * max(0.0, self._expected - self._right)

    @property
    def _success(self) -> float:
        return self._right / self._expected

    def _class(self, position: int) -> int:
        evidence = self._foretold.evidence + position - self._begin
        return max(0, bisect_right(CLASSES, evidence) - 1)

    def _learn(self, position: int, was_right: float) -> None:
        self._known += 1
        smoothing = _SMOOTHING if self._success >= 0.5 else _SMOOTHING_WHERE_BAD
        weight = max(smoothing, 1 / (_WEIGHT_OF_PRIOR + self._known))
        self._expected += weight * (PRIORS[self._class(position)] - self._expected)
        self._right += weight * (was_right - self._right)
