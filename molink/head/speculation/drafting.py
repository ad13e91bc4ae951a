"""How often the drafts of one request are right."""

from molink.head.speculation.base import DraftSource

#: Of a request that has had no drafts: the chance that one is right.
PRIOR = 0.4
#: Weight of the last draft in the running mean.
_SMOOTHING = 0.15
#: How far, with each pass without drafts, what was learnt falls back towards :data:`PRIOR`: texts
#: change, and a request whose drafts were wrong gets one again after some hundred tokens.
_FORGETTING = 0.004


class Drafting:
    """A request's drafts, and the chance that one is right if those before it are."""

    __slots__ = ("chance", "source")

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        self.chance = PRIOR

    def verified(self, drafts: int, right: int) -> None:
        """Of ``drafts`` the first ``right`` were; what follows a wrong one tells nothing."""
        for _ in range(right):
            self.chance += _SMOOTHING * (1 - self.chance)
        if right < drafts:
            self.chance -= _SMOOTHING * self.chance

    def rested(self) -> None:
        """A pass went without drafts."""
        self.chance += _FORGETTING * max(0.0, PRIOR - self.chance)
