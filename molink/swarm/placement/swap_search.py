"""Exchanges peers between deployments where their rings are better by it: near peers together.

:mod:`molink.swarm.placement.allocation` shares peers out by room alone. Here two deployments
exchange peers, or one gives the other some, as long as the rings that a placement would make of
them cost less, by what is known of links and devices. Each step is the best one that there is; a
deployment with more peers than an exact search of a ring takes is left as it is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations, product
from math import inf, log

from molink.swarm.controller.records import DesiredModel
from molink.swarm.kv_room import CONVERSATION_TOKENS
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import (
    MIN_GAIN,
    Candidate,
    Placement,
    PlacementGoal,
    place_model,
)
from molink.swarm.placement.ring_search import MAX_EXACT_PEERS

#: Rings are worked out for sets of peers until these have had so many subsets together: half a
#: second of a core's time at most, in which the coordinator does nothing else.
_MAX_SUBSETS = 1 << 11
#: Those for ``throughput`` take so many times as long.
_THROUGHPUT_FACTOR = 8
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _RingValue:
    """What a deployment's peers make: what its ring costs, as a logarithm, and its room for KV."""

    log_cost: float
    kv_tokens: int


class SwapSearch:
    """One search; a plain function of what it is given."""

    def __init__(
        self,
        models: Mapping[_Key, DesiredModel],
        offers: Mapping[str, Candidate],
        links: Links,
        may_use: Callable[[_Key, str], bool],
    ) -> None:
        """``offers`` by peer; ``may_use`` says whether a deployment may have a peer."""
        self._models, self._candidates, self._links = models, offers, links
        self._may_use = may_use
        self._subsets_left = _MAX_SUBSETS
        self._cache: dict[tuple[str, frozenset[str]], _RingValue | None] = {}

    def improve_allocation(
        self, owners: Mapping[str, _Key], movable: Collection[str]
    ) -> dict[str, _Key]:
        """Who is to have which peer, where only ``movable`` ones go elsewhere.

        Of a PC with several devices all go, or none.
        """
        found = dict(owners)
        while (better := self._best_swap(found, movable)) is not None:
            found = better
        return found

    def _best_swap(
        self, owners: dict[str, _Key], movable: Collection[str]
    ) -> dict[str, _Key] | None:
        """The sharing-out after the step that gains most, if any gains enough."""
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
        """What the first gives, and the second: no more than two PCs each, first small gifts."""
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
        """The PCs of a deployment that may go elsewhere, each with all its devices."""
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
        """Whether neither has fewer peers afterwards than the stages that it is to have."""
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
        """By what part both together cost less, as a logarithm; no gain if one lacks room."""
        gain = 0.0
        for key, before in zip(keys, old, strict=True):
            after = self._ring_value(key, owners)
            if after is None or (before is not None and after.kv_tokens < before.kv_tokens):
                return 0.0
            gain += inf if before is None else before.log_cost - after.log_cost
        return gain

    def _ring_value(self, key: _Key, owners: dict[str, _Key]) -> _RingValue | None:
        """That of a deployment with the peers which ``owner`` gives it; ``None``: no ring."""
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
            desired.dtype,
            desired.quantize,
            goal=PlacementGoal(desired.objective, desired.target_stages),
            links=self._links,
        )
        if not isinstance(found, Placement) or found.cost <= 0:
            return None
        return _RingValue(log(found.cost), min(found.kv_tokens, CONVERSATION_TOKENS))


def _small_subsets(pcs: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """None of these, one, or two."""
    return [gift for count in range(3) for gift in combinations(pcs, count)]
