"""Allocates peers to deployments.

Each peer belongs to one deployment. A serving deployment keeps its peers. A deployment that lacks
room takes unused peers: models' first deployments before second ones, large models before small
ones, and none takes more than it needs while another one lacks room. After its first peer, it
prefers peers with a short link time to that peer per byte that they hold. The remaining peers go to
the deployments with the least memory relative to their size. Devices of one PC go to the same
deployment if possible, so that the loss of the PC breaks only one. Only a deployment that has
lacked room for a while takes peers from serving ones, and only if those have room without them.
Unused peers are then swapped so that near peers are together
(:mod:`molink.swarm.placement.swap_search`). Pure functions: equal inputs give equal results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from molink.facts.memory_plan import usable_bytes as usable_bytes
from molink.facts.ring_times import HANDLING_S
from molink.swarm.controller.records import DesiredModel
from molink.swarm.placement.links import Links
from molink.swarm.placement.partition import StageHost
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

#: A deployment: the model's name and the deployment's number among those of the model.
DeploymentKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PeerDemand:
    """A deployment's demand for peers. With ``is_urgent`` it has lacked room for so long that
    others yield peers.
    """

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
    """Allocate each peer to a deployment; unusable peers are omitted.

    ``offers`` are in joining order; ``previous`` is the last result. Without ``links`` only room
    counts.
    """
    found = _PeerAllocation(demands, offers, previous, links or Links())
    owners = found.allocate_peers()
    return owners if links is None else found.improve_by_swaps()


def fits_model(desired: DesiredModel, offers: Iterable[Candidate]) -> bool:
    """Whether a model fits these peers, regardless of links: a placement's answer, but faster."""
    pins = dict(desired.pins)
    usable = [apply_pin(one, pins) for one in offers if not pins or one.peer in pins]
    usable = [one for one in usable if not explain_misfit(one.stage, desired.facts)]
    if any(one.stage != "auto" for one in usable):
        found = place_model(desired.facts, usable, desired.setup)
        return isinstance(found, Placement)
    return _fits_hosts(desired.facts.layers, [_build_host(desired, one) for one in usable])


def _build_host(desired: DesiredModel, offer: Candidate) -> StageHost:
    """Describe a peer's room for a model; speeds and draft models are ignored."""
    return build_host(desired.facts, replace(offer, draft_bytes=0), desired.setup, ASSUMED_RATE)


def _fits_hosts(layers: int, hosts: Sequence[StageHost]) -> bool:
    if any(one.max_layers(opens=True, closes=True) >= layers for one in hosts):
        return True
    hosts = sorted(hosts, key=lambda one: -one.max_layers())[:MAX_STAGES]
    for first, last in permutations(hosts, 2) if layers > 1 else ():
        ends = first.max_layers(opens=True), last.max_layers(closes=True)
        rest = sum(max(0, one.max_layers()) for one in hosts if one not in (first, last))
        if ends[0] >= first.costs.first_layers and ends[1] >= 1 and sum(ends) + rest >= layers:
            return True
    return False


def apply_pin(offer: Candidate, pins: Mapping[str, str]) -> Candidate:
    """Apply a pin to the candidate of the peer to which a model is pinned."""
    stage = pins.get(offer.peer, "auto")
    return offer if stage == "auto" else replace(offer, stage=stage)


class _PeerAllocation:
    """One call of :func:`allocate_peers`."""

    def __init__(
        self,
        demands: Sequence[PeerDemand],
        offers: Iterable[Candidate],
        previous: Mapping[str, DeploymentKey],
        links: Links,
    ) -> None:
        self.links = links
        #: Room for each model on each peer; filled on demand.
        self.hosts: dict[tuple[str, str], StageHost] = {}
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
            if demand.key[1] == 0:  # its present devices wait for the missing ones
                self.assign_peers(demand, self.free_peers(demand))
        for demand in self.by_priority:
            missing = demand.desired.target_stages - len(self.peers_of(demand))
            if missing > 0 and self.has_room(demand):
                self.assign_peers(
                    demand, self.order_useful(demand, self.free_peers(demand))[:missing]
                )
        self.assign_rest()
        return self.owners

    def improve_by_swaps(self) -> dict[str, DeploymentKey]:
        """Return the same allocation with near peers together; used and promised peers stay."""
        used = frozenset[str]().union(*(demand.used_peers for demand in self.demands.values()))
        models = {demand.key: demand.desired for demand in self.demands.values()}
        exchange = SwapSearch(
            models,
            self.candidates,
            self.links,
            lambda key, peer: self.may_use(self.demands[key], peer),
        )
        return exchange.improve_allocation(self.owners, self.candidates.keys() - used)

    # --- state -----------------------------------------------------------------------------------

    def peers_of(self, demand: PeerDemand) -> list[str]:
        return [peer for peer, key in self.owners.items() if key == demand.key]

    def free_peers(self, demand: PeerDemand) -> list[str]:
        """Return the unallocated peers that a deployment may use."""
        return [
            peer
            for peer in self.candidates
            if peer not in self.owners and self.may_use(demand, peer)
        ]

    def may_use(self, demand: PeerDemand, peer: str) -> bool:
        bound = self.pinned_to.get(peer)
        return bound == demand.key[0] or (bound is None and not demand.desired.pins)

    def order_smallest(self, demand: PeerDemand, peers: Iterable[str]) -> list[str]:
        """Sort peers by rank, and by memory within a rank."""
        preference = self.rank_peers(demand, ())
        return sorted(peers, key=lambda peer: (preference(peer), self.candidates[peer].memory))

    def order_useful(
        self, demand: PeerDemand, peers: Iterable[str], more: Sequence[str] = ()
    ) -> list[str]:
        """Sort peers by rank (:meth:`rank_peers`), then by link time per byte that they hold.

        The link is the one from the deployment's first peer, or from the first of ``more`` if it
        has none yet. If there is neither, the largest peers come first.
        """
        preference = self.rank_peers(demand, more)
        centre = next(iter((*self.peers_of(demand), *more)), None)

        def cost(peer: str) -> float:
            link = 0.0 if centre is None else self.links.latency_and_rate(centre, peer)[0]
            return (link + HANDLING_S) / max(1, self.candidates[peer].memory)

        return sorted(peers, key=lambda peer: (preference(peer), cost(peer)))

    def rank_peers(
        self, demand: PeerDemand, more: Iterable[str]
    ) -> Callable[[str], tuple[bool, int]]:
        """Return a function that ranks peers for a deployment; lower ranks are preferred.

        Previous peers come first. Then come the deployment's own PCs (with ``more``), PCs of no
        deployment, and other deployments' PCs.
        """
        own = {self.primary_peer(peer) for peer in (*self.peers_of(demand), *more)}
        used = {self.primary_peer(peer) for peer in self.owners}

        def rank(peer: str) -> tuple[bool, int]:
            pc = self.primary_peer(peer)
            apart = 0 if pc in own else 2 if pc in used else 1
            return self.previous.get(peer) != demand.key, apart

        return rank

    def primary_peer(self, peer: str) -> str:
        return self.candidates[peer].primary_peer or peer

    def has_room(self, demand: PeerDemand, *more: str, without: str = "") -> bool:
        peers = [peer for peer in (*self.peers_of(demand), *more) if peer != without]
        offers = [self.candidates[peer] for peer in peers]
        if demand.desired.pins or any(offer.stage != "auto" for offer in offers):
            return fits_model(demand.desired, offers)
        hosts = [self.build_host(demand, offer) for offer in offers]
        return _fits_hosts(demand.desired.facts.layers, hosts)

    def build_host(self, demand: PeerDemand, offer: Candidate) -> StageHost:
        """Return a peer's room for the deployment's model."""
        name = demand.key[0], offer.peer
        if name not in self.hosts:
            self.hosts[name] = _build_host(demand.desired, offer)
        return self.hosts[name]

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
        """Take needed free peers: the smallest one that is enough, otherwise the most useful ones.

        Take none if all of them together are not enough.
        """
        free = self.free_peers(demand)
        for peer in self.order_smallest(demand, free):
            if self.has_room(demand, peer):
                self.assign_peers(demand, [peer])
                return True
        taken: list[str] = []
        while free:
            peer = self.order_useful(demand, free, taken)[0]
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
            for peer in self.order_smallest(demand, self.peers_of(donor)):
                if not (self.may_use(demand, peer) and self.has_room(donor, without=peer)):
                    continue
                self.owners[peer] = demand.key
                if self.has_room(demand):
                    self.return_surplus(demand, previous)
                    return True
        self.owners = previous
        return False

    def return_surplus(self, demand: PeerDemand, previous: Mapping[str, DeploymentKey]) -> None:
        """Give back peers that proved unnecessary."""
        for peer in self.peers_of(demand):
            if previous.get(peer) == demand.key or not self.has_room(demand, without=peer):
                continue
            del self.owners[peer]
            if peer in previous:
                self.owners[peer] = previous[peer]

    def assign_rest(self) -> None:
        """Distribute the remaining peers, so that they improve rings or replace lost peers."""
        roomy = [demand for demand in self.by_priority if self.has_room(demand)]
        members = {demand.key: self.peers_of(demand) for demand in roomy}
        memory = {key: self.sum_memory(peers) for key, peers in members.items()}

        def relative_memory(demand: PeerDemand) -> float:
            return memory[demand.key] / max(1, demand.layer_bytes)

        for peer in [peer for peer in self.candidates if peer not in self.owners]:
            able = [
                demand
                for demand in roomy
                if self.may_use(demand, peer) and len(members[demand.key]) < MAX_STAGES
            ]
            if able:
                pc, before = self.primary_peer(peer), self.previous.get(peer)
                had = [demand for demand in able if demand.key == before]
                same = [
                    demand for demand in able if pc in map(self.primary_peer, members[demand.key])
                ]
                key = (had[0] if had else min(same or able, key=relative_memory)).key
                self.owners[peer] = key
                members[key].append(peer)
                memory[key] += self.sum_memory([peer])

    def sum_memory(self, peers: Iterable[str]) -> int:
        return sum(self.candidates[peer].memory for peer in peers)
