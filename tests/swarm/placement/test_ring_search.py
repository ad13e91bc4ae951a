"""Compares the search with all rings, enumerated by other code."""

import itertools
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.swarm.placement import ring_search
from molink.swarm.placement.partition import StageCosts, StageHost
from molink.swarm.placement.ring_search import MAX_EXACT_PEERS, search_ring
from molink.swarm.placement.rings import (
    MICRO_BATCHES_PER_STAGE,
    LinkTimes,
    RingCandidate,
    RingTask,
    evaluate_ring,
)

GB = 10**9


def all_splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]


def exhaustive(task: RingTask) -> dict[int, tuple[float, float]]:
    """Minimum cost by number of stages, and the shortest round trip at that cost."""
    best: dict[int, tuple[float, float]] = {}
    n = len(task.hosts)
    splits = {m: all_splits(task.layers, m) for m in range(1, min(n, task.max_stages) + 1)}
    for m in splits:
        for order in itertools.permutations(range(n), m):
            for counts in splits[m]:
                found = cost_of(task, order, counts)
                if found is not None:
                    best[m] = min(best.get(m, found), found)
    return best


def cost_of(
    task: RingTask, order: tuple[int, ...], counts: tuple[int, ...]
) -> tuple[float, float] | None:
    steps, links, busy = [], [], [0.0]
    m = len(order)
    for at, (i, count) in enumerate(zip(order, counts, strict=True)):
        host, opens, closes = task.hosts[i], at == 0, at == m - 1
        if host.costs.memory_needed(count, opens=opens, closes=closes) > host.memory:
            return None
        if opens and count < host.costs.first_layers:
            return None
        read = host.costs.step_time(count, host.rate, closes=closes)
        steps.append(host.step_overhead + read)
        to_head = task.link_times[i][order[0]]
        if at and to_head is None:
            return None
        if m > 1:
            link = task.link_times[i][order[(at + 1) % m]]
            if link is None:
                return None
            links.append(link.tokens if closes else link.rows)
            busy.append(link.tokens_busy if closes else link.rows_busy)
    turn = sum(steps) + sum(links)
    if task.objective == "latency":
        asked = task.ask_times[order[0]] if task.ask_times else 0.0
        return turn + asked + task.prompt_rows * max(busy), turn
    return max(*steps, *busy, turn / (MICRO_BATCHES_PER_STAGE * m)), turn


def make_link(latency: float, busy: float) -> LinkTimes:
    return LinkTimes(latency + busy, busy, latency + busy / 8, busy / 8)


@st.composite
def tasks(draw: st.DrawFn) -> RingTask:
    n = draw(st.integers(1, 4))
    costs = StageCosts(
        layer_weights=draw(st.integers(1, 6)),
        layer_room=draw(st.integers(0, 2)),
        first=draw(st.integers(0, 8)),
        last=draw(st.integers(0, 8)),
        stage=draw(st.integers(0, 2)),
        first_layers=draw(st.integers(1, 3)),
    )
    memory, rate = st.integers(0, 50), st.sampled_from([1.0, 2.0, 3.5, 8.0])
    step = st.sampled_from([0.0, 0.5, 3.0])
    hosts = [StageHost(f"p{i}", draw(memory), draw(rate), costs, draw(step)) for i in range(n)]
    link = st.one_of(
        st.none(),
        st.builds(
            make_link, st.sampled_from([0.0, 0.3, 1.0, 4.0]), st.sampled_from([0.0, 0.2, 2.0, 9.0])
        ),
        st.builds(
            make_link, st.sampled_from([0.0, 0.3, 1.0, 4.0]), st.sampled_from([0.0, 0.2, 2.0, 9.0])
        ),
    )
    link_times = [[draw(link) if i != j else None for j in range(n)] for i in range(n)]
    objective = draw(st.sampled_from(["latency", "throughput"]))
    return RingTask(
        draw(st.integers(1, 7)),
        hosts,
        link_times,
        objective,
        max_stages=draw(st.integers(1, 4)),
        ask_times=draw(st.lists(st.sampled_from([0.0, 0.4, 3.0]), min_size=n, max_size=n)),
        prompt_rows=draw(st.sampled_from([0.0, 2.0])),
    )


@given(tasks(), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_ring_is_optimal(task: RingTask, least: int) -> None:
    everything = exhaustive(task)
    found = search_ring(task, least, slack=0.0)
    if not everything:
        assert found is None
        return
    enough = [m for m in everything if m >= least] or [max(everything)]
    assert found is not None
    cost, _ = cost_of(task, found.order, found.counts)
    assert cost == pytest.approx(min(everything[m][0] for m in enough), rel=1e-6)
    assert found.cost == pytest.approx(cost)
    assert len(found.order) in enough
    again = evaluate_ring(task, found.order, found.counts)
    assert again is not None
    assert again.cost == pytest.approx(cost)
    even = search_ring(task, least)
    assert even.cost <= 1.0201 * cost
    assert even.slowest_time <= found.slowest_time * (1 + 1e-6)


def swarm(seed: int, n: int, layers: int, objective: str = "latency") -> RingTask:
    """Typical PCs: 8 to 48 GB, 0.2 to 1 TB/s, in homes 1 to 60 ms apart."""
    rng = Random(seed)
    gigabytes = rng.uniform(12, 40) / layers  # more than most PCs hold
    costs = StageCosts(int(gigabytes * GB), GB // layers, GB // 2, GB, stage=GB // 2)
    hosts = [
        StageHost(
            f"p{i}",
            int(rng.choice((8, 12, 16, 24, 48)) * GB),
            rng.uniform(200, 1000) * 1e9,
            costs,
            rng.uniform(0.0002, 0.002),
        )
        for i in range(n)
    ]
    homes = [rng.randrange(max(2, n // 2)) for _ in range(n)]

    def link(i: int, j: int) -> LinkTimes | None:
        if rng.random() < 0.08:
            return None
        far = homes[i] != homes[j]
        latency = rng.uniform(0.005, 0.06) if far else rng.uniform(0.0002, 0.002)
        rate = rng.uniform(1, 12) * 1e6 if far else 110e6
        rows = 1 if objective == "latency" else 16
        return LinkTimes(
            latency + rows * 16384 / rate,
            rows * 16384 / rate,
            latency + rows * 64 / rate,
            rows * 64 / rate,
        )

    link_times = [[link(i, j) if i != j else None for j in range(n)] for i in range(n)]
    return RingTask(layers, hosts, link_times, objective)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_rings_of_twenty_unequal_swarms(objective: str) -> None:
    rings = 0
    for seed in range(20):
        task = swarm(seed, 5, 8, objective)
        everything = exhaustive(task)
        exact, placed = search_ring(task, slack=0.0), search_ring(task)
        assert (exact is None) == (placed is None) == (not everything)
        if placed is not None:
            best = min(cost for cost, _ in everything.values())
            assert exact.cost == pytest.approx(best, rel=1e-6)
            assert placed.cost <= 1.02 * best * (1 + 1e-9)
            rings += len(placed.order) > 1
    assert rings >= 10


def test_ring_growth_is_nearly_optimal() -> None:
    worse = []
    for seed in range(6):
        task = swarm(seed, MAX_EXACT_PEERS + 1, 40)
        found = search_ring(task, slack=0.0)
        best = least_of_all(task)
        assert (found is None) == (best is None)
        if found is not None:
            worse.append(found.cost / best - 1)
    assert len(worse) >= 4
    assert max(worse) <= 0.02
    assert min(worse) >= -1e-9


def least_of_all(task: RingTask) -> float | None:
    """The best ring among too many peers for an exact search: omit one after another."""
    n = len(task.hosts)
    found: list[RingCandidate] = []
    for out in range(n):
        kept = [i for i in range(n) if i != out]
        link_times = [[task.link_times[i][j] for j in kept] for i in kept]
        part = RingTask(task.layers, [task.hosts[i] for i in kept], link_times, task.objective)
        ring = search_ring(part, slack=0.0)
        if ring is not None:
            found.append(ring)
    return min((ring.cost for ring in found), default=None)


def test_large_swarm_is_placed_at_one_place() -> None:
    """The fastest and largest PCs are far apart; a ring of near ones is better."""
    costs = StageCosts(GB, 0, GB // 2, GB // 2)
    rng = Random(5)
    places = [i % 12 for i in range(120)]
    hosts = [
        StageHost(f"p{i}", rng.choice((8, 12, 16, 24)) * GB, rng.choice((3, 5, 9)) * 1e11, costs)
        for i in range(len(places))
    ]
    link_times = [
        [make_link(0.001 if one == other else 0.04, 0.0) for other in places] for one in places
    ]
    found = search_ring(RingTask(40, hosts, link_times), slack=0.0)
    assert found is not None
    assert len({places[i] for i in found.order}) == 1
    best = inf
    for place in set(places):
        kept = [i for i, one in enumerate(places) if one == place]
        near = [[link_times[i][j] for j in kept] for i in kept]
        ring = search_ring(RingTask(40, [hosts[i] for i in kept], near), slack=0.0)
        best = min(best, inf if ring is None else ring.cost)
    assert found.cost <= 1.02 * best


def test_ring_opens_near_those_who_ask() -> None:
    task = replace(line_of(3, memory=7 * GB), ask_times=(0.1, 0.1, 0.0))
    ring = search_ring(task)
    assert ring is not None
    assert ring.order[0] == 2
    assert ring.cost == ring.round_trip_time
    # Requests' way to the first stage counts neither in the time per token nor in the interval
    # between micro-batches.
    far = search_ring(replace(task, ask_times=(0.1, 0.1, 0.1)))
    assert far is not None
    assert far.cost == pytest.approx(far.round_trip_time + 0.1)
    many = search_ring(replace(task, ask_times=(9.0, 9.0, 9.0), objective="throughput"))
    assert many is not None
    assert many.cost < 9


def line_of(n: int, latency: float = 0.001, memory: int = 100 * GB) -> RingTask:
    costs = StageCosts(GB, 0, 0, 0)
    hosts = [StageHost(f"p{i}", memory, 1e12, costs) for i in range(n)]
    link_times = [[make_link(latency, 0.0) if i != j else None for j in range(n)] for i in range(n)]
    return RingTask(12, hosts, link_times)


def test_extra_stage_costs_a_link() -> None:
    assert search_ring(line_of(3)).order == (0,)
    assert search_ring(line_of(3, memory=7 * GB)).order == (0, 1)


def test_minimum_stages_are_used_if_possible() -> None:
    assert search_ring(line_of(4), 3).order == (0, 1, 2)
    assert search_ring(line_of(4), 3).counts == (4, 4, 4)
    assert search_ring(line_of(3), 9).order == (0, 1, 2)
    assert search_ring(line_of(20, memory=GB), 20).order == tuple(range(12))


def test_one_sufficient_peer_beats_many() -> None:
    assert len(search_ring(line_of(30)).order) == 1
    assert len(search_ring(line_of(30), 11).order) == 11


def test_ring_uses_the_direction_that_connects() -> None:
    task = line_of(3)
    closed = [list(row) for row in task.link_times]
    closed[1][2] = None
    ring = search_ring(RingTask(12, task.hosts, closed), 3)
    assert ring.order == (0, 2, 1)
    # All peers must connect to the first stage.
    closed[2][0] = None
    ring = search_ring(RingTask(12, task.hosts, closed), 3)
    assert ring is not None
    assert ring.order[0] != 0


def test_search_over_equal_peers_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the fastest peers are also the largest."""
    asked: list[list[int]] = []
    exact = ring_search._exact_rings

    def counted(task: RingTask, able: list[int]) -> dict[int, RingCandidate]:
        asked.append(able)
        return exact(task, able)

    monkeypatch.setattr(ring_search, "_exact_rings", counted)
    n = MAX_EXACT_PEERS + 4
    costs = StageCosts(layer_weights=1, layer_room=0, first=0, last=0, stage=0)
    hosts = [StageHost(f"p{i}", 2, 1.0, costs, 0.0) for i in range(n)]
    link_times = [[None if i == j else make_link(0.1, 0.1) for j in range(n)] for i in range(n)]
    found = search_ring(RingTask(8, hosts, link_times, "latency", 16))
    assert found is not None
    assert asked == [list(range(MAX_EXACT_PEERS))]
