"""Swaps peers between deployments to make their rings cheaper, so that near peers are together.

:mod:`molink.swarm.placement.allocation` considers only room. Here two deployments swap peers, or
one gives peers to the other, as long as the rings that a placement would build from them get
cheaper. Each step is the best one available. Deployments with more peers than the exact ring search
handles stay unchanged.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations, product
from math import inf, log

from molink.facts.memory_plan import CONVERSATION_TOKENS
from molink.swarm.controller.records import DesiredModel
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import (
    MIN_GAIN,
    Candidate,
    Placement,
    PlacementGoal,
    place_model,
)
from molink.swarm.placement.ring_search import MAX_EXACT_PEERS

#: Budget of the search, in subsets of the evaluated peer sets: about half a second of one core, for
#: which the coordinator is blocked.
_MAX_SUBSETS = 1 << 11
#: Factor by which rings for ``throughput`` take longer to evaluate.
_THROUGHPUT_FACTOR = 8
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _RingValue:
    """Value of a deployment's peers: the logarithm of its ring's cost, and its KV room."""

    log_cost: float
    kv_tokens: int


class SwapSearch:
    """One search; a pure function of its arguments."""

    def __init__(
        self,
        models: Mapping[_Key, DesiredModel],
        offers: Mapping[str, Candidate],
        links: Links,
        may_use: Callable[[_Key, str], bool],
    ) -> None:
        """``offers`` are by peer; ``may_use`` says whether a deployment may use a peer."""
        self._models, self._candidates, self._links = models, offers, links
        self._may_use = may_use
        self._subsets_left = _MAX_SUBSETS
        self._cache: dict[tuple[str, frozenset[str]], _RingValue | None] = {}

    def improve_allocation(
        self, owners: Mapping[str, _Key], movable: Collection[str]
    ) -> dict[str, _Key]:
        """Return the improved allocation; only ``movable`` peers move, all devices of a PC
        together.
        """
        found = dict(owners)
        while (better := self._best_swap(found, movable)) is not None:
            found = better
        return found

    def _best_swap(
        self, owners: dict[str, _Key], movable: Collection[str]
    ) -> dict[str, _Key] | None:
        """Return the allocation after the most valuable swap, if one is worth it."""
        best, most = None, -log(1 - MIN_GAIN)
        few = [key for key in self._models if [*owners.values()].count(key) <= MAX_EXACT_PEERS]
        for one, other in combinations(few, 2):
            old = self._ring_value(one, owners), self._ring_value(other, owners)
            for here, there in self._swaps(one, other, owners, movable):
                moved = owners | dict.fromkeys(here, other) | dict.fromkeys(there, one)
                gain = self._gain((one, other), old, moved)
                if gain > most:
                    best, most = moved, gain
                if self._subsets_left <= 0:
                    return best
        return best

    def _swaps(
        self, one: _Key, other: _Key, owners: dict[str, _Key], movable: Collection[str]
    ) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Yield the peers that each side gives: at most two PCs, small swaps first."""
        here = [
            pc for pc in self._movable_pcs(one, owners, movable) if self._may_use_all(other, pc)
        ]
        there = [
            pc for pc in self._movable_pcs(other, owners, movable) if self._may_use_all(one, pc)
        ]
        steps = product(_small_subsets(here), _small_subsets(there))
        for gifts in sorted(steps, key=lambda gifts: len(gifts[0]) + len(gifts[1])):
            step = tuple(chain(*gifts[0])), tuple(chain(*gifts[1]))
            if any(step) and self._keeps_enough(one, other, owners, *step):
                yield step

    def _movable_pcs(
        self, key: _Key, owners: dict[str, _Key], movable: Collection[str]
    ) -> list[tuple[str, ...]]:
        """Return a deployment's PCs whose devices may all move."""
        pcs: dict[str, list[str]] = {}
        for peer, offer in self._candidates.items():
            pcs.setdefault(offer.primary_peer or peer, []).append(peer)
        return [
            tuple(peers)
            for peers in pcs.values()
            if all(owners.get(peer) == key and peer in movable for peer in peers)
        ]

    def _may_use_all(self, key: _Key, peers: tuple[str, ...]) -> bool:
        return all(self._may_use(key, peer) for peer in peers)

    def _keeps_enough(
        self,
        one: _Key,
        other: _Key,
        owners: dict[str, _Key],
        here: tuple[str, ...],
        there: tuple[str, ...],
    ) -> bool:
        """Whether both deployments keep at least as many peers as their target stages."""
        more = len(there) - len(here)
        for key, change in ((one, more), (other, -more)):
            count = sum(each == key for each in owners.values())
            if change < 0 and count + change < self._models[key].target_stages:
                return False
        return True

    def _gain(
        self,
        keys: tuple[_Key, _Key],
        old: tuple[_RingValue | None, _RingValue | None],
        owners: dict[str, _Key],
    ) -> float:
        """Return the decrease of the summed log cost; 0 if a deployment lacks room."""
        gain = 0.0
        for key, before in zip(keys, old, strict=True):
            after = self._ring_value(key, owners)
            if after is None or (before is not None and after.kv_tokens < before.kv_tokens):
                return 0.0
            gain += inf if before is None else before.log_cost - after.log_cost
        return gain

    def _ring_value(self, key: _Key, owners: dict[str, _Key]) -> _RingValue | None:
        """Return the value of a deployment with its peers in ``owners``; ``None`` if there is no
        ring.
        """
        peers = frozenset(peer for peer, each in owners.items() if each == key)
        name = key[0], peers
        if name not in self._cache:
            desired = self._models[key]
            times = _THROUGHPUT_FACTOR if desired.objective == "throughput" else 1
            self._subsets_left -= times << len(peers) if len(peers) <= MAX_EXACT_PEERS else 0
            known = self._subsets_left > 0 and len(peers) <= MAX_EXACT_PEERS
            self._cache[name] = self._evaluate_ring(desired, peers) if known else None
        return self._cache[name]

    def _evaluate_ring(self, desired: DesiredModel, peers: frozenset[str]) -> _RingValue | None:
        found = place_model(
            desired.facts,
            [offer for peer, offer in self._candidates.items() if peer in peers],
            desired.setup,
            goal=PlacementGoal(desired.objective, desired.target_stages),
            links=self._links,
        )
        if not isinstance(found, Placement) or found.cost <= 0:
            return None
        return _RingValue(log(found.cost), min(found.kv_tokens, CONVERSATION_TOKENS))


def _small_subsets(pcs: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """Yield all subsets of at most two PCs."""
    return [gift for count in range(3) for gift in combinations(pcs, count)]
