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
    """A request's drafts, and the chance that one is right if those before it are.

    ``trust`` is that chance of tokens that the last stage says are forced.
    """

    __slots__ = ("_forced", "_forced_at", "_known", "chance", "source", "trust")

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        self.chance = PRIOR
        self.trust = 1.0
        self._known = 0
        self._forced: Sequence[int] = ()
        self._forced_at = -1

    def offered(self, position: int, tokens: Sequence[int]) -> None:
        """The last stage says that ``tokens`` have to come from ``position`` on."""
        self._forced_at, self._forced = position, tokens

    def forced(self, position: int) -> Sequence[int]:
        """Tokens that are said to have to come from ``position`` on; none if nothing is."""
        return self._forced if position == self._forced_at else ()

    @property
    def is_proven(self) -> bool:
        """Whether drafts were right more often than one could expect."""
        return self.chance > PRIOR

    def verified(self, position: int, drafts: int, right: int) -> None:
        """Of ``drafts`` from ``position`` on the first ``right`` were right.

        What follows a wrong one tells nothing.
        """
        if self.forced(position):
            self.trust += _SMOOTHING * ((right == drafts) - self.trust)
            return
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
