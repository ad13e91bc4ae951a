"""How often the drafts of one request are right."""

from collections.abc import Sequence

from molink.head.speculation.base import DraftSource

#: Of a request that has had no drafts: the chance that one is right.
PRIOR = 0.35
#: Weight of the last draft in the running mean; of the first ones more, as if :data:`PRIOR` were
#: what so many drafts had told.
_SMOOTHING = 0.15
_WEIGHT_OF_PRIOR = 2
#: How far, with each pass without drafts, what was learnt falls back towards :data:`PRIOR`: texts
#: change, and a request whose drafts were wrong gets one again later.
_FORGETTING = 0.001


class Drafting:
    """A request's drafts, and the chance that one is right if those before it are."""

    __slots__ = ("_begin", "_chain", "_known", "chance", "source")

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        self.chance = PRIOR
        self._known = 0
        #: What was foretold last, and the position of its first token.
        self._chain: Sequence[int] = ()
        self._begin = 0

    def draft(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that may follow ``tokens``."""
        self._chain, self._begin = self.source.draft(tokens, count), len(tokens)
        return self._chain

    def rest(self, position: int) -> Sequence[int]:
        """What was foretold from ``position`` on when it drafted last."""
        return self._chain[position - self._begin :]

    @property
    def is_proven(self) -> bool:
        """Whether drafts were right more often than one could expect."""
        return self.chance > PRIOR

    def verified(self, drafts: int, right: int) -> None:
        """Of ``drafts`` the first ``right`` were; what follows a wrong one tells nothing."""
        for _ in range(right):
            self._learn(1.0)
        if right < drafts:
            self._learn(0.0)

    def rested(self) -> None:
        """A pass went without drafts."""
        self.chance += _FORGETTING * max(0.0, PRIOR - self.chance)

    def _learn(self, was_right: float) -> None:
        self._known += 1
        weight = max(_SMOOTHING, 1 / (_WEIGHT_OF_PRIOR + self._known))
        self.chance += weight * (was_right - self.chance)
