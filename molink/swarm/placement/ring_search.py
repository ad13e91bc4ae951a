"""Finds the best ring for a model: its peers, their order, and the layers of each.

All layers weigh the same. So a set of peers with a given opener and closer poses two independent
problems: the path through the others (shortest path, Held and Karp), and the split of the layers
(the fastest readers take as many as fit). Up to :data:`MAX_EXACT_PEERS` peers all sets, openers and
closers are tried, which is optimal. For more see :mod:`molink.swarm.placement.ring_growth`.
"""

from collections.abc import Iterator, Sequence
from math import inf

from molink.facts.model import Objective
from molink.swarm.placement.ring_growth import RingGrowth
from molink.swarm.placement.rings import (
    MICRO_BATCHES_PER_STAGE,
    TOLERANCE,
    RatedRing,
    RingTask,
    even_ring,
    fill_ring,
)

#: Most peers for which the result is optimal.
MAX_EXACT_PEERS = 8
#: A round trip may take this fraction longer for more even stages: they leave more room for KV, and
#: several streams run faster.
SLACK = 0.02


def search_ring(task: RingTask, min_stages: int = 1, slack: float = SLACK) -> RatedRing | None:
    """The best ring of at least ``min_stages`` stages, or of as many as possible.

    ``slack``: see :data:`EVENNESS_SLACK`. ``None``: the peers cannot hold the model or form a ring.
    """
    able = [i for i, one in enumerate(task.hosts) if one.max_layers() >= 1]
    if len(able) <= MAX_EXACT_PEERS:
        found = _choose_ring(_exact_rings(task, able), min_stages)
    else:
        found = RingGrowth(task, able, min_stages).find_best(_starts(task, able, min_stages))
    return found and even_ring(task, found, slack)


def _choose_ring(rings: dict[int, RatedRing], min_stages: int) -> RatedRing | None:
    """The best ring of at least that many stages, or of the most there are."""
    enough = [count for count in rings if count >= min_stages] or sorted(rings)[-1:]
    best: RatedRing | None = None
    for count in sorted(enough):
        if rings[count].is_better(best):
            best = rings[count]
    return best


#: A path from the opener: its seconds, its busiest link, and its hosts.
_Path = tuple[float, float, tuple[int, ...]]


def _exact_rings(task: RingTask, able: Sequence[int]) -> dict[int, RatedRing]:
    """The best ring of each size."""
    best: dict[int, RatedRing] = {}
    by_speed = sorted(able, key=lambda i: (task.linear_times[i][0].per_layer, i))
    for order_of in _paths(task, able):
        ring = _best_ring(task, order_of, by_speed, best.get(len(order_of[2])))
        if ring is not None:
            best[len(ring.order)] = ring
    return best


def _paths(task: RingTask, able: Sequence[int]) -> Iterator[_Path]:
    """Shortest path of each set, opener and closer; where links can be the bottleneck, also longer
    paths over faster links. Earlier joined peers come first."""
    size = min(task.max_stages, task.layers, len(able))
    for opener in able:
        fronts: dict[tuple[int, int], list[_Path]] = {
            (1 << opener, opener): [(0.0, 0.0, (opener,))]
        }
        yield 0.0, 0.0, (opener,)
        others = [i for i in able if i != opener and task.hops[i][opener] is not None]
        for _ in range(size - 1):
            longer: dict[tuple[int, int], list[_Path]] = {}
            for (members, at), ways in fronts.items():
                for to in others:
                    hop = task.hops[at][to]
                    if members >> to & 1 or hop is None:
                        continue
                    front = longer.setdefault((members | 1 << to, to), [])
                    for length, busy, order in ways:
                        further = (length + hop.rows, max(busy, hop.rows_busy), (*order, to))
                        _add_path(front, further, task.objective)
            fronts = longer
            for (_, closer), ways in fronts.items():
                back = task.hops[closer][opener]
                assert back is not None
                for length, busy, order in ways:
                    yield length + back.tokens, max(busy, back.tokens_busy), order


def _add_path(front: list[_Path], way: _Path, objective: Objective) -> None:
    """Keep paths that are not dominated in length and, if it counts, in busiest link."""
    both = objective == "throughput"
    length, busy, _ = way
    for one in front:
        if one[0] <= length * (1 + TOLERANCE) and (not both or one[1] <= busy * (1 + TOLERANCE)):
            return
    front[:] = [one for one in front if one[0] < length or (both and one[1] < busy)]
    front.append(way)


def _best_ring(
    task: RingTask,
    way: _Path,
    by_speed: Sequence[int],
    best: RatedRing | None,
) -> RatedRing | None:
    """The best ring of that path if it beats ``best``; a quick sum dismisses most."""
    length, busy, order = way
    total = _total_time(task, order, by_speed, inf)
    if total is None:
        return None
    if best is not None:
        round_trip_time = length + total
        if task.objective == "latency":
            if round_trip_time >= best.round_trip_time * (1 - TOLERANCE):
                return None
        else:
            bound = best.cost * (1 + TOLERANCE)
            flights = MICRO_BATCHES_PER_STAGE * len(order)
            if busy > bound or round_trip_time > bound * flights:
                return None
            total = _total_time(task, order, by_speed, bound)
            if total is None or length + total > bound * flights:
                return None
    ring = fill_ring(task, order)
    return ring if ring is not None and ring.is_better(best) else None


def _total_time(
    task: RingTask,
    order: Sequence[int],
    by_speed: Sequence[int],
    ceiling: float,
) -> float | None:
    """Seconds of all stages in the best split; ``None``: no room."""
    first, last, left, total = order[0], order[-1], task.layers - len(order), 0.0
    for i in by_speed:
        if i not in order:
            continue
        line = task.linear_times[i][(i == first) + 2 * (i == last)]
        most = line.max_layers if ceiling == inf else line.max_within(ceiling)
        if most < 1:
            return None
        more = min(left, most - 1)
        left -= more
        total += line.time_of(1 + more)
    return total if left == 0 else None


# --- many peers: where a ring begins to grow -----------------------------------------------------


def _starts(task: RingTask, able: Sequence[int], min_stages: int) -> Iterator[tuple[int, ...]]:
    """Starts for the local search: the best rings of the fastest and of the largest peers, or all
    of these in a row if their rings lack room."""
    hosts, size = task.hosts, min(MAX_EXACT_PEERS, task.max_stages, task.layers)

    def by_speed(i: int) -> tuple[float, int]:
        return hosts[i].step_time(1), i

    def room(i: int) -> tuple[float, int]:
        return -min(hosts[i].max_layers(), task.layers), i

    fastest, largest = (sorted(sorted(able, key=key)[:size]) for key in (by_speed, room))
    for some in (fastest,) if fastest == largest else (fastest, largest):
        ring = _choose_ring(_exact_rings(task, some), min_stages)
        yield ring.order if ring is not None else tuple(some)
