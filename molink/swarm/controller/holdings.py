"""Determines from reports which PCs hold a model's files, and which layers' files are missing."""

from collections.abc import Collection

from molink.facts.layer_range import format_ranges
from molink.facts.model import LayerRange, ModelFacts
from molink.swarm.artifacts.replication import to_ranges
from molink.swarm.controller.registry import Registry
from molink.wire.messages.instructions import MAX_SOURCES
from molink.wire.messages.peer_reports import PartialModel, PeerReport

#: Seconds after which to retry even without a change, since reports are incomplete.
RETRY_INTERVAL = 60.0

_Snapshot = tuple[frozenset[str], frozenset[str], tuple[LayerRange, ...]]


def partial_holders(facts: ModelFacts, registry: Registry) -> tuple[str, ...]:
    """Return peers that hold some of a model's files, in joining order.

    If there are more than a message can name, a greedy choice covers as many layers as possible.
    """
    if not facts.root:
        return ()
    found = {
        peer: _held_layers(parts)
        for peer in registry.members
        if peer in registry.sessions
        and (parts := _find_partial(registry.sessions[peer].report, facts)) is not None
    }
    if len(found) <= MAX_SOURCES:
        return tuple(found)
    chosen = set[str]()
    covered = set[int]()
    while len(chosen) < MAX_SOURCES:
        rest = (peer for peer in found if peer not in chosen)
        best = max(rest, key=lambda peer: (len(found[peer] - covered), len(found[peer])))
        chosen.add(best)
        covered |= found[best]
    return tuple(peer for peer in found if peer in chosen)


def full_holders(facts: ModelFacts, registry: Registry, *, only_model: bool) -> list[str]:
    """Return peers that hold all files; ``replicated_percent`` counts only for a single model."""
    return [
        peer
        for peer, session in registry.sessions.items()
        if facts.name in session.report.models
        or (only_model and session.report.replicated_percent == 100)
    ]


def missing_layers(
    facts: ModelFacts, reports: Collection[PeerReport], *, only_model: bool
) -> tuple[LayerRange, ...]:
    """Return the layers whose files are on no reporting PC.

    A loaded stage has its layers' files, but reports reveal the model only if the swarm has a
    single one. For other models that no PC has partially, nothing is returned, since the model may
    have shipped with molink.
    """
    held = set[int]()
    known = only_model
    for report in reports:
        if facts.name in report.models:
            return ()
        parts = _find_partial(report, facts)
        known |= parts is not None
        held |= _held_layers(parts)
        for worker in report.workers if only_model else ():
            if worker.state not in ("fetching", "failed"):
                held.update(range(*worker.layers))
    return to_ranges(set(range(facts.layers)) - held) if known else ()


def describe_missing(facts: ModelFacts, layers: Collection[LayerRange]) -> str:
    """Describe missing layers and how to get them, for the user."""
    if facts.files_bytes:
        return (
            f"layers {format_ranges(layers)} yet: the hub has them ({facts.hub.partition('@')[0]})"
        )
    return (
        f"layers {format_ranges(layers)}. Start a PC that has them, or load {facts.name} again "
        "with `molink run`"
    )


def _find_partial(report: PeerReport, facts: ModelFacts) -> PartialModel | None:
    return next((one for one in report.partial_models if one.root == facts.root), None)


def _held_layers(parts: PartialModel | None) -> set[int]:
    held = () if parts is None else parts.layers
    return {layer for first, last in held for layer in range(first, min(last, 4096))}


class MissingFiles:
    """Missing files of one deployment. All times are seconds."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._snapshot: _Snapshot | None = None
        self._until = 0.0

    def record_missing(self, facts: ModelFacts, now: float) -> None:
        """Record a PC's report that files of its stage are on no peer."""
        self._snapshot, self._until = self._take_snapshot(facts), now + RETRY_INTERVAL

    def still_missing(self, facts: ModelFacts, now: float) -> bool:
        """Whether the same peers still hold the same files."""
        if self._snapshot is None:
            return False
        if now >= self._until or self._take_snapshot(facts) != self._snapshot:
            self._snapshot = None
        return self._snapshot is not None

    def _take_snapshot(self, facts: ModelFacts) -> _Snapshot:
        sessions = self._registry.sessions
        reports = [one.report for one in sessions.values()]
        whole = frozenset(self._registry.find_holders(facts.name))
        return frozenset(sessions), whole, missing_layers(facts, reports, only_model=False)
