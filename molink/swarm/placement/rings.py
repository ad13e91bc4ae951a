"""A ring: peers in their order, each with its layers, and what that is predicted to cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from molink.facts.model import Objective
from molink.swarm.placement.partition import Line, Runner, min_slowest

#: Micro-batches in flight for each stage, at most: the head goes up to twice as many as stages.
FLIGHTS = 2
#: Costs that differ by less than this part are the same.
SAME = 1e-9


@dataclass(frozen=True, slots=True)
class HopTimes:
    """A link from one peer to another, in seconds.

    ``rows`` is until a micro-batch's rows have arrived, and ``rows_busy`` the part of it in which
    the link can take nothing else. ``tokens`` and ``tokens_busy`` are the same where it is the
    ring's last one, which carries only what was sampled.
    """

    rows: float
    rows_busy: float
    tokens: float
    tokens_busy: float


#: ``hops[i][j]`` leads from ``i`` to ``j``; ``None`` where ``i`` can't connect to ``j``.
Hops = Sequence[Sequence[HopTimes | None]]


@dataclass(frozen=True)
class Task:
    """``layers`` to be shared out among some of ``runners``, at most ``most`` of them."""

    layers: int
    runners: Sequence[Runner]
    hops: Hops
    objective: Objective = "latency"
    most: int = 16

    @cached_property
    def lines(self) -> Sequence[Sequence[Line]]:
        """Each runner's stage: in the middle, opening the ring, closing it, and both."""
        ends = (False, True)
        return [
            [one.line(opens=opens, closes=closes) for closes in ends for opens in ends]
            for one in self.runners
        ]


@dataclass(frozen=True, slots=True)
class JudgedRing:
    """Indices of runners in ring order, and the layers of each.

    ``turn`` and ``slowest`` (stage) are in seconds. ``cost`` is what the objective makes least:
    ``latency`` the turn, ``throughput`` the time from one micro-batch to the next.
    """

    order: tuple[int, ...]
    counts: tuple[int, ...]
    cost: float
    turn: float
    slowest: float

    def better(self, other: "JudgedRing | None") -> bool:
        """Whether it costs less, or the same with a shorter turn."""
        if other is None or self.cost < other.cost * (1 - SAME):
            return True
        return self.cost <= other.cost * (1 + SAME) and self.turn < other.turn * (1 - SAME)


def judge(task: Task, order: Sequence[int], counts: Sequence[int]) -> JudgedRing | None:
    """A ring that is there, as a search would see it; ``None`` if it can't be."""
    way = _way(task, order)
    lines = lines_of(task, order)
    if way is None or any(not 1 <= n <= one.cap for one, n in zip(lines, counts, strict=True)):
        return None
    return _ring(task, order, lines, counts, way)


def _way(task: Task, order: Sequence[int]) -> tuple[float, float] | None:
    """Seconds of all links of a ring, and of the busiest; ``None`` if one can't be.

    All its peers have to connect to the first one: their requests go there.
    """
    if len(order) == 1:
        return 0.0, 0.0
    hops = task.hops
    last = hops[order[-1]][order[0]]
    if last is None or any(hops[i][order[0]] is None for i in order[1:]):
        return None
    length, busy = last.tokens, last.tokens_busy
    for i, j in pairwise(order):
        hop = hops[i][j]
        if hop is None:
            return None
        length, busy = length + hop.rows, max(busy, hop.rows_busy)
    return length, busy


def lines_of(task: Task, order: Sequence[int]) -> list[Line]:
    first, last = order[0], order[-1]
    return [task.lines[i][(i == first) + 2 * (i == last)] for i in order]


def _ring(
    task: Task,
    order: Sequence[int],
    lines: Sequence[Line],
    counts: Sequence[int],
    way: tuple[float, float],
) -> JudgedRing:
    times = [line.seconds(count) for line, count in zip(lines, counts, strict=True)]
    turn, slowest = way[0] + sum(times), max(times)
    cost = turn
    if task.objective == "throughput":
        cost = max(slowest, way[1], turn / (FLIGHTS * len(order)))
    return JudgedRing(tuple(order), tuple(counts), cost, turn, slowest)


def _split(layers: int, lines: Sequence[Line], ceiling: float = inf) -> list[int] | None:
    """Layers of each stage for the least time of all together, none over ``ceiling`` seconds."""
    counts = [1] * len(lines)
    left = layers - len(lines)
    for i in sorted(range(len(lines)), key=lambda i: (lines[i].each, i)):
        most = lines[i].max_within(ceiling)
        if most < 1 or left < 0:
            return None
        more = min(left, most - 1)
        counts[i] += more
        left -= more
    return counts if left == 0 else None


def fill(task: Task, order: Sequence[int]) -> JudgedRing | None:
    """The best ring of that order."""
    way = _way(task, order)
    lines = lines_of(task, order)
    counts = None if way is None else _split(task.layers, lines)
    if way is None or counts is None:
        return None
    best = _ring(task, order, lines, counts, way)
    if task.objective == "latency":
        return best
    low = max(way[1], best.turn / (FLIGHTS * len(order)), min_slowest(task.layers, lines))
    high = best.cost
    while high - low > SAME * high:
        middle = (low + high) / 2
        counts = _split(task.layers, lines, middle)
        found = counts and _ring(task, order, lines, counts, way)
        if found and found.cost <= middle:
            best, high = found, found.cost
        else:
            low = middle
    return best


def _level(lines: Sequence[Line], counts: list[int]) -> list[int]:
    """The same time of all together, with those who read equally fast taking turns."""
    for i, line in enumerate(lines):
        for j, other in enumerate(lines):
            same = abs(line.each - other.each) <= SAME * line.each
            while (
                same
                and counts[i] > 1
                and counts[j] < other.cap
                and other.seconds(counts[j] + 1) < line.seconds(counts[i]) * (1 - SAME)
            ):
                counts[i], counts[j] = counts[i] - 1, counts[j] + 1
    return counts


def even(task: Task, ring: JudgedRing, slack: float) -> JudgedRing:
    """The most even split of the same ring that costs hardly more."""
    way, lines = _way(task, ring.order), lines_of(task, ring.order)
    assert way is not None
    best, low = ring, min_slowest(task.layers, lines)
    ceiling = low
    while best.slowest - low > SAME * low:
        counts = _split(task.layers, lines, ceiling)
        found = counts and _ring(task, ring.order, lines, _level(lines, counts), way)
        if found and found.cost <= ring.cost * (1 + slack):
            best = found
        else:
            low = ceiling
        ceiling = (low + best.slowest) / 2
    return best


def _slowest(layers: int, lines: Sequence[Line]) -> float:
    """About the least time of the slowest stage: as if layers could be cut."""
    free, left, time = list(lines), float(layers), 0.0
    while free:
        paces = [(line.fixed, 1 / max(line.each, 1e-12), line.cap) for line in free]
        time = (left + sum(fixed * pace for fixed, pace, _ in paces)) / sum(p for _, p, _ in paces)
        full = [line for line in free if line.seconds(line.cap) < time]
        if not full:
            break
        left -= sum(line.cap for line in full)
        free = [line for line in free if line not in full]
    return time + max(line.each for line in lines)


def quick(task: Task, order: Sequence[int]) -> float | None:
    """About the cost of the best ring of that order: the split with the least slowest stage is
    taken where another one may be a little better."""
    way, lines = _way(task, order), lines_of(task, order)
    if way is None or min(line.cap for line in lines) < 1:
        return None
    if sum(line.cap for line in lines) < task.layers:
        return None
    ceiling = inf if task.objective == "latency" else _slowest(task.layers, lines)
    counts = _split(task.layers, lines, ceiling) or _split(task.layers, lines)
    return _ring(task, order, lines, counts, way).cost if counts else None
