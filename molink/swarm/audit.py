"""Invariants that span the parts of a reconciler."""

from molink.errors import InvariantError
from molink.swarm.reconciler import Reconciler


def audit(reconciler: Reconciler) -> None:
    """Check sessions, the formation and the move.

    Raises:
        InvariantError: something does not agree with the rest.
    """
    registry, formation, move = reconciler.registry, reconciler.formation, reconciler.move
    story = reconciler.story
    if not set(registry.sessions) <= set(registry.members):
        raise InvariantError("somebody is there who is no member", story)
    if move is not None:
        if formation is None:
            raise InvariantError("a move from nothing", story)
        if not all(map(registry.live, move.peers)):
            raise InvariantError("a move to a peer that is not there", story)
    beside = reconciler.next
    if beside is not None:
        beside.validate()
        if formation is None or formation.state != "ready" or move is not None:
            raise InvariantError("something is made beside what doesn't serve", story)
        if beside.record.id == formation.record.id or beside.record.epoch != reconciler.epoch:
            raise InvariantError("what is made beside is not the newest epoch", story)
        if not all(map(registry.live, beside.peers)):
            raise InvariantError("a stage's peer is not there", story)
    if formation is None:
        return
    formation.validate()
    record = formation.record
    if record.epoch > reconciler.epoch or record.id != reconciler.pipeline:
        raise InvariantError("the formation is not the newest epoch", story)
    if formation.state != "adopting" and not all(map(registry.live, formation.peers)):
        raise InvariantError("a stage's peer is not there", story)
