"""Sources of a model's files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from molink.wire.messages.instructions import Assign, Prefetch, Route

#: Name of the hub among sources.
HUB = "hub"


@dataclass(frozen=True, slots=True)
class ModelSources:
    """Peers that hold all files of a model, and peers that hold some.

    ``hub`` is the model's ``OWNER/NAME@COMMIT`` on the hub; empty if unavailable.
    """

    full_peers: tuple[str, ...] = ()
    partial_peers: tuple[str, ...] = ()
    hub: str = ""

    @classmethod
    def from_message(cls, message: Assign | Prefetch | Route) -> "ModelSources":
        """Return the sources that the coordinator names."""
        some = (peer for peer in message.partial_sources if peer not in message.sources)
        return cls(message.sources, tuple(some), message.hub)

    def without_peer(self, peer: str, *, hub: bool) -> "ModelSources":
        """Return all other sources, including the hub if ``hub`` is set."""
        return ModelSources(
            tuple(one for one in self.full_peers if one != peer),
            tuple(one for one in self.partial_peers if one != peer),
            self.hub if hub else "",
        )

    def rank_sources(
        self, peers: Sequence[str], near: Callable[[str], bool]
    ) -> list[tuple[int, str]]:
        """Rank sources; the lowest rank that has the tensors is used.

        Near peers come first, then the hub, then far peers, since uplinks of home PCs are slow.
        """
        ranked = [(0 if near(peer) else 2, peer) for peer in peers]
        if self.hub:
            ranked.append((1, HUB))
        return sorted(ranked, key=lambda one: one[0])
