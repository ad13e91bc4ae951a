"""Exchanges peers between deployments where their rings are better by it: near peers together.

:mod:`molink.swarm.placement.allotment` shares peers out by room alone. Here two deployments
exchange peers, or one gives the other some, as long as the rings that a placement would make of
them cost less, by what is known of links and devices. Each step is the best one that there is; a
deployment with more peers than an exact search of a ring takes is left as it is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations, product
from math import inf, log

from molink.swarm.controller.records import Desired
from molink.swarm.kv_room import CONVERSATION
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import GAIN, Aim, Candidate, Placement, place
from molink.swarm.placement.ring_search import EXACT

#: Rings are worked out for sets of peers until these have had so many subsets together: half a
#: second of a core's time at most, in which the coordinator does nothing else.
_SUBSETS = 1 << 11
#: Those for ``throughput`` take so many times as long.
_LONGER = 8
_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Worth:
    """What a deployment's peers make: what its ring costs, as a logarithm, and its room for KV."""

    cost: float
    tokens: int


class Exchange:
    """One search; a plain function of what it is given."""

    def __init__(
        self,
        models: Mapping[_Key, Desired],
        offers: Mapping[str, Candidate],
        links: Links,
        may_use: Callable[[_Key, str], bool],
    ) -> None:
        """``offers`` by peer; ``may_use`` says whether a deployment may have a peer."""
        self._models, self._offers, self._links = models, offers, links
        self._may_use = may_use
        self._left = _SUBSETS
        self._known: dict[tuple[str, frozenset[str]], _Worth | None] = {}

    def improve(self, owner: Mapping[str, _Key], movable: Collection[str]) -> dict[str, _Key]:
        """Who is to have which peer, where only ``movable`` ones go elsewhere.

        Of a PC with several devices all go, or none.
        """
        found = dict(owner)
        while (better := self._best_step(found, movable)) is not None:
            found = better
        return found

    def _best_step(
        self, owner: dict[str, _Key], movable: Collection[str]
    ) -> dict[str, _Key] | None:
        """The sharing-out after the step that gains most, if any gains enough."""
        best, most = None, -log(1 - GAIN)
        few = [key for key in self._models if [*owner.values()].count(key) <= EXACT]
        for one, other in combinations(few, 2):
            old = self._worth(one, owner), self._worth(other, owner)
            for here, there in self._steps(one, other, owner, movable):
                moved = owner | dict.fromkeys(here, other) | dict.fromkeys(there, one)
                gain = self._gain((one, other), old, moved)
                if gain > most:
                    best, most = moved, gain
                if self._left <= 0:
                    return best
        return best

    def _steps(
        self, one: _Key, other: _Key, owner: dict[str, _Key], movable: Collection[str]
    ) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        """What the first gives, and the second: no more than two PCs each, first small gifts."""
        here = [pc for pc in self._pcs(one, owner, movable) if self._may_have(other, pc)]
        there = [pc for pc in self._pcs(other, owner, movable) if self._may_have(one, pc)]
        steps = product(_gifts(here), _gifts(there))
        for gifts in sorted(steps, key=lambda gifts: len(gifts[0]) + len(gifts[1])):
            step = tuple(chain(*gifts[0])), tuple(chain(*gifts[1]))
            if any(step) and self._enough(one, other, owner, *step):
                yield step

    def _pcs(
        self, key: _Key, owner: dict[str, _Key], movable: Collection[str]
    ) -> list[tuple[str, ...]]:
        """The PCs of a deployment that may go elsewhere, each with all its devices."""
        pcs: dict[str, list[str]] = {}
        for peer, offer in self._offers.items():
            pcs.setdefault(offer.pc or peer, []).append(peer)
        return [
            tuple(peers)
            for peers in pcs.values()
            if all(owner.get(peer) == key and peer in movable for peer in peers)
        ]

    def _may_have(self, key: _Key, peers: tuple[str, ...]) -> bool:
        return all(self._may_use(key, peer) for peer in peers)

    def _enough(
        self,
        one: _Key,
        other: _Key,
        owner: dict[str, _Key],
        here: tuple[str, ...],
        there: tuple[str, ...],
    ) -> bool:
        """Whether neither has fewer peers afterwards than the stages that it is to have."""
        more = len(there) - len(here)
        for key, change in ((one, more), (other, -more)):
            count = sum(each == key for each in owner.values())
            if change < 0 and count + change < self._models[key].stages:
                return False
        return True

    def _gain(
        self,
        keys: tuple[_Key, _Key],
        old: tuple[_Worth | None, _Worth | None],
        owner: dict[str, _Key],
    ) -> float:
        """By what part both together cost less, as a logarithm; no gain if one lacks room."""
        gain = 0.0
        for key, before in zip(keys, old, strict=True):
            after = self._worth(key, owner)
            if after is None or (before is not None and after.tokens < before.tokens):
                return 0.0
            gain += inf if before is None else before.cost - after.cost
        return gain

    def _worth(self, key: _Key, owner: dict[str, _Key]) -> _Worth | None:
        """That of a deployment with the peers which ``owner`` gives it; ``None``: no ring."""
        peers = frozenset(peer for peer, each in owner.items() if each == key)
        name = key[0], peers
        if name not in self._known:
            desired = self._models[key]
            times = _LONGER if desired.objective == "throughput" else 1
            self._left -= times << len(peers) if len(peers) <= EXACT else 0
            known = self._left > 0 and len(peers) <= EXACT
            self._known[name] = self._placed(desired, peers) if known else None
        return self._known[name]

    def _placed(self, desired: Desired, peers: frozenset[str]) -> _Worth | None:
        found = place(
            desired.facts,
            [offer for peer, offer in self._offers.items() if peer in peers],
            desired.dtype,
            desired.quantize,
            aim=Aim(desired.objective, desired.stages),
            links=self._links,
        )
        if not isinstance(found, Placement) or found.cost <= 0:
            return None
        return _Worth(log(found.cost), min(found.tokens, CONVERSATION))


def _gifts(pcs: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """None of these, one, or two."""
    return [gift for count in range(3) for gift in combinations(pcs, count)]
