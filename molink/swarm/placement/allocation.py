"""Allocates peers to deployments.

Each peer belongs to one deployment. A serving deployment keeps its peers. One that lacks room takes
unused ones: models' first deployments before second ones, large models before small ones, and none
takes more than it needs while another lacks some. The rest goes to the deployments with the least
memory for their size. Devices of one PC go to the same deployment where possible, so that losing
the PC breaks only one. Only a deployment that has lacked room for a while takes peers from serving
ones, if those have room without them. Unused peers are then swapped so that near ones are together
(:mod:`molink.swarm.placement.swap_search`). Pure functions: equal inputs give equal results.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from molink.facts.memory_plan import usable_bytes as usable_bytes
from molink.swarm.controller.records import DesiredModel
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import (
    ASSUMED_RATE,
    MAX_STAGES,
    Candidate,
    Placement,
    build_host,
    explain_misfit,
    place_model,
)
from molink.swarm.placement.swap_search import SwapSearch

#: A deployment: the model's name, and its number among those of the model.
DeploymentKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PeerDemand:
    """A deployment's demand for peers. ``is_urgent``: it has lacked room for so long that others
    yield."""

    key: DeploymentKey
    desired: DesiredModel
    used_peers: frozenset[str] = frozenset()
    is_serving: bool = False
    is_urgent: bool = False

    @property
    def layer_bytes(self) -> int:
        """Bytes of the model's layers."""
        return self.desired.facts.layers * self.desired.facts.layer_bytes


def allocate_peers(
    demands: Sequence[PeerDemand],
    offers: Iterable[Candidate],
    previous: Mapping[str, DeploymentKey],
    links: Links | None = None,
) -> dict[str, DeploymentKey]:
    """The deployment of each peer; unusable peers are omitted.

    ``offers`` are in joining order; ``previous`` is the last result. Without ``links`` only room
    counts.
    """
    found = _PeerAllocation(demands, offers, previous)
    owners = found.allocate_peers()
    return owners if links is None else found.improve_by_swaps(links)


def fits_model(desired: DesiredModel, offers: Iterable[Candidate]) -> bool:
    """Whether a model fits these peers, links aside: the result of a placement, but faster."""
    pins = dict(desired.pins)
    usable = [apply_pin(one, pins) for one in offers if not pins or one.peer in pins]
    usable = [one for one in usable if not explain_misfit(one.stage, desired.facts)]
    if any(one.stage != "auto" for one in usable):
        found = place_model(desired.facts, usable, desired.setup)
        return isinstance(found, Placement)
    layers = desired.facts.layers
    hosts = [
        build_host(desired.facts, replace(one, draft_bytes=0), desired.setup, ASSUMED_RATE)
        for one in usable
    ]
    if any(one.max_layers(opens=True, closes=True) >= layers for one in hosts):
        return True
    hosts = sorted(hosts, key=lambda one: -one.max_layers())[:MAX_STAGES]
    for first, last in permutations(hosts, 2) if layers > 1 else ():
        ends = first.max_layers(opens=True), last.max_layers(closes=True)
        rest = sum(max(0, one.max_layers()) for one in hosts if one not in (first, last))
        if ends[0] >= desired.facts.first_layers and ends[1] >= 1 and sum(ends) + rest >= layers:
            return True
    return False


def apply_pin(offer: Candidate, pins: Mapping[str, str]) -> Candidate:
    """A peer's candidate for a model that is pinned to it."""
    stage = pins.get(offer.peer, "auto")
    return offer if stage == "auto" else replace(offer, stage=stage)


class _PeerAllocation:
    """One call of :func:`allocate_peers`."""

    def __init__(
        self,
        demands: Sequence[PeerDemand],
        offers: Iterable[Candidate],
        previous: Mapping[str, DeploymentKey],
    ) -> None:
        self.demands = {demand.key: demand for demand in demands}
        self.candidates = {one.peer: one for one in offers}
        self.previous = previous
        self.owners: dict[str, DeploymentKey] = {}
        self.pinned_to = {
            peer: demand.key[0] for demand in demands for peer, _ in demand.desired.pins
        }
        self.by_priority = sorted(
            demands, key=lambda demand: (demand.key[1], -demand.layer_bytes, demand.key)
        )

    def allocate_peers(self) -> dict[str, DeploymentKey]:
        self.keep_used()
        lacking = [
            demand
            for demand in self.by_priority
            if not self.has_room(demand) and not self.grow_deployment(demand)
        ]
        lacking = [
            demand for demand in lacking if not (demand.is_urgent and self.displace_others(demand))
        ]
        for demand in lacking:
            if demand.key[1] == 0:  # what is there waits with it for what is missing
                self.assign_peers(demand, self.free_peers(demand))
        for demand in self.by_priority:
            missing = demand.desired.target_stages - len(self.peers_of(demand))
            if missing > 0 and self.has_room(demand):
                self.assign_peers(
                    demand, self.order_peers(demand, self.free_peers(demand), -1)[:missing]
                )
        self.assign_rest()
        return self.owners

    def improve_by_swaps(self, links: Links) -> dict[str, DeploymentKey]:
        """The same allocation with near peers together; used and promised peers stay."""
        used = frozenset[str]().union(*(demand.used_peers for demand in self.demands.values()))
        models = {demand.key: demand.desired for demand in self.demands.values()}
        exchange = SwapSearch(
            models, self.candidates, links, lambda key, peer: self.may_use(self.demands[key], peer)
        )
        return exchange.improve_allocation(self.owners, self.candidates.keys() - used)

    # --- state -----------------------------------------------------------------------------------

    def peers_of(self, demand: PeerDemand) -> list[str]:
        return [peer for peer, key in self.owners.items() if key == demand.key]

    def free_peers(self, demand: PeerDemand) -> list[str]:
        """Unallocated peers that it may use."""
        return [
            peer
            for peer in self.candidates
            if peer not in self.owners and self.may_use(demand, peer)
        ]

    def may_use(self, demand: PeerDemand, peer: str) -> bool:
        bound = self.pinned_to.get(peer)
        return bound == demand.key[0] or (bound is None and not demand.desired.pins)

    def order_peers(
        self, demand: PeerDemand, peers: Iterable[str], sign: int, more: Iterable[str] = ()
    ) -> list[str]:
        """Sort peers: previous ones first, then by memory, ascending (``sign`` 1) or descending
        (-1).

        Before memory counts whose PC it is: its own (with ``more``), no deployment's, another's.
        """
        own = {self.primary_peer(peer) for peer in (*self.peers_of(demand), *more)}
        used = {self.primary_peer(peer) for peer in self.owners}

        def apart(peer: str) -> int:
            return (
                0
                if self.primary_peer(peer) in own
                else 1
                if self.primary_peer(peer) not in used
                else 2
            )

        return sorted(
            peers,
            key=lambda peer: (
                self.previous.get(peer) != demand.key,
                apart(peer),
                sign * self.candidates[peer].memory,
            ),
        )

    def primary_peer(self, peer: str) -> str:
        return self.candidates[peer].primary_peer or peer

    def has_room(self, demand: PeerDemand, *more: str, without: str = "") -> bool:
        peers = [peer for peer in (*self.peers_of(demand), *more) if peer != without]
        return fits_model(demand.desired, [self.candidates[peer] for peer in peers])

    def assign_peers(self, demand: PeerDemand, peers: Iterable[str]) -> None:
        self.owners.update(dict.fromkeys(peers, demand.key))

    # --- assignment ---------------------------------------------------------------------------

    def keep_used(self) -> None:
        """Keep used peers, except those promised to another deployment that lacks room."""
        for demand in self.by_priority:
            self.assign_peers(
                demand, (peer for peer in self.candidates if peer in demand.used_peers)
            )
        for peer, key in self.previous.items():
            holder = self.demands.get(self.owners.get(peer, ("", 0)))
            if holder is None or key not in self.demands or holder.key == key:
                continue
            if not self.demands[key].is_serving and self.has_room(holder, without=peer):
                self.owners[peer] = key

    def grow_deployment(self, demand: PeerDemand) -> bool:
        """Take needed free peers: the smallest one that is enough, else the largest ones.

        Takes none if all of them are not enough.
        """
        free = self.free_peers(demand)
        for peer in self.order_peers(demand, free, 1):
            if self.has_room(demand, peer):
                self.assign_peers(demand, [peer])
                return True
        taken: list[str] = []
        while free:
            peer = self.order_peers(demand, free, -1, taken)[0]
            free.remove(peer)
            taken.append(peer)
            if self.has_room(demand, *taken):
                self.assign_peers(demand, taken)
                return True
        return False

    def displace_others(self, demand: PeerDemand) -> bool:
        """Take peers from deployments that have room without them."""
        previous = dict(self.owners)
        self.assign_peers(demand, self.free_peers(demand))
        donors = [one for one in self.by_priority if one.key != demand.key and one.is_serving]
        for donor in sorted(donors, key=lambda one: -len(self.peers_of(one))):
            for peer in self.order_peers(demand, self.peers_of(donor), 1):
                if not (self.may_use(demand, peer) and self.has_room(donor, without=peer)):
                    continue
                self.owners[peer] = demand.key
                if self.has_room(demand):
                    self.return_surplus(demand, previous)
                    return True
        self.owners = previous
        return False

    def return_surplus(self, demand: PeerDemand, previous: Mapping[str, DeploymentKey]) -> None:
        """Return peers that turned out not to be needed."""
        for peer in self.peers_of(demand):
            if previous.get(peer) == demand.key or not self.has_room(demand, without=peer):
                continue
            del self.owners[peer]
            if peer in previous:
                self.owners[peer] = previous[peer]

    def assign_rest(self) -> None:
        """Spread the remaining peers: they improve rings or replace lost peers."""
        for peer in self.candidates:
            if peer in self.owners:
                continue
            able = [
                demand
                for demand in self.by_priority
                if self.may_use(demand, peer)
                and len(self.peers_of(demand)) < MAX_STAGES
                and self.has_room(demand)
            ]
            had = [demand for demand in able if demand.key == self.previous.get(peer)]
            if able:
                pc = self.primary_peer(peer)
                near = [
                    demand for demand in able if pc in map(self.primary_peer, self.peers_of(demand))
                ]
                self.assign_peers(
                    had[0] if had else min(near or able, key=self.relative_memory), [peer]
                )

    def relative_memory(self, demand: PeerDemand) -> float:
        """Its memory relative to its size."""
        memory = sum(self.candidates[peer].memory for peer in self.peers_of(demand))
        return memory / max(1, demand.layer_bytes)
