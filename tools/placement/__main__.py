"""Compare molink's placement with the best one, by the time per token of one stream.

Usage: ``python -m tools.placement``. *first*, *settled* and *known* are ratios to the best ring:
placed by latencies and losses alone, as before serving; after the links of each ring were measured
and the model placed again until it stays; with the rates of all links known.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from molink.facts.footprint import StageSetup
from molink.facts.model import LayerRange
from molink.facts.ring_times import HANDLING_S, TOKEN_BYTES
from molink.facts.tcp_loss import expected_loss_s
from molink.swarm.placement.link_times import ANSWER_TOKENS, PROMPT_TOKENS
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import (
    MAX_STAGES,
    Placement,
    build_host,
    place_model,
    row_bytes,
)
from tools.placement.exhaustive import ExhaustiveSearch, RingCosts
from tools.placement.swarm import Link, Swarm, read_swarms

#: Placements after which a swarm counts as unsettled.
_MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """A swarm's best ring and molink's, in seconds per token; ``seconds`` of CPU for placing."""

    best: float
    first: float
    settled: float
    known: float
    seconds: float
    placed: Placement


def compare_placements(swarm: Swarm) -> Comparison:
    """molink's placements and the best ring with the same room for KV."""
    costs = ring_costs(swarm)
    found = list(_placements(swarm))
    began = time.process_time()
    known = _place(swarm, swarm.measured_links(rates=True))
    seconds = time.process_time() - began
    hosts = [
        build_host(swarm.facts, one, StageSetup(), one.read_rate, known.kv_tokens)
        for one in swarm.candidates
    ]
    times = [ring_time(swarm, costs, one) for one in (found[0], found[-1], known)]
    search = ExhaustiveSearch(swarm.facts.layers, hosts, costs, MAX_STAGES)
    # A little longer than molink's time, so that the best ring is found even if it is the same.
    best, _ = search.find_best(min(times) * 1.0001)
    first, settled, of_known = times
    return Comparison(best, first, settled, of_known, seconds, known)


def ring_costs(swarm: Swarm) -> RingCosts:
    """Costs of hops and of the way to the first stage, from the description."""
    row = row_bytes(swarm.facts, "auto")

    def hop_s(link: Link, nbytes: float) -> float:
        lost = expected_loss_s(nbytes, 2 * link.latency, link.loss)
        return link.latency + HANDLING_S + nbytes / link.rate + lost

    def ask_s(asker: int, first: int) -> float:
        there, back = swarm.links[asker][first], swarm.links[first][asker]
        return 0.0 if asker == first else (there.latency + back.latency) / ANSWER_TOKENS

    return RingCosts(
        rows=[[hop_s(link, row) for link in links] for links in swarm.links],
        tokens=[[hop_s(link, TOKEN_BYTES) for link in links] for links in swarm.links],
        prompts=[
            [row / link.rate * PROMPT_TOKENS / ANSWER_TOKENS for link in links]
            for links in swarm.links
        ],
        asks=[
            sum(ask_s(asker, first) for asker in swarm.askers) / len(swarm.askers)
            for first in range(len(swarm.candidates))
        ],
    )


def ring_time(swarm: Swarm, costs: RingCosts, placed: Placement) -> float:
    """Seconds per token of a placement, by the described links."""
    return costs.path_s(ring_order(swarm, placed)) + placed.total_time


def ring_order(swarm: Swarm, placed: Placement) -> list[int]:
    """The PCs of a placement in ring order."""
    index = {one.peer: i for i, one in enumerate(swarm.candidates)}
    return [index[stage.peer] for stage in placed.stages]


def _place(swarm: Swarm, links: Links, serving: Sequence[tuple[str, LayerRange]] = ()) -> Placement:
    askers = {swarm.candidates[asker].peer: 1.0 for asker in swarm.askers}
    placed = place_model(swarm.facts, swarm.candidates, links=links, serving=serving, askers=askers)
    assert isinstance(placed, Placement), f"{swarm.name}: {placed.reason}"
    return placed


def _placements(swarm: Swarm) -> Iterator[Placement]:
    """The rings that serve in turn, as serving measures their links."""
    links = swarm.measured_links(rates=False)
    serving: list[tuple[str, LayerRange]] = []
    for _ in range(_MAX_ROUNDS):
        placed = _place(swarm, links, serving)
        yield placed
        ring = [(stage.peer, stage.layers) for stage in placed.stages]
        if ring == serving:
            return
        serving = ring
        order = ring_order(swarm, placed)
        # The last link carries only tokens, which don't reveal its rate.
        for source, target in pairwise(order):
            one, other = swarm.candidates[source].peer, swarm.candidates[target].peer
            links.record_measurement(one, other, None, swarm.links[source][target].rate)
    raise AssertionError(f"{swarm.name}: the ring changes with every measurement")


def count_visits(swarm: Swarm, placed: Placement) -> int:
    """How often the ring enters a place; as many as places if each place's stages are adjacent."""
    where = [swarm.places[index] for index in ring_order(swarm, placed)]
    changes = sum(one != other for one, other in zip(where, where[1:] + where[:1], strict=True))
    return max(1, changes)


def main() -> None:
    """Print a Markdown table."""
    print("| swarm | PCs | stages | places / visits | best, ms | first | settled | known | CPU s |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for swarm in read_swarms():
        found = compare_placements(swarm)
        order = ring_order(swarm, found.placed)
        places = len({swarm.places[index] for index in order})
        ratios = " | ".join(
            f"{each / found.best:.3f}" for each in (found.first, found.settled, found.known)
        )
        print(
            f"| {swarm.name} | {len(swarm.candidates)} | {len(order)} "
            f"| {places} / {count_visits(swarm, found.placed)} "
            f"| {1000 * found.best:.1f} | {ratios} | {found.seconds:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
