"""molink's placement and an exhaustive search, which is compared with plain enumeration."""

from collections import Counter
from itertools import pairwise, permutations

import pytest

from molink.swarm.placement.partition import StageCosts, StageHost
from tools.placement.__main__ import compare_placements, count_visits, ring_order
from tools.placement.exhaustive import ExhaustiveSearch, RingCosts
from tools.placement.swarm import Swarm, read_swarms
from tools.placement.world import World, allocate_pipelines, simulate_pipelines

SWARMS = list(read_swarms())


@pytest.mark.parametrize("swarm", SWARMS, ids=lambda swarm: swarm.name)
def test_placement_is_within_two_percent_of_the_best(swarm: Swarm) -> None:
    found = compare_placements(swarm)
    assert 1 - 1e-9 <= found.known / found.best <= 1.02
    # A serving ring is replaced only by one that is a tenth better.
    assert found.settled / found.best <= 1.1
    assert found.settled <= found.first * (1 + 1e-9)
    places = {swarm.places[index] for index in ring_order(swarm, found.placed)}
    assert count_visits(swarm, found.placed) == len(places)


def test_there_are_twelve_swarms() -> None:
    assert len({swarm.name for swarm in SWARMS}) == 12


def test_pairs_of_the_world_connect_by_their_nats() -> None:
    world = World.read_file()
    counts, share = Counter(world.ways.values()), world.description["share"]
    behind = (1 - share["accepts"]) ** 2
    assert counts.total() == 1000 * 999 / 2
    assert counts["direct"] / counts.total() == pytest.approx(1 - behind, abs=0.05)
    expected = share["punched"] * share["punches"] ** 2
    assert counts["punched"] / counts.total() == pytest.approx(expected, abs=0.05)
    relayed = next(pair for pair, way in world.ways.items() if way == "relayed")
    there, back = world.latency(*relayed), world.latency(*relayed[::-1])
    one, other = (world.regions[index] for index in relayed)
    assert there == back > world.round_trips[one, other] / 2


def test_world_of_forty_pcs_is_placed_and_simulated() -> None:
    world = World({**World.read_file().description, "peers": 40})
    rings, _, _ = allocate_pipelines(world, world.measure_links(), 2)
    assert len(rings) == 2
    report = simulate_pipelines(world, rings).report
    assert report.completed > 0
    slowest = max(ring.round_trip_time for ring in rings)
    assert report.tpot_s.p50 == pytest.approx(slowest, rel=0.3)


def test_exhaustive_search_finds_the_best_of_all_rings() -> None:
    layers = 5
    costs = StageCosts(layer_weights=3, layer_room=1, first=2, last=4, stage=1)
    hosts = [
        StageHost(f"p{i}", memory, rate, costs, 0.5)
        for i, (memory, rate) in enumerate([(14, 2.0), (12, 3.5), (19, 1.0), (2, 9.0)])
    ]
    rows = [[(3 * i + 5 * j) % 7 / 4 for j in range(4)] for i in range(4)]
    tokens, prompts = ([[row / by for row in line] for line in rows] for by in (2, 3))
    ring = RingCosts(rows, tokens, prompts, (0.1, 0.2, 0.0, 0.0))

    def took(order: tuple[int, ...], cuts: tuple[int, ...]) -> float:
        counts = [b - a for a, b in pairwise((0, *cuts, layers))]
        total = ring.path_s(order)
        for at, (i, count) in enumerate(zip(order, counts, strict=True)):
            opens, closes = at == 0, at == len(order) - 1
            if count > hosts[i].max_layers(opens=opens, closes=closes):
                return float("inf")
            total += hosts[i].step_time(count, opens=opens, closes=closes)
        return total

    everything = {
        (order, cuts): took(order, cuts)
        for size in range(1, 4)
        for order in permutations(range(4), size)
        for cuts in permutations(range(1, layers), size - 1)
        if list(cuts) == sorted(cuts)
    }
    best = min(everything, key=lambda one: everything[one])
    seconds, order = ExhaustiveSearch(layers, hosts, ring, 3).find_best()
    assert seconds == pytest.approx(everything[best])
    assert order == best[0]
    assert len(order) > 1
    assert ExhaustiveSearch(layers, hosts, ring, 3).find_best(seconds)[1] == ()
