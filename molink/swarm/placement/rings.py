"""A ring: hosts in order, the layers of each, and the predicted cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Protocol

from molink.facts.model import Objective
from molink.swarm.placement.partition import LinearTime, StageHost, min_slowest_time, split_layers

#: Maximum micro-batches in flight per stage; the scheduler uses up to twice the stages.
MICRO_BATCHES_PER_STAGE = 2
#: Fraction below which costs count as equal.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """A link between two hosts, in seconds.

    ``rows`` is the time until a micro-batch's rows have arrived, ``rows_busy`` the part that
    occupies the link. ``tokens`` and ``tokens_busy`` are the same for the ring's last link, which
    carries only sampled tokens.
    """

    rows: float
    rows_busy: float
    tokens: float
    tokens_busy: float


class LinkTimeRow(Protocol):
    """The links from one host, by target host; ``None`` means that it cannot connect."""

    def __getitem__(self, index: int, /) -> LinkTimes | None: ...


#: ``link_times[i][j]`` leads from ``i`` to ``j``.
LinkTimeTable = Sequence[LinkTimeRow]


@dataclass(frozen=True)
class RingTask:
    """``layers`` to split among at most ``max_stages`` of ``hosts``.

    For ``latency``, two costs before the first token are spread over an answer's tokens: a request
    takes ``ask_times[i]`` seconds per token to reach the opening host ``i``, and ``prompt_rows``
    prompt rows per token pass all links.
    """

    layers: int
    hosts: Sequence[StageHost]
    link_times: LinkTimeTable
    objective: Objective = "latency"
    max_stages: int = 16
    ask_times: Sequence[float] = ()
    prompt_rows: float = 0.0

    def start_time(self, opener: int, busy: float) -> float:
        """Return the seconds before an answer's first token, beyond a round trip, per token.

        Requests go to ``opener``; the busiest link takes ``busy`` seconds for a row.
        """
        if self.objective != "latency":
            return 0.0
        return (self.ask_times[opener] if self.ask_times else 0.0) + self.prompt_rows * busy

    @cached_property
    def linear_times(self) -> Sequence[Sequence[LinearTime]]:
        """Step times of each host's stage: in the middle, opening the ring, closing it, or both."""
        ends = (False, True)
        return [
            [one.linear_time(opens=opens, closes=closes) for closes in ends for opens in ends]
            for one in self.hosts
        ]

    @cached_property
    def has_bends(self) -> bool:
        """Whether experts of some stage may lie in host memory."""
        return any(line.bend < line.max_layers for lines in self.linear_times for line in lines)


@dataclass(frozen=True, slots=True)
class RingCandidate:
    """Indices of hosts in ring order, and the layers of each.

    ``round_trip_time`` and ``slowest_time`` (of a stage) are in seconds. ``cost`` is minimized: the
    round trip and a token's share of the start for ``latency``, the interval between micro-batches
    for ``throughput``.
    """

    order: tuple[int, ...]
    counts: tuple[int, ...]
    cost: float
    round_trip_time: float
    slowest_time: float

    def is_better(self, other: "RingCandidate | None") -> bool:
        """Whether the ring costs less, or the same with a shorter round trip."""
        if other is None or self.cost < other.cost * (1 - TOLERANCE):
            return True
        return self.cost <= other.cost * (
            1 + TOLERANCE
        ) and self.round_trip_time < other.round_trip_time * (1 - TOLERANCE)


def evaluate_ring(
    task: RingTask, order: Sequence[int], counts: Sequence[int]
) -> RingCandidate | None:
    """Evaluate an existing ring; ``None`` if it is impossible."""
    way = _path_time(task, order)
    lines = linear_times(task, order)
    if way is None or any(
        not one.min_layers <= n <= one.max_layers for one, n in zip(lines, counts, strict=True)
    ):
        return None
    return _build_ring(task, order, lines, counts, way)


def _path_time(task: RingTask, order: Sequence[int]) -> tuple[float, float] | None:
    """Return the seconds of all links, and of the busiest one; ``None`` if a link is impossible.

    All hosts must be able to connect to the first one, which receives their requests.
    """
    if len(order) == 1:
        return 0.0, 0.0
    link_times = task.link_times
    last = link_times[order[-1]][order[0]]
    if last is None or any(link_times[i][order[0]] is None for i in order[1:]):
        return None
    length, busy = last.tokens, last.tokens_busy
    for i, j in pairwise(order):
        link = link_times[i][j]
        if link is None:
            return None
        length, busy = length + link.rows, max(busy, link.rows_busy)
    return length, busy


def linear_times(task: RingTask, order: Sequence[int]) -> list[LinearTime]:
    first, last = order[0], order[-1]
    return [task.linear_times[i][(i == first) + 2 * (i == last)] for i in order]


def _build_ring(
    task: RingTask,
    order: Sequence[int],
    lines: Sequence[LinearTime],
    counts: Sequence[int],
    way: tuple[float, float],
) -> RingCandidate:
    times = [line.time_of(count) for line, count in zip(lines, counts, strict=True)]
    round_trip_time, slowest = way[0] + sum(times), max(times)
    cost = round_trip_time + task.start_time(order[0], way[1])
    if task.objective == "throughput":
        cost = max(slowest, way[1], round_trip_time / (MICRO_BATCHES_PER_STAGE * len(order)))
    return RingCandidate(tuple(order), tuple(counts), cost, round_trip_time, slowest)


def fill_ring(task: RingTask, order: Sequence[int]) -> RingCandidate | None:
    """Compute the best ring of a given order."""
    way = _path_time(task, order)
    lines = linear_times(task, order)
    counts = None if way is None else split_layers(task.layers, lines)
    if way is None or counts is None:
        return None
    best = _build_ring(task, order, lines, counts, way)
    if task.objective == "latency":
        return best
    low = max(
        way[1],
        best.round_trip_time / (MICRO_BATCHES_PER_STAGE * len(order)),
        min_slowest_time(task.layers, lines),
    )
    high = best.cost
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        counts = split_layers(task.layers, lines, middle)
        found = counts and _build_ring(task, order, lines, counts, way)
        if found and found.cost <= middle:
            best, high = found, found.cost
        else:
            low = middle
    return best


def _level_counts(lines: Sequence[LinearTime], counts: list[int]) -> list[int]:
    """Balance the layers of equally fast stages, at the same total time."""
    for i, line in enumerate(lines):
        for j, other in enumerate(lines):
            while (
                counts[i] > line.min_layers
                and counts[j] < other.max_layers
                and _is_equal(line.layer_s(counts[i]), other.layer_s(counts[j] + 1))
                and other.time_of(counts[j] + 1) < line.time_of(counts[i]) * (1 - TOLERANCE)
            ):
                counts[i], counts[j] = counts[i] - 1, counts[j] + 1
    return counts


def _is_equal(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * one


def even_ring(task: RingTask, ring: RingCandidate, slack: float) -> RingCandidate:
    """Return the most even split of the same ring within the share ``slack`` of its cost."""
    way, lines = _path_time(task, ring.order), linear_times(task, ring.order)
    assert way is not None
    best, low = ring, min_slowest_time(task.layers, lines)
    ceiling = low
    while best.slowest_time - low > TOLERANCE * low:
        counts = split_layers(task.layers, lines, ceiling)
        found = counts and _build_ring(task, ring.order, lines, _level_counts(lines, counts), way)
        if found and found.cost <= ring.cost * (1 + slack):
            best = found
        else:
            low = ceiling
        ceiling = (low + best.slowest_time) / 2
    return best


def _slowest_bound(layers: int, lines: Sequence[LinearTime]) -> float:
    """Approximate the minimum time of the slowest stage, as if layers were divisible."""
    free, left, time = list(lines), float(layers), 0.0
    while free:
        rates = [(line.fixed, 1 / max(line.per_layer, 1e-12), line.max_layers) for line in free]
        time = (left + sum(fixed * rate for fixed, rate, _ in rates)) / sum(p for _, p, _ in rates)
        full = [line for line in free if line.time_of(line.max_layers) < time]
        if not full:
            break
        left -= sum(line.max_layers for line in full)
        free = [line for line in free if line not in full]
    return time + max(line.per_layer for line in lines)


def estimate_cost(task: RingTask, order: Sequence[int]) -> float | None:
    """Approximate the cost of the best ring of a given order, with a minimal slowest stage."""
    way, lines = _path_time(task, order), linear_times(task, order)
    if way is None or any(line.max_layers < line.min_layers for line in lines):
        return None
    if sum(line.max_layers for line in lines) < task.layers:
        return None
    ceiling = inf if task.objective == "latency" else _slowest_bound(task.layers, lines)
    counts = split_layers(task.layers, lines, ceiling) or split_layers(task.layers, lines)
    return _build_ring(task, order, lines, counts, way).cost if counts else None
