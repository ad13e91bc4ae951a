"""Who has the files of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from molink.wire.messages.instructions import Assign, Prefetch, Route

#: What the hub is called among peers.
HUB = "hub"


@dataclass(frozen=True, slots=True)
class ModelSources:
    """Peers that have all files of a model, and such as have some of them.

    ``hub``: where else its tensors are, as ``OWNER/NAME@COMMIT``; empty if nowhere.
    """

    full_peers: tuple[str, ...] = ()
    partial_peers: tuple[str, ...] = ()
    hub: str = ""

    @classmethod
    def from_message(cls, told: Assign | Prefetch | Route) -> "ModelSources":
        """What the coordinator says; who has all of them needs no second mention."""
        some = (peer for peer in told.partial_sources if peer not in told.sources)
        return cls(told.sources, tuple(some), told.hub)

    def without_peer(self, peer: str, *, hub: bool) -> "ModelSources":
        """All others; the hub too if it is to be asked."""
        return ModelSources(
            tuple(one for one in self.full_peers if one != peer),
            tuple(one for one in self.partial_peers if one != peer),
            self.hub if hub else "",
        )

    def rank_sources(
        self, peers: Sequence[str], near: Callable[[str], bool]
    ) -> list[tuple[int, str]]:
        """Whom to ask for tensors, each with a rank: the first rank that has them is asked.

        First peers that are near, then the hub, then those that are far away: among home PCs the
        line up is the slow one.
        """
        ranked = [(0 if near(peer) else 2, peer) for peer in peers]
        if self.hub:
            ranked.append((1, HUB))
        return sorted(ranked, key=lambda one: one[0])
