"""Allocates peers to deployments, and decides when to allocate again.

:mod:`molink.swarm.placement.allocation` computes the allocation; this module collects the inputs
and publishes the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from molink.swarm.controller.context import ControllerContext
from molink.swarm.controller.planner import candidate_from_report, candidates_differ
from molink.swarm.controller.reconciler import Reconciler
from molink.swarm.placement.allocation import DeploymentKey, PeerDemand, allocate_peers, fits_model
from molink.swarm.placement.placement import Candidate

#: Seconds that a deployment must lack room before it takes peers from others, since lost peers may
#: return.
URGENT_AFTER = 5.0


class PeerAllocator:
    """Allocates the peers of all deployments, during one run of the control plane."""

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self._deployments: Mapping[DeploymentKey, Reconciler] = {}
        #: Deployment of each peer, if there is a choice, and the inputs of that decision.
        self._owners: dict[str, DeploymentKey] = {}
        self._inputs: tuple[tuple[Candidate, ...], tuple[PeerDemand, ...]] | None = None
        #: Times since which deployments that are not up have lacked room.
        self._lacking_since: dict[DeploymentKey, float] = {}

    def lacks_room(self, key: DeploymentKey) -> bool:
        """Whether a deployment lacks room on its peers."""
        return key in self._lacking_since

    def allocate_peers(self, deployments: Mapping[DeploymentKey, Reconciler], now: float) -> None:
        """Allocate peers if the inputs have changed."""
        self._deployments = deployments
        self._lacking_since = {
            key: at for key, at in self._lacking_since.items() if key in deployments
        }
        several = len(deployments) > 1
        for key, one in deployments.items():
            one.label = deployment_name(key) if several else ""
        if not several and not any(one.desired.pins for one in deployments.values()):
            for one in deployments.values():
                one.set_allocated_peers(None)
            self._owners, self._inputs = {}, None
            return
        offers = self._find_candidates(now)
        demands = tuple(self._demand_of(key, one, offers, now) for key, one in deployments.items())
        if self._needs_decision(offers, demands):
            self._reallocate(offers, demands, now)
        self._publish_allocation()

    def _needs_decision(
        self, offers: tuple[Candidate, ...], demands: tuple[PeerDemand, ...]
    ) -> bool:
        if self._inputs is None:
            return True
        if demands != self._inputs[1] or candidates_differ(offers, self._inputs[0]):
            return True
        # Until a deployment is placed, new link measurements may still change its peers.
        unplaced = any(
            not demand.used_peers and not self.lacks_room(demand.key) for demand in demands
        )
        return self._context.links.has_changed and unplaced

    def _reallocate(
        self, offers: tuple[Candidate, ...], demands: tuple[PeerDemand, ...], now: float
    ) -> None:
        self._inputs = offers, demands
        self._context.links.mark_placed()
        owners = allocate_peers(demands, offers, self._owners, self._context.links)
        if owners != self._owners:
            names = {key: self._peer_names(owners, key) for key in self._deployments}
            shares = "; ".join(f"{deployment_name(key)}: {peers}" for key, peers in names.items())
            self._context.log_transition(
                now, f"peers are shared out: {shares}", f"PCs of each model: {shares}"
            )
        self._owners = owners

    def _publish_allocation(self) -> None:
        """Tell each deployment its peers, except peers that another deployment still uses."""
        for key, one in self._deployments.items():
            others = (two.used_peers for two in self._deployments.values() if two is not one)
            busy = frozenset[str]().union(*others)
            mine = frozenset(peer for peer, owner in self._owners.items() if owner == key)
            one.set_allocated_peers(mine - busy)

    def _find_candidates(self, now: float) -> tuple[Candidate, ...]:
        """Return the peers that offer a stage and are not excluded."""
        registry, reach = self._context.registry, self._context.reachability
        used = frozenset[str]().union(*(one.used_peers for one in self._deployments.values()))
        blocked = self._context.backoff.is_excluded
        found = [
            offer
            for peer in registry.members
            if (session := registry.sessions.get(peer)) is not None
            and (peer in used or not blocked(peer, now))
            and (offer := candidate_from_report(peer, session.report)) is not None
        ]
        if reach.has_failures:
            found = [replace(one, unreachable=reach.unreachable_from(one.peer)) for one in found]
        out = reach.find_unreachable(
            one.peer for one in sorted(found, key=lambda one: one.peer not in used)
        )
        return tuple(one for one in found if one.peer in used or one.peer not in out)

    def _demand_of(
        self, key: DeploymentKey, one: Reconciler, offers: Sequence[Candidate], now: float
    ) -> PeerDemand:
        mine = one.used_peers | {peer for peer, owner in self._owners.items() if owner == key}
        if one.formation is not None or fits_model(
            one.desired, (offer for offer in offers if offer.peer in mine)
        ):
            self._lacking_since.pop(key, None)
        else:
            self._lacking_since.setdefault(key, now)
        since = self._lacking_since.get(key)
        pressing = since is not None and now - since >= URGENT_AFTER
        return PeerDemand(key, one.desired, one.used_peers, one.is_ready, pressing)

    def _peer_names(self, owners: Mapping[str, DeploymentKey], key: DeploymentKey) -> str:
        name = self._context.registry.name_of
        return ", ".join(name(peer) for peer, owner in owners.items() if owner == key) or "none"


def deployment_name(key: DeploymentKey) -> str:
    """Return a deployment's name for users."""
    return key[0] if key[1] == 0 else f"{key[0]} #{key[1] + 1}"
