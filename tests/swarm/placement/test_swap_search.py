"""Compares the swap search with an exhaustive one."""

from dataclasses import replace
from itertools import product
from math import exp, inf, log
from random import Random

import msgspec
import pytest

from molink.swarm.controller.records import DesiredModel
from molink.swarm.placement.allocation import DeploymentKey, PeerDemand, allocate_peers, fits_model
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import Candidate, Placement, place_model
from tests.support.fake_fleet import FACTS, GB


def offer(name: str, gigabytes: float = 10, rate: float = 200e9) -> Candidate:
    return Candidate(name, name.upper(), round(gigabytes * GB), rate)


def model(name: str, layers: int, **changes: object) -> DesiredModel:
    """A model whose layers take a gigabyte each."""
    return DesiredModel(msgspec.structs.replace(FACTS, name=name, layers=layers), "a", **changes)


def need(desired: DesiredModel, replica: int = 0, used: str = "", **changes: bool) -> PeerDemand:
    return PeerDemand((desired.facts.name, replica), desired, frozenset(used), **changes)


def far_apart(*sites: str, far: float = 0.03) -> Links:
    """Latency is a millisecond within a site, ``far`` seconds between sites."""
    links, site = Links(), {peer: at for at, peers in enumerate(sites) for peer in peers}
    for one, other in product(site, site):
        if one != other:
            links.record_measurement(one, other, 0.001 if site[one] == site[other] else far, 12.5e6)
    return links


def by_name(owner: dict[str, DeploymentKey]) -> dict[str, str]:
    """Peers of each deployment, by its model's name."""
    return {
        name: "".join(sorted(peer for peer in owner if owner[peer][0] == name)) for name in "xy"
    }


def groups(owner: dict[str, DeploymentKey]) -> set[str]:
    return {"".join(sorted(peer for peer in owner if owner[peer] == key)) for key in owner.values()}


def test_near_peers_share_a_ring() -> None:
    """By memory alone the peers of each home would be separated."""
    offers = [offer(name, size) for name, size in zip("abcd", (10, 12, 11, 13), strict=True)]
    needs = [need(model("x", 15)), need(model("y", 14))]
    links = far_apart("ab", "cd")
    assert groups(allocate_peers(needs, offers, {})) == {"bd", "ac"}
    owner = allocate_peers(needs, offers, {}, links)
    assert groups(owner) == {"ab", "cd"}
    assert allocate_peers(needs, offers, owner, links) == owner
    twice = model("x", 14, replicas=2)
    assert groups(allocate_peers([need(twice), need(twice, 1)], offers, {}, links)) == {"ab", "cd"}


def test_used_peers_stay() -> None:
    offers = [offer(name) for name in "abcd"]
    links = far_apart("ab", "cd")
    x = need(model("x", 14), used="ac", is_serving=True)
    assert groups(allocate_peers([x, need(model("y", 14))], offers, {}, links)) == {"ac", "bd"}


def test_swap_makes_room_for_the_second_model() -> None:
    """The large model gets three PCs, although two others would be enough."""
    sizes = {"a": 10, "b": 9, "c": 6, "d": 10, "e": 8}
    offers = [offer(name, size) for name, size in sizes.items()]
    needs = [need(model("x", 16)), need(model("y", 21))]
    assert not fits_model(needs[0].desired, [offers[at] for at in (2, 4)])
    assert by_name(allocate_peers(needs, offers, {})) == {"x": "ce", "y": "abd"}
    found = by_name(allocate_peers(needs, offers, {}, Links()))
    for one in needs:
        mine = [each for each in offers if each.peer in found[one.key[0]]]
        assert fits_model(one.desired, mine)


def test_small_gain_is_ignored() -> None:
    """Measurements jitter; allocated peers stay."""
    offers = [offer(name) for name in "abcd"]
    needs = [need(model("x", 14)), need(model("y", 14))]
    before = {"a": ("x", 0), "c": ("x", 0), "b": ("y", 0), "d": ("y", 0)}
    assert allocate_peers(needs, offers, before, far_apart("ab", "cd", far=0.0012)) == before


def test_pinned_peers_and_partial_pcs_stay() -> None:
    links = far_apart("ab", "cd")
    offers = [offer(name) for name in "abcd"]
    needs = [need(model("x", 14, pins=(("a", "auto"), ("c", "auto")))), need(model("y", 14))]
    assert groups(allocate_peers(needs, offers, {}, links)) == {"ac", "bd"}
    offers = [
        offer("a"),
        replace(offer("c"), primary_peer="a"),
        offer("b"),
        replace(offer("d"), primary_peer="b"),
    ]
    x = model("x", 14, replicas=2)
    assert groups(allocate_peers([need(x), need(x, 1)], offers, {}, links)) == {"ac", "bd"}


def test_unconnectable_peers_are_not_combined() -> None:
    """A ring of two needs both directions; these peers fit together by memory alone."""
    offers = [offer(name, size) for name, size in zip("abcd", (10, 12, 11, 13), strict=True)]
    offers[1] = replace(offers[1], unreachable=frozenset("d"))
    needs = [need(model("x", 15)), need(model("y", 14))]
    assert groups(allocate_peers(needs, offers, {})) == {"bd", "ac"}
    assert "bd" not in groups(allocate_peers(needs, offers, {}, Links()))


# --- compared with exhaustive search -----------------------------------------------------------


def random_swarm(seed: int) -> tuple[list[PeerDemand], list[Candidate], Links]:
    """Five or six unequal PCs in two or three homes, and two pipelines."""
    draw = Random(seed)
    peers = "abcdef"[: draw.choice((5, 6))]
    offers = [offer(name, draw.randint(6, 14), draw.uniform(50e9, 500e9)) for name in peers]
    site = {name: draw.randrange(draw.choice((2, 3))) for name in peers}
    links = Links()
    for one, other in product(peers, peers):
        if one != other:
            near = site[one] == site[other]
            latency = draw.uniform(0.0005, 0.002) if near else draw.uniform(0.01, 0.05)
            links.record_measurement(one, other, latency, draw.uniform(2e6, 12.5e6))
    first = model("x", draw.randint(4, 22), replicas=2)
    if draw.random() < 0.4:
        return [need(first), need(first, 1)], offers, links
    return [need(first), need(model("y", draw.randint(4, 22)))], offers, links


def cost(
    needs: list[PeerDemand], offers: list[Candidate], links: Links, owner: dict[str, DeploymentKey]
) -> float | None:
    """Geometric mean of all rings' times per token, in seconds; ``None`` without a ring."""
    total = 0.0
    for one in needs:
        mine = [each for each in offers if owner.get(each.peer) == one.key]
        found = place_model(one.desired.facts, mine, links=links)
        if not isinstance(found, Placement):
            return None
        total += log(found.cost)
    return exp(total / len(needs))


def beside_the_best(seed: int) -> tuple[float, float] | None:
    """Cost of the allocation relative to the optimum, with links and without.

    ``None``: no allocation holds both models; infinite: one was found that lacks a model.
    """
    needs, offers, links = random_swarm(seed)
    ways = (
        dict(zip([one.peer for one in offers], keys, strict=True))
        for keys in product([one.key for one in needs], repeat=len(offers))
    )
    costs = [found for way in ways if (found := cost(needs, offers, links, way)) is not None]
    if not costs:
        return None
    ours, plain = (
        cost(needs, offers, links, allocate_peers(needs, offers, {}, one)) or inf
        for one in (links, None)
    )
    return ours / min(costs), plain / min(costs)


@pytest.mark.parametrize("seed", range(12))
def test_swap_search_is_nearly_optimal(seed: int) -> None:
    found = beside_the_best(seed)
    assert found is None or found[0] <= 1.1
