"""The PCs on which a model could be placed: those of the running swarm, or this one."""

import contextlib
import os
from collections.abc import Iterator

import msgspec
import psutil

from molink.checkpoint.hub_catalog import CatalogEntry
from molink.errors import MolinkError, UsageError
from molink.sim.profiles import load_device
from molink.sim.swarm_capacity import SwarmCapacity, explain_misfit, read_capacity
from molink.swarm.controller.status_schema import decode_status
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


def find_capacity(home: Home) -> SwarmCapacity:
    """The capacity of the swarm by the daemon of ``home``, or of this PC if none runs."""
    settings = _load_settings(home)
    found = daemon_client.find_daemon(home)
    if found is not None and not found.is_demo:
        with contextlib.suppress(MolinkError):
            return read_capacity(
                decode_status(msgspec.json.encode(daemon_client.fetch_status(found))),
                settings.quantize,
            )
    candidates = tuple(_own_candidates(home, settings))
    return SwarmCapacity("this PC", candidates, Links(), settings.quantize)


def check_fit(entry: CatalogEntry, home: Home, status: dict[str, object]) -> None:
    """Check, before a download, that the swarm has memory for a model of the catalog.

    Raises:
        UsageError: it has not; says what would fit.
    """
    found = decode_status(msgspec.json.encode(status))
    why = explain_misfit(entry, read_capacity(found, _load_settings(home).quantize))
    if why:
        search = home.format_command("search")
        raise UsageError(f"{why}; {search} tells what fits. Nothing was downloaded")


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
    """Estimate the device's measurement without importing torch."""
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
