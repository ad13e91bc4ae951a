"""How often the drafts of one request are right."""

from bisect import bisect_right
from collections.abc import Sequence

from molink.head.speculation.base import DraftSource, Foretold

#: From so many tokens on that agree, the last drafts that were right included, a class of its own.
CLASSES = (1, 2, 3, 4, 6, 9)
#: Of a request that has had no drafts: the chance that one is right, by class. So it was with the
#: texts of ``docs/results/lookup.json``, rounded down.
PRIORS = (0.2, 0.45, 0.65, 0.7, 0.85, 0.95)
#: Weight of the last draft in the running mean; of the first ones more, as if :data:`PRIORS` were
#: what so many drafts had told.
_SMOOTHING = 0.15
_WEIGHT_OF_PRIOR = 2
#: How far, with each pass without drafts, what was learnt falls back towards :data:`PRIORS`: texts
#: change, and a request whose drafts were wrong gets one again later.
_FORGETTING = 0.001


class Drafting:
    """A request's drafts, and the chance that one is right if those before it are."""

    __slots__ = ("_begin", "_foretold", "_known", "chances", "source")

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        #: By class.
        self.chances = list(PRIORS)
        self._known = [0] * len(CLASSES)
        #: What was foretold last, and the position of its first token.
        self._foretold = Foretold()
        self._begin = 0

    def draft(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that may follow ``tokens``."""
        self._foretold, self._begin = self.source.draft(tokens, count), len(tokens)
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
        return self.chances[self._class(position)]

    def is_proven(self, position: int) -> bool:
        """Whether such drafts were right more often than one could expect."""
        index = self._class(position)
        return self.chances[index] > PRIORS[index]

    def verified(self, position: int, drafts: int, right: int) -> None:
        """Of ``drafts`` from ``position`` on the first ``right`` were; what follows a wrong one
        tells nothing."""
        for at in range(position, position + right):
            self._learn(self._class(at), 1.0)
        if right < drafts:
            self._learn(self._class(position + right), 0.0)

    def rested(self) -> None:
        """A pass went without drafts."""
        for index, prior in enumerate(PRIORS):
            self.chances[index] += _FORGETTING * max(0.0, prior - self.chances[index])

    def _class(self, position: int) -> int:
        evidence = self._foretold.evidence + position - self._begin
        return max(0, bisect_right(CLASSES, evidence) - 1)

    def _learn(self, index: int, was_right: float) -> None:
        self._known[index] += 1
        weight = max(_SMOOTHING, 1 / (_WEIGHT_OF_PRIOR + self._known[index]))
        self.chances[index] += weight * (was_right - self.chances[index])
