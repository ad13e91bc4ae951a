"""The PCs of a running swarm, and how the catalog's models would fit them."""

from dataclasses import dataclass, replace
from typing import Any

from molink.checkpoint.hub_catalog import CatalogEntry, load_catalog
from molink.facts.device import Device
from molink.facts.model import Quantize
from molink.sim.model_description import ModelDescription
from molink.sim.model_fit import ModelFit, estimate_fit, needed_memory
from molink.swarm.controller.status_schema import PeerStatus, SwarmStatus
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import Candidate, candidate_from_device


@dataclass(frozen=True, slots=True)
class SwarmCapacity:
    """PCs and their links; ``place`` names them within a sentence.

    ``quantize`` is the mode in which this PC would serve a model.
    """

    place: str
    candidates: tuple[Candidate, ...]
    links: Links
    quantize: Quantize = "none"

    @property
    def memory(self) -> int:
        """Bytes that all PCs offer."""
        return sum(one.memory for one in self.candidates)

    @property
    def is_measured(self) -> bool:
        """Whether all PCs have measured how fast they read memory; otherwise speeds are unknown."""
        return all(one.read_rate > 0 for one in self.candidates)


def read_capacity(found: SwarmStatus, quantize: Quantize = "none") -> SwarmCapacity:
    """Return the capacity of a running swarm."""
    online = [one for one in found.peers if one.state == "online"]
    offers = (_peer_candidate(one, found) for one in online)
    candidates = tuple(one for one in offers if one is not None)
    num_pcs = len({one.primary_peer or one.peer for one in candidates})
    place = f"this swarm of {num_pcs} PCs" if num_pcs != 1 else "this swarm of 1 PC"
    return SwarmCapacity(place, candidates, _read_links(found, candidates), quantize)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A catalog entry with figures derived from its shape; ``download`` and ``memory`` in bytes."""

    entry: CatalogEntry
    parameters: int
    download: int
    memory: int
    fit: ModelFit

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        entry = self.entry
        return {
            "name": entry.name,
            "source": entry.source,
            "format": entry.format,
            "use": entry.use,
            "license": entry.license,
            "date": entry.date.isoformat(),
            "parameters": self.parameters,
            "download_bytes": self.download,
            "memory_bytes": self.memory,
            "fits": self.fit.fits,
            "quantize": self.fit.quantize,
            "stages": self.fit.num_stages,
            "tokens_per_s": round(self.fit.tokens_per_s, 1) or None,
            "reason": self.fit.reason,
        }


def describe_entry(entry: CatalogEntry, capacity: SwarmCapacity) -> FoundModel:
    """Describe a catalog entry and how it would fit."""
    model, weights = ModelDescription.from_catalog(entry), entry.describe_weights()
    return FoundModel(
        entry,
        weights.parameters,
        weights.nbytes,
        needed_memory(model.facts),
        estimate_fit(model, capacity.candidates, capacity.links, capacity.quantize),
    )


def explain_misfit(entry: CatalogEntry, capacity: SwarmCapacity) -> str:
    """Explain why a model does not fit and which of its family would; empty if it fits.

    The result is also empty while no PC offers memory.
    """
    if not capacity.candidates:
        return ""

    def fit_of(other: CatalogEntry) -> ModelFit:
        model = ModelDescription.from_catalog(other)
        return estimate_fit(model, capacity.candidates, capacity.links, capacity.quantize)

    fit = fit_of(entry)
    if fit.quantize == capacity.quantize:
        return ""
    entries = load_catalog().entries
    family = [one for one in entries if one.family == entry.family and one.is_default]
    fitting = [one.name for one in family if fit_of(one).quantize == capacity.quantize]
    hint = f". Of {entry.family}, {', '.join(fitting)} would fit" if fitting else ""
    return f"{fit.reason}{hint}"


def _peer_candidate(peer: PeerStatus, status: SwarmStatus) -> Candidate | None:
    """Return the candidate of a PC that offers to hold layers.

    PCs with an older version report only their memory.
    """
    if peer.stage == "none" or (peer.capacity is None and not peer.memory):
        return None
    kind = peer.device.partition(" ")[0].rstrip(":")
    device = peer.capacity or Device(
        kind="cuda" if kind == "cuda" else "cpu", name=kind, memory=peer.memory
    )
    found = candidate_from_device(peer.id, peer.name, device, primary_peer=peer.pc)
    unreachable = frozenset(to for by, to in status.unreachable if by == peer.id)
    return replace(found, unreachable=unreachable)


def _read_links(status: SwarmStatus, candidates: tuple[Candidate, ...]) -> Links:
    """Return the links of the serving rings, as measured by their stages."""
    links = Links()
    for one in candidates:
        links.set_primary_peer(one.peer, one.primary_peer)
    loads = {
        (peer.id, worker.pipeline, worker.stage): worker.load
        for peer in status.peers
        for worker in peer.workers
    }
    for pipeline in status.pipelines:
        for index, stage in enumerate(pipeline.stages):
            after = pipeline.stages[(index + 1) % len(pipeline.stages)].peer
            load = loads.get((stage.peer, pipeline.id, index))
            if load is not None:
                link = load.link
                links.record_measurement(
                    stage.peer, after, link.latency_s or None, link.rate or None
                )
    return links
