"""Local search for a ring among too many peers for an exact search.

Starting from the best rings of the most promising peers, it changes one thing at a time: adds,
removes, replaces or moves a peer. The first improvement is kept, until there is none or the budget
is spent. Compared with all rings of 9 and 10 unequal peers the result was at most 0.7 % worse for
``latency`` and 7 % for ``throughput``.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf

from molink.swarm.placement.rings import RatedRing, RingTask, estimate_cost, fill_ring, linear_times

#: Changes tried from each start; the control plane waits meanwhile.
_MAX_TRIES = 2000

#: Minimized lexicographically; see :meth:`RingGrowth._ring_cost`.
_RingCost = tuple[float, float, float]


class RingGrowth:
    """One search."""

    def __init__(self, task: RingTask, able: Sequence[int], min_stages: int) -> None:
        """``able`` have room for a layer; ``min_stages`` is the wanted number of stages."""
        self._task, self._usable = task, able
        self._max_stages = min(task.max_stages, task.layers, len(able))
        self._min_stages = min(min_stages, self._max_stages)

    def find_best(self, starts: Iterable[tuple[int, ...]]) -> RatedRing | None:
        """The best ring found from any of ``starts``."""
        found: RatedRing | None = None
        for start in starts:
            ring = self._improve(start)
            if ring is not None and self._is_better(ring, found):
                found = ring
        return found

    def _is_better(self, ring: RatedRing, found: RatedRing | None) -> bool:
        if found is not None:
            stages, others = (min(len(one.order), self._min_stages) for one in (ring, found))
            if stages != others:
                return stages > others
        return ring.is_better(found)

    def _improve(self, order: tuple[int, ...]) -> RatedRing | None:
        worth, left = self._ring_cost(order), _MAX_TRIES
        changes = self._neighbours(order, worth)
        while left and (changed := next(changes, None)) is not None:
            left -= 1
            other = self._ring_cost(changed)
            if other < worth:
                worth, order = other, changed
                changes = self._neighbours(order, worth)
        return None if worth[0] else fill_ring(self._task, order)

    def _ring_cost(self, order: tuple[int, ...]) -> _RingCost:
        """Missing layers and links, missing stages, and the cost."""
        missing = float(max(0, self._min_stages - len(order)))
        cost = estimate_cost(self._task, order)
        if cost is not None:
            return 0.0, missing, cost
        room = sum(max(0, line.max_layers) for line in linear_times(self._task, order))
        hops = self._task.hops
        closed = sum(hops[i][j] is None for i, j in pairwise((*order, order[0])))
        closed += sum(hops[i][order[0]] is None for i in order[1:])
        return 1.0 + max(0, self._task.layers - room) + closed, missing, inf

    def _neighbours(self, order: tuple[int, ...], worth: _RingCost) -> Iterator[tuple[int, ...]]:
        """Rings that differ in one thing; larger ones first if something is missing."""
        lacks = worth[0] > 0 or worth[1] > 0
        larger, others = self._larger(order), self._not_larger(order)
        yield from larger if lacks else others
        yield from others if lacks else larger

    def _larger(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) < self._max_stages:
            for at in range(len(order), -1, -1):
                for i in self._unused(order):
                    yield (*order[:at], i, *order[at:])

    def _not_larger(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Rings of the same size, or one smaller."""
        for at in range(len(order)):
            rest = order[:at] + order[at + 1 :]
            if rest:
                yield rest
            for i in self._unused(order):
                yield (*order[:at], i, *order[at + 1 :])
            for to in range(len(rest) + 1):
                yield (*rest[:to], order[at], *rest[to:])

    def _unused(self, order: tuple[int, ...]) -> Iterator[int]:
        return (i for i in self._usable if i not in order)
