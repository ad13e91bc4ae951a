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
    if formation is None:
        return
    formation.validate()
    record = formation.record
    if record.epoch != reconciler.epoch or record.id != reconciler.pipeline:
        raise InvariantError("the formation is not the newest epoch", story)
    if formation.state != "adopting" and not all(map(registry.live, formation.peers)):
        raise InvariantError("a stage's peer is not there", story)
