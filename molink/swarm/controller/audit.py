"""Invariants across the parts of a fleet."""

from molink.errors import InvariantError
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.reconciler import Reconciler


def audit_fleet(fleet: Fleet) -> None:
    """Check sessions, and each deployment's formation and migration.

    Raises:
        InvariantError: parts of the state contradict each other.
    """
    registry, story = fleet.registry, fleet.story
    if not set(registry.sessions) <= set(registry.members):
        raise InvariantError("somebody is there who is no member", story)
    names = [one.pipeline for one in fleet.deployments]
    if len(set(names)) < len(names):
        raise InvariantError("two deployments have one pipeline", story)
    begun = [one.used_peers for one in fleet.deployments]
    if sum(map(len, begun)) > len(frozenset[str]().union(*begun)):
        raise InvariantError("two deployments use one peer", story)
    for one in fleet.deployments:
        _audit_deployment(one)


def _audit_deployment(one: Reconciler) -> None:
    registry, formation, move = one.registry, one.formation, one.migration
    story = one.context.story
    if move is not None:
        if formation is None:
            raise InvariantError("a move from nothing", story)
        if not all(map(registry.is_live, move.peers)):
            raise InvariantError("a move to a peer that is not there", story)
    beside = one.successor
    if beside is not None:
        beside.validate()
        if formation is None or formation.state != "ready" or move is not None:
            raise InvariantError("something is made beside what doesn't serve", story)
        if beside.record.id == formation.record.id or beside.record.epoch != one.epoch:
            raise InvariantError("what is made beside is not the newest epoch", story)
        if not all(map(registry.is_live, beside.peers)):
            raise InvariantError("a stage's peer is not there", story)
    if formation is None:
        return
    formation.validate()
    record = formation.record
    if record.epoch > one.epoch or record.id != one.pipeline:
        raise InvariantError("the formation is not the newest epoch", story)
    if formation.state != "adopting" and not all(map(registry.is_live, formation.peers)):
        raise InvariantError("a stage's peer is not there", story)
