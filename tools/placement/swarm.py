"""Swarms described in a TOML file: their PCs, and the links between them."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molink.facts.model import ModelFacts
from molink.sim.data_sheet_candidates import make_candidate
from molink.sim.model_description import ModelDescription
from molink.sim.profiles import MBPS
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import Candidate

SWARMS = Path(__file__).with_name("swarms.toml")
#: One-way latency in seconds and rate in bytes/s between PCs of one place.
LOCAL_LATENCY, LOCAL_RATE = 0.0003, 1000 * MBPS


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link: seconds one way, bytes/s, and the share of packets lost."""

    latency: float
    rate: float
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Swarm:
    """PCs in joining order, the place of each, and ``links[i][j]`` from PC ``i`` to ``j``.

    Requests come from the PCs ``askers``.
    """

    name: str
    facts: ModelFacts
    candidates: Sequence[Candidate]
    places: Sequence[str]
    links: Sequence[Sequence[Link]]
    askers: Sequence[int]

    def measured_links(self, *, rates: bool) -> Links:
        """The links as molink knows them; before it has served, without ``rates``."""
        found = Links()
        for i, one in enumerate(self.candidates):
            for j, other in enumerate(self.candidates):
                if i != j:
                    link = self.links[i][j]
                    rate = link.rate if rates else None
                    found.record_measurement(one.peer, other.peer, link.latency, rate, link.loss)
        return found


def read_swarms(path: Path = SWARMS) -> Iterator[Swarm]:
    """The swarms of a file."""
    with path.open("rb") as file:
        for table in tomllib.load(file)["swarm"]:
            yield _parse_swarm(table)


def _parse_swarm(table: Mapping[str, Any]) -> Swarm:
    places: Mapping[str, Mapping[str, Any]] = table["places"]
    where: list[str] = []
    candidates: list[Candidate] = []
    # The places' PCs join in turns: neighbours in the list are not neighbours in the network.
    for turn in range(max(len(place["pcs"]) for place in places.values())):
        for name, place in places.items():
            if turn < len(place["pcs"]):
                where.append(name)
                candidates.append(make_candidate(f"{name}{turn + 1}", place["pcs"][turn]))
    links = [[_make_link(table, one, other) for other in where] for one in where]
    askers = [index for index, name in enumerate(where) if name in table["asked"]]
    facts = ModelDescription.from_profile(table["model"]).facts
    return Swarm(table["name"], facts, candidates, where, links, askers)


def _make_link(table: Mapping[str, Any], source: str, target: str) -> Link:
    if source == target:
        return Link(LOCAL_LATENCY, LOCAL_RATE)
    here, there = table["places"][source], table["places"][target]
    times = table["ms"]
    latency = times.get(f"{source}-{target}", times.get(f"{target}-{source}"))
    kept = (1 - here.get("loss", 0.0)) * (1 - there.get("loss", 0.0))
    return Link(latency / 1000, min(here["up"], there["down"]) * MBPS, 1 - kept)
