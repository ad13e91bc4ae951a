"""Place and simulate pipelines on a thousand PCs of five continents.

Usage: ``python -m tools.placement.world``. Latencies are measured round trips between data centres;
shares of NATs are cited; the rest is assumed (``world.toml``).
"""

import random
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from molink.facts.model import Objective
from molink.facts.ring_times import HANDLING_S
from molink.sim.data_sheet_candidates import make_candidate
from molink.sim.fleet import FleetOutcome, FleetScenario, simulate_fleet
from molink.sim.model_description import ModelDescription
from molink.sim.profiles import MBPS, LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.workload import Workload
from molink.swarm.controller.records import DesiredModel
from molink.swarm.placement.allocation import PeerDemand, allocate_peers
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import Candidate, Placement, PlacementGoal, place_model

_FOLDER = Path(__file__).resolve().parent
_REGIONS = _FOLDER.parents[1] / "configs" / "links" / "regions"
#: Round trips until two PCs are connected: TCP, and the handshake of an encrypted ZeroMQ socket.
CONNECT_ROUND_TRIPS = 5
#: Departures of a PC per hour in the simulation, and seconds of absence.
_DEPARTURES_PER_HOUR, _AWAY_S = 1.0, 60.0
#: Requests per second of each pipeline in the simulation, and the simulation's seconds.
_RATE, _DURATION_S = 0.02, 400.0

#: How two PCs connect.
Way = Literal["direct", "punched", "relayed"]


@dataclass(frozen=True)
class World:
    """PCs with their regions and connections (up and down, Mbps), of the file's description."""

    description: Mapping[str, Any]
    seed: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_random", random.Random(f"world {self.seed}"))

    @classmethod
    def read_file(cls, path: Path = _FOLDER / "world.toml") -> "World":
        """The world of a file."""
        return cls(tomllib.loads(path.read_text(encoding="utf-8")))

    @cached_property
    def round_trips(self) -> Mapping[tuple[str, str], float]:
        """Seconds between the data centres of two regions, by pair."""
        file = _REGIONS / f"{self.description['regions']}.toml"
        table: Mapping[str, Sequence[float]] = tomllib.loads(file.read_text(encoding="utf-8"))[
            "round_trips_ms"
        ]
        names = list(table)
        found = {(name, name): 0.0 for name in names}
        for name in names:
            for other, ms in zip(names, table[name], strict=False):
                found[name, other] = found[other, name] = ms / 1000
        return found

    @cached_property
    def regions(self) -> Sequence[str]:
        """The region of each PC."""
        names = sorted({one for one, _ in self.round_trips})
        return [names[index % len(names)] for index in range(self.description["peers"])]

    @cached_property
    def candidates(self) -> Sequence[Candidate]:
        """The PCs in joining order."""
        devices = self.description["devices"]
        return [
            make_candidate(f"pc{index}", self._random.choice(devices))
            for index in range(self.description["peers"])
        ]

    @cached_property
    def connections(self) -> Sequence[tuple[float, float]]:
        """Uplink and downlink of each PC, in Mbps."""
        return [self._random.choice(self.description["connections"]) for _ in self.regions]

    @cached_property
    def ways(self) -> Mapping[tuple[int, int], Way]:
        """How each pair (the smaller number first) connects."""
        share, kinds = self.description["share"], []
        for _ in self.regions:
            drawn = self._random.random()
            accepts, punches = drawn < share["accepts"], drawn < share["accepts"] + share["punches"]
            kinds.append("accepts" if accepts else "punches" if punches else "neither")

        def find_way(one: str, other: str) -> Way:
            if "accepts" in (one, other):
                return "direct"
            can_punch = one == other == "punches" and self._random.random() < share["punched"]
            return "punched" if can_punch else "relayed"

        count = len(kinds)
        return {
            (i, j): find_way(kinds[i], kinds[j]) for i in range(count) for j in range(i + 1, count)
        }

    @cached_property
    def _latencies(self) -> Mapping[tuple[str, str, bool], float]:
        """One-way latency in seconds by two regions, and whether a relay is between them."""
        access = self.description["access_ms"] / 1000
        names = sorted({one for one, _ in self.round_trips})
        found = {}
        for one in names:
            for other in names:
                trip = self.round_trips
                found[one, other, False] = trip[one, other] / 2 + 2 * access
                by = min(trip[one, relay] + trip[relay, other] for relay in names)
                found[one, other, True] = by / 2 + 4 * access
        return found

    def latency(self, source: int, target: int) -> float:
        """One-way seconds between two PCs, over the best region's relay if they need one."""
        relayed = self.ways[min(source, target), max(source, target)] == "relayed"
        return self._latencies[self.regions[source], self.regions[target], relayed]

    def rate(self, source: int, target: int) -> float:
        """Bytes/s from one PC to another."""
        return MBPS * min(self.connections[source][0], self.connections[target][1])

    def measure_links(self) -> Links:
        """All links as a swarm that has measured them would know them."""
        links = Links()
        for i, one in enumerate(self.candidates):
            for j, other in enumerate(self.candidates):
                if i != j:
                    rate = self.rate(i, j)
                    links.record_measurement(one.peer, other.peer, self.latency(i, j), rate)
        return links


def allocate_pipelines(
    world: World, links: Links, count: int
) -> tuple[list[Placement], float, float]:
    """Rings of ``count`` pipelines of the model, with CPU seconds of allocating and of placing."""
    facts = ModelDescription.from_profile(world.description["model"]).facts
    desired = DesiredModel(facts, world.candidates[0].peer, replicas=count)
    demands = [PeerDemand((facts.name, number), desired) for number in range(count)]
    began = time.process_time()
    owners = allocate_peers(demands, world.candidates, {}, links)
    allocating = time.process_time() - began

    def place_all() -> Iterator[Placement]:
        for number in range(count):
            mine = [one for one in world.candidates if owners.get(one.peer) == demands[number].key]
            placed = place_model(facts, mine, links=links)
            if isinstance(placed, Placement):
                yield placed

    began = time.process_time()
    rings = list(place_all())
    return rings, allocating, time.process_time() - began


def simulate_pipelines(world: World, rings: Sequence[Placement]) -> FleetOutcome:
    """The pipelines under load in virtual time, with PCs that leave without notice."""
    workload = Workload(_RATE * len(rings), _DURATION_S, output_tokens=64)
    scenarios = tuple(_describe_ring(world, ring, workload) for ring in rings)
    return simulate_fleet(
        FleetScenario(
            scenarios[0],
            len(rings),
            departures_per_hour=_DEPARTURES_PER_HOUR,
            away_s=_AWAY_S,
            rings=scenarios,
        )
    )


def _describe_ring(world: World, placed: Placement, workload: Workload) -> Scenario:
    order = [int(stage.peer.removeprefix("pc")) for stage in placed.stages]
    handling_ms = 1000 * HANDLING_S
    links = tuple(
        LinkProfile(world.rate(i, j) / MBPS, 1000 * world.latency(i, j), handling_ms=handling_ms)
        for i, j in pairwise([*order, order[0]])
    )
    return Scenario(
        workload,
        stages=len(order),
        model=world.description["model"],
        devices=tuple(world.candidates[index].name.partition(" ")[0] for index in order),
        layers=tuple(last - first for first, last in (stage.layers for stage in placed.stages)),
        links=links,
    )


def _describe(seconds: Sequence[float]) -> str:
    return f"{1000 * median(seconds):.0f} / {1000 * max(seconds):.0f}"


def main() -> None:
    """Print Markdown tables."""
    world = World.read_file()
    _print_ways(world)
    _print_placements(world)


def _print_ways(world: World) -> None:
    counts = Counter(world.ways.values())
    print("| way | pairs | handshake, ms: median / longest |\n|---|--:|--:|")
    for way in get_args(Way):
        times = [
            2 * CONNECT_ROUND_TRIPS * world.latency(*pair)
            for pair, one in world.ways.items()
            if one == way
        ]
        print(f"| {way} | {100 * counts[way] / counts.total():.0f} % | {_describe(times)} |")


def _print_placements(world: World) -> None:
    links = world.measure_links()
    facts = ModelDescription.from_profile(world.description["model"]).facts
    print("\n| placed | stages | CPU s | time per token, ms: median / longest |")
    print("|---|--:|--:|--:|")
    objective: Objective
    for objective in get_args(Objective):
        goal = PlacementGoal(objective)
        began = time.process_time()
        placed = place_model(facts, world.candidates, goal=goal, links=links)
        seconds = time.process_time() - began
        assert isinstance(placed, Placement)
        print(
            f"| one pipeline, `{objective}` | {len(placed.stages)} | {seconds:.2f} "
            f"| {_describe([placed.round_trip_time])} |"
        )
    for count in (10, 50):
        rings, allocating, placing = allocate_pipelines(world, links, count)
        stages = sum(len(ring.stages) for ring in rings) / len(rings)
        print(
            f"| {len(rings)} pipelines of {count} | {stages:.1f} "
            f"| {allocating:.2f} + {placing:.2f} "
            f"| {_describe([ring.round_trip_time for ring in rings])} |"
        )
    print("\n| simulated | requests | lost | TTFT, ms: p50 / p99 | TPOT, ms: p50 / p99 | CPU s |")
    print("|---|--:|--:|--:|--:|--:|")
    began = time.process_time()
    outcome = simulate_pipelines(world, rings)
    report, spent = outcome.report, time.process_time() - began
    ttft, tpot = (
        f"{1000 * (one.p50 or 0.0):.0f} / {1000 * (one.p99 or 0.0):.0f}"
        for one in (report.ttft_s, report.tpot_s)
    )
    print(
        f"| {len(rings)} pipelines, {outcome.num_departures} PCs left | {report.completed} "
        f"| {outcome.num_lost} | {ttft} | {tpot} | {spent:.0f} |"
    )


if __name__ == "__main__":
    main()
