"""The PCs on which a model could be placed: those of the running swarm, or this one."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import psutil

from molink.checkpoint.hub_catalog import CatalogEntry, load_catalog
from molink.errors import MolinkError, UsageError
from molink.facts.device import Device
from molink.facts.model import Quantize
from molink.sim.model_description import ModelDescription
from molink.sim.model_fit import ModelFit, estimate_fit
from molink.sim.profiles import load_device
from molink.swarm.controller.status_schema import PeerStatus, SwarmStatus, decode_status
from molink.swarm.placement.links import Links
from molink.swarm.placement.placement import Candidate, candidate_from_device
from molinkd.cli import daemon_client
from molinkd.peer.agent.device_probe import (
    DeviceProbe,
    describe_probed_device,
    read_measured_device,
)
from molinkd.peer.home import Home
from molinkd.peer.settings import Settings, load_settings, read_options


@dataclass(frozen=True, slots=True)
class SwarmCapacity:
    """PCs and their links; ``place`` names them in a sentence.

    ``quantize`` is how this PC would serve a model.
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
        """Whether all PCs know how fast they read memory; else speeds are unknown."""
        return all(one.read_rate > 0 for one in self.candidates)


def find_capacity(home: Home) -> SwarmCapacity:
    """The capacity of the swarm by the daemon of ``home``, or of this PC if none runs."""
    settings = _load_settings(home)
    found = daemon_client.find_daemon(home)
    if found is not None and not found.is_demo:
        with contextlib.suppress(MolinkError):
            return read_capacity(daemon_client.fetch_status(found), settings.quantize)
    candidates = tuple(_own_candidates(home, settings))
    return SwarmCapacity("this PC", candidates, Links(), settings.quantize)


def read_capacity(status: dict[str, object], quantize: Quantize = "none") -> SwarmCapacity:
    """The capacity of a running swarm, from ``molink status --json``.

    Raises:
        WireError: the status is malformed.
    """
    found = decode_status(msgspec.json.encode(status))
    online = [one for one in found.peers if one.state == "online"]
    offers = (_peer_candidate(one, found) for one in online)
    candidates = tuple(one for one in offers if one is not None)
    num_pcs = len({one.primary_peer or one.peer for one in candidates})
    place = f"this swarm of {num_pcs} PCs" if num_pcs != 1 else "this swarm of 1 PC"
    return SwarmCapacity(place, candidates, _read_links(found, candidates), quantize)


def check_fit(entry: CatalogEntry, home: Home, status: dict[str, object]) -> None:
    """Check, before a download, that the swarm has memory for a model of the catalog.

    Raises:
        UsageError: it has not; says what would fit.
    """
    capacity = read_capacity(status, _load_settings(home).quantize)
    if not capacity.candidates:
        return

    def fit_of(other: CatalogEntry) -> ModelFit:
        model = ModelDescription.from_catalog(other)
        return estimate_fit(model, capacity.candidates, capacity.links, capacity.quantize)

    fit = fit_of(entry)
    if fit.quantize == capacity.quantize:
        return
    entries = load_catalog().entries
    family = [one for one in entries if one.family == entry.family and one.is_default]
    fitting = [one.name for one in family if fit_of(one).quantize == capacity.quantize]
    hint = f"Of {entry.family}, {', '.join(fitting)} would fit; " if fitting else ""
    raise UsageError(
        f"{fit.reason}. {hint}{home.format_command('search')} tells what fits. Nothing was "
        "downloaded"
    )


def _peer_candidate(peer: PeerStatus, status: SwarmStatus) -> Candidate | None:
    """The candidate of a PC that offers to hold layers.

    A PC of an older version tells no more than its memory.
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
    """The links of the serving rings, as their stages have measured them."""
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


def _load_settings(home: Home) -> Settings:
    remembered: dict[str, object] = {}
    with contextlib.suppress(UsageError):
        remembered = read_options(home.options)
    return load_settings(home, {}, os.environ, remembered)


def _own_candidates(home: Home, settings: Settings) -> Iterator[Candidate]:
    """This PC's devices as they were measured last; else one by its data sheet or its memory."""
    for index, place in enumerate((home, *home.device_homes())):
        device = read_measured_device(settings, place.device)
        if device is None and not index:
            device = describe_probed_device(settings, _guess_probe(settings))
        if device is not None:
            yield candidate_from_device(f"device {index}", "this PC", device)


def _guess_probe(settings: Settings) -> DeviceProbe:
    """What a measurement of the device would tell, as far as it is known without torch."""
    card = None if settings.devices[0] == "cpu" else _read_card()
    if card is not None:
        return card
    memory = psutil.virtual_memory()
    return _make_probe("cpu", "", memory.total, memory.available)


def _read_card() -> DeviceProbe | None:
    """The first NVIDIA card, with the rate of its data sheet if molink has it."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name, memory = str(pynvml.nvmlDeviceGetName(handle)), pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    found = _make_probe("cuda", name, memory.total, memory.free)
    with contextlib.suppress(UsageError):
        sheet = load_device(name)
        return msgspec.structs.replace(
            found,
            read_rate=sheet.memory_gbs * 1e9 * sheet.memory_efficiency,
            blocks=sheet.keeps_blocks,
            reads_pages=sheet.has_triton,
        )
    return found


def _make_probe(kind: str, name: str, total: int, free: int) -> DeviceProbe:
    return DeviceProbe(
        kind="cuda" if kind == "cuda" else "cpu",
        index=0,
        name=name,
        total=total,
        free=free,
        read_rate=0.0,
        bf16=True,
        blocks=True,
        threads=0,
        instructions="",
        torch="",
    )
