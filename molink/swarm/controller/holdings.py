"""Which PCs hold a model's files, by their reports, and which layers' files none holds."""

from collections.abc import Collection

from molink.facts.model import LayerRange, ModelFacts
from molink.swarm.artifacts.replication import to_ranges
from molink.swarm.controller.registry import Registry
from molink.wire.messages.instructions import MAX_SOURCES
from molink.wire.messages.peer_reports import PartialModel, PeerReport


def part_holders(facts: ModelFacts, registry: Registry) -> tuple[str, ...]:
    """Peers that hold some of a model's files, in joining order.

    If they are more than a message can name: a greedy choice that covers as many layers as it can.
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


def whole_holders(facts: ModelFacts, registry: Registry, *, only_model: bool) -> list[str]:
    """Peers that hold all files. ``replicated_percent`` counts only if the swarm has one model."""
    return [
        peer
        for peer, session in registry.sessions.items()
        if facts.name in session.report.models
        or (only_model and session.report.replicated_percent == 100)
    ]


def missing_layers(
    facts: ModelFacts, reports: Collection[PeerReport], *, only_model: bool
) -> tuple[LayerRange, ...]:
    """Layers whose files are on no reporting PC.

    A loaded stage has its layers' files, but reports say of which model only where there is one.
    For another model that no PC has partially, nothing is returned: it may have shipped with
    molink.
    """
    here = set[int]()
    known = only_model
    for report in reports:
        if facts.name in report.models:
            return ()
        parts = _find_partial(report, facts)
        known |= parts is not None
        here |= _held_layers(parts)
        for worker in report.workers if only_model else ():
            if worker.state not in ("fetching", "failed"):
                here.update(range(*worker.layers))
    return to_ranges(set(range(facts.layers)) - here) if known else ()


def describe_missing(facts: ModelFacts, layers: Collection[LayerRange]) -> str:
    """Missing layers and how to get them, for the user."""
    if facts.files_bytes:
        return (
            f"layers {format_ranges(layers)} yet: the hub has them ({facts.hub.partition('@')[0]})"
        )
    return (
        f"layers {format_ranges(layers)}. Start a PC that has them, or bring {facts.name} again "
        "(`molink run`)"
    )


def format_ranges(layers: Collection[LayerRange]) -> str:
    """Format as ``2:4, 7:8``."""
    return ", ".join(f"{first}:{last}" for first, last in layers)


def _find_partial(report: PeerReport, facts: ModelFacts) -> PartialModel | None:
    return next((one for one in report.partial_models if one.root == facts.root), None)


def _held_layers(parts: PartialModel | None) -> set[int]:
    held = () if parts is None else parts.layers
    return {layer for first, last in held for layer in range(first, min(last, 4096))}
