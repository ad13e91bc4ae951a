"""Finds the ring of a model: which peers, in which order, and how many layers each of them takes.

All layers weigh the same. So a set of peers, with one that opens the ring and one that closes it,
has two questions that don't touch: the way through the others (a shortest path, Held and Karp), and
the split of the layers (whoever reads fastest takes as many as fit). Up to :data:`EXACT` peers all
sets, openers and closers are tried: no ring is better. Among more see
:mod:`molink.swarm.placement.ring_growth`.
"""

from collections.abc import Iterator, Sequence
from math import inf

from molink.facts.model import Objective
from molink.swarm.placement.ring_growth import Growth
from molink.swarm.placement.rings import FLIGHTS, SAME, JudgedRing, Task, even, fill

#: Most peers of which the best ring is found for certain.
EXACT = 8
#: A placement may take this part longer for stages that are more even: they leave more room for KV,
#: and several streams go faster.
SLACK = 0.02


def search(task: Task, least: int = 1, slack: float = SLACK) -> JudgedRing | None:
    """The best ring of ``least`` stages or more; of as many as can be, if there is none.

    ``slack`` is the part of a turn that evener stages may cost (see :data:`SLACK`). ``None``: the
    peers can't hold the model, or can't be put in a ring.
    """
    able = [i for i, one in enumerate(task.runners) if one.capacity() >= 1]
    if len(able) <= EXACT:
        found = _choose(_exact(task, able), least)
    else:
        found = Growth(task, able, least).best(_starts(task, able, least))
    return found and even(task, found, slack)


def _choose(rings: dict[int, JudgedRing], least: int) -> JudgedRing | None:
    """The best of at least so many stages, or of the most that there are."""
    enough = [count for count in rings if count >= least] or sorted(rings)[-1:]
    best: JudgedRing | None = None
    for count in sorted(enough):
        if rings[count].better(best):
            best = rings[count]
    return best


#: A way from the opener through some peers: its seconds, its busiest link, and itself.
_Way = tuple[float, float, tuple[int, ...]]


def _exact(task: Task, able: Sequence[int]) -> dict[int, JudgedRing]:
    """The best ring of each number of stages."""
    best: dict[int, JudgedRing] = {}
    pace = sorted(able, key=lambda i: (task.lines[i][0].each, i))
    for order_of in _ways(task, able):
        ring = _best_of(task, order_of, pace, best.get(len(order_of[2])))
        if ring is not None:
            best[len(ring.order)] = ring
    return best


def _ways(task: Task, able: Sequence[int]) -> Iterator[_Way]:
    """For each set, opener and closer the shortest way; where links can be the bottleneck, also
    longer ones over quicker links. First those who joined first.
    """
    size = min(task.most, task.layers, len(able))
    for opener in able:
        fronts: dict[tuple[int, int], list[_Way]] = {(1 << opener, opener): [(0.0, 0.0, (opener,))]}
        yield 0.0, 0.0, (opener,)
        others = [i for i in able if i != opener and task.hops[i][opener] is not None]
        for _ in range(size - 1):
            longer: dict[tuple[int, int], list[_Way]] = {}
            for (members, at), ways in fronts.items():
                for to in others:
                    hop = task.hops[at][to]
                    if members >> to & 1 or hop is None:
                        continue
                    front = longer.setdefault((members | 1 << to, to), [])
                    for length, busy, order in ways:
                        further = (length + hop.rows, max(busy, hop.rows_busy), (*order, to))
                        _add(front, further, task.objective)
            fronts = longer
            for (_, closer), ways in fronts.items():
                back = task.hops[closer][opener]
                assert back is not None
                for length, busy, order in ways:
                    yield length + back.tokens, max(busy, back.tokens_busy), order


def _add(front: list[_Way], way: _Way, objective: Objective) -> None:
    """Keep the ways that none before beats in length and, where that counts, in busiest link."""
    both = objective == "throughput"
    length, busy, _ = way
    for one in front:
        if one[0] <= length * (1 + SAME) and (not both or one[1] <= busy * (1 + SAME)):
            return
    front[:] = [one for one in front if one[0] < length or (both and one[1] < busy)]
    front.append(way)


def _best_of(
    task: Task,
    way: _Way,
    pace: Sequence[int],
    best: JudgedRing | None,
) -> JudgedRing | None:
    """The best ring of that way if it is better than ``best``: most are dismissed by a sum."""
    length, busy, order = way
    total = _total(task, order, pace, inf)
    if total is None:
        return None
    if best is not None:
        turn = length + total
        if task.objective == "latency":
            if turn >= best.turn * (1 - SAME):
                return None
        else:
            bound = best.cost * (1 + SAME)
            flights = FLIGHTS * len(order)
            if busy > bound or turn > bound * flights:
                return None
            total = _total(task, order, pace, bound)
            if total is None or length + total > bound * flights:
                return None
    ring = fill(task, order)
    return ring if ring is not None and ring.better(best) else None


def _total(
    task: Task,
    order: Sequence[int],
    pace: Sequence[int],
    ceiling: float,
) -> float | None:
    """Seconds of all stages together, as the best split has them; ``None``: no room."""
    first, last, left, total = order[0], order[-1], task.layers - len(order), 0.0
    for i in pace:
        if i not in order:
            continue
        line = task.lines[i][(i == first) + 2 * (i == last)]
        most = line.cap if ceiling == inf else line.max_within(ceiling)
        if most < 1:
            return None
        more = min(left, most - 1)
        left -= more
        total += line.seconds(1 + more)
    return total if left == 0 else None


# --- many peers: where a ring begins to grow -----------------------------------------------------


def _starts(task: Task, able: Sequence[int], least: int) -> Iterator[tuple[int, ...]]:
    """The best rings of those who read fastest, and of those with most room; all of these in a row
    where no ring of theirs has room."""
    runners, size = task.runners, min(EXACT, task.most, task.layers)

    def pace(i: int) -> tuple[float, int]:
        return runners[i].seconds(1), i

    def room(i: int) -> tuple[float, int]:
        return -min(runners[i].capacity(), task.layers), i

    by_pace, by_room = (sorted(sorted(able, key=key)[:size]) for key in (pace, room))
    for some in (by_pace,) if by_pace == by_room else (by_pace, by_room):
        ring = _choose(_exact(task, some), least)
        yield ring.order if ring is not None else tuple(some)
