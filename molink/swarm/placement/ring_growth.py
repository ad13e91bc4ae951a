"""Finds a good ring among more peers than can be searched through: it grows and changes.

From the best rings of those peers that promise most, one thing is changed at a time: a peer more,
one less, another one in a place, or another place for one. The first change that helps is kept,
until none does or enough were tried. Against all rings of 9 and 10 unequal peers this was 0.7 %
worse at most for ``latency``, and 7 % for ``throughput``.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf

from molink.swarm.placement.rings import JudgedRing, Task, fill, lines_of, quick

#: Changes of a ring that are tried from each beginning: the control plane waits meanwhile.
_TRIES = 2000

#: What is to be made least; see :meth:`Growth._worth`.
_Worth = tuple[float, float, float]


class Growth:
    """One search; not every ring is looked at."""

    def __init__(self, task: Task, able: Sequence[int], least: int) -> None:
        """``able`` are those that have room for a layer; ``least`` is how many stages to have."""
        self._task, self._able = task, able
        self._most = min(task.most, task.layers, len(able))
        self._least = min(least, self._most)

    def best(self, starts: Iterable[tuple[int, ...]]) -> JudgedRing | None:
        """The best that is found from any of ``starts``."""
        found: JudgedRing | None = None
        for start in starts:
            ring = self._improved(start)
            if ring is not None and self._beats(ring, found):
                found = ring
        return found

    def _beats(self, ring: JudgedRing, found: JudgedRing | None) -> bool:
        if found is not None:
            stages, others = (min(len(one.order), self._least) for one in (ring, found))
            if stages != others:
                return stages > others
        return ring.better(found)

    def _improved(self, order: tuple[int, ...]) -> JudgedRing | None:
        worth, left = self._worth(order), _TRIES
        changes = self._changes(order, worth)
        while left and (changed := next(changes, None)) is not None:
            left -= 1
            other = self._worth(changed)
            if other < worth:
                worth, order = other, changed
                changes = self._changes(order, worth)
        return None if worth[0] else fill(self._task, order)

    def _worth(self, order: tuple[int, ...]) -> _Worth:
        """What is to be made least: layers without room and links that can't be, stages that are
        missing, and the cost."""
        missing = float(max(0, self._least - len(order)))
        cost = quick(self._task, order)
        if cost is not None:
            return 0.0, missing, cost
        room = sum(max(0, line.cap) for line in lines_of(self._task, order))
        hops = self._task.hops
        closed = sum(hops[i][j] is None for i, j in pairwise((*order, order[0])))
        closed += sum(hops[i][order[0]] is None for i in order[1:])
        return 1.0 + max(0, self._task.layers - room) + closed, missing, inf

    def _changes(self, order: tuple[int, ...], worth: _Worth) -> Iterator[tuple[int, ...]]:
        """Rings that differ in one thing; first larger ones where something is missing."""
        lacks = worth[0] > 0 or worth[1] > 0
        larger, others = self._larger(order), self._as_large(order)
        yield from larger if lacks else others
        yield from others if lacks else larger

    def _larger(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) < self._most:
            for at in range(len(order), -1, -1):
                for i in self._outside(order):
                    yield (*order[:at], i, *order[at:])

    def _as_large(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Or smaller by one."""
        for at in range(len(order)):
            rest = order[:at] + order[at + 1 :]
            if rest:
                yield rest
            for i in self._outside(order):
                yield (*order[:at], i, *order[at + 1 :])
            for to in range(len(rest) + 1):
                yield (*rest[:to], order[at], *rest[to:])

    def _outside(self, order: tuple[int, ...]) -> Iterator[int]:
        return (i for i in self._able if i not in order)
