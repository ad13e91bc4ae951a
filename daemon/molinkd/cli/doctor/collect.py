"""Collects the facts for ``molink doctor``. What can't be determined stays unknown."""

import contextlib
import getpass
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

import molink
from molink.errors import MolinkError
from molinkd.cli import daemon_client
from molinkd.cli.daemon_client import RunningDaemon
from molinkd.cli.doctor.collect_network import collect_network
from molinkd.cli.doctor.facts import (
    DeviceFacts,
    DoctorFacts,
    HostFacts,
    NvidiaCard,
    PeerFact,
    SwarmFacts,
)
from molinkd.cli.doctor.run_program import run_program
from molinkd.cli.translation import tr
from molinkd.peer.agent.device_probe import num_worker_threads
from molinkd.peer.agent.kernel_self_test import SelfTestResult, run_self_test, save_disabled_kernels
from molinkd.peer.artifacts.installed_models import list_installed_models
from molinkd.peer.home import Home
from molinkd.peer.settings import Settings, load_settings, read_options

_NVIDIA_VENDOR = "0x10de"

Say = Callable[[str], None]


def collect_facts(home: Home, say: Say) -> DoctorFacts:
    """Collect the facts of this PC and its swarm in some seconds; reports progress to ``say``."""
    settings, options_error = _load_settings(home)
    found = daemon_client.find_daemon(home)
    if found is not None and found.is_demo:
        found = None
    say(tr("Checking this PC, its network and the kernels of its device …"))
    swarm, trouble = (None, "") if found is None else _collect_swarm(found)
    with ThreadPoolExecutor(1) as pool:  # scanning the network is only waiting
        scan = pool.submit(collect_network, settings, found is not None)
        test = _run_self_test(home, settings, "" if swarm is None else swarm.model)
        network = scan.result()
    device = DeviceFacts(
        system=sys.platform,
        test=test,
        configured_device=settings.devices[0],
        card=read_card(run_program("nvidia-smi")),
        is_plugged_in=_is_plugged_in(),
    )
    return DoctorFacts(
        device=device,
        network=network,
        host=_collect_host(home, settings, options_error, trouble),
        daemon_pid=0 if found is None else found.run_file.pid,
        swarm=swarm,
    )


def _load_settings(home: Home) -> tuple[Settings, str]:
    """Load the settings for the next start; without the saved options if those are corrupt."""
    options_error, options = "", {}
    try:
        options = read_options(home.options)
    except MolinkError as error:
        options_error = str(error)
    return load_settings(home, {}, os.environ, options), options_error


def _run_self_test(home: Home, settings: Settings, served: str) -> SelfTestResult:
    model = _find_model(home, served) if served else None
    test = run_self_test(settings.devices[0], num_worker_threads(settings), model=model)
    if test.results and home.root.is_dir():
        with contextlib.suppress(OSError, MolinkError):
            save_disabled_kernels(home.disabled_kernels, test)
            # Make workers repeat their kernel checks.
            home.kernel_checks.unlink(missing_ok=True)
    return test


def _find_model(home: Home, name: str) -> Path | None:
    """Return the local folder of a model, if any."""
    called = (one.path for one in list_installed_models(home) if one.has_name(name))
    return next((path for path in called if (path / "config.json").is_file()), None)


# --- the swarm --------------------------------------------------------------------------------


def _collect_swarm(found: RunningDaemon) -> tuple[SwarmFacts | None, str]:
    """Return the swarm by the daemon here, or the reason why it is unknown."""
    began = time.time()
    try:
        status = daemon_client.fetch_status(found)
    except MolinkError as error:
        return None, str(error)
    return read_swarm(status, found.run_file.pid, began, time.time()), str(
        status.get("trouble") or ""
    )


def read_swarm(status: dict[str, Any], pid: int, began: float, ended: float) -> SwarmFacts:
    """Extract facts from ``molink status --json``, requested between two local times."""
    peers = [
        PeerFact(
            id=str(one.get("id", "")),
            name=str(one.get("name", "")),
            version=str(one.get("version", "")),
            address=str(one.get("address", "")),
            is_online=one.get("state") == "online",
        )
        for one in status.get("peers", ())
    ]
    me = next((one["id"] for one in status.get("peers", ()) if one.get("daemon_pid") == pid), "")
    theirs, router = status.get("time"), status.get("router", {})
    return SwarmFacts(
        id=str(status.get("swarm", "")),
        own_id=str(me),
        leader=str(status.get("leader", "")),
        pairing_port=int(status.get("pairing_port") or 0),
        model=str(status.get("model") or ""),
        trouble=str(status.get("trouble") or ""),
        peers=tuple(peers),
        unreachable=tuple((str(by), str(to)) for by, to in status.get("unreachable", ())),
        relayed=tuple(
            (str(one["from"]), str(one["to"]), str(one["through"]))
            for one in status.get("relays", ())
            if not one.get("punched")
        ),
        punched=tuple(
            (str(one["from"]), str(one["to"]))
            for one in status.get("relays", ())
            if one.get("punched")
        ),
        router=str(router.get("kind", "")),
        forwarded=str(router.get("forwards", "")),
        forwarded_by=str(router.get("protocol", "")),
        not_forwarded=str(router.get("refuses", "")),
        clock_offset_s=None if theirs is None else (began + ended) / 2 - float(theirs),
        clock_error_s=(ended - began) / 2,
    )


# --- this PC ----------------------------------------------------------------------------------


def _collect_host(home: Home, settings: Settings, options_error: str, trouble: str) -> HostFacts:
    root = _nearest_folder(home.root)
    battery = _is_on_battery()
    return HostFacts(
        system=sys.platform,
        home=home.root,
        user=_user_name(),
        write_error=_write_error(root),
        is_open_to_others=sys.platform != "win32" and _is_open_to_others(home.root),
        options_error=options_error,
        free_bytes=psutil.disk_usage(str(root)).free,
        model_bytes=_folder_size(home.models),
        year=time.localtime().tm_year,
        keep_awake=settings.keep_awake,
        has_inhibitor=sys.platform != "linux" or shutil.which("systemd-inhibit") is not None,
        on_battery=battery,
        version=molink.__version__,
        trouble=trouble,
    )


def _nearest_folder(path: Path) -> Path:
    """Return the folder, or the parent in which it would be created."""
    return next(one for one in (path, *path.parents) if one.is_dir())


def _write_error(folder: Path) -> str:
    probe = folder / f".molink-doctor-{os.getpid()}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_open_to_others(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & 0o077)
    except OSError:
        return False


def _folder_size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "YOU"


def _is_on_battery() -> bool:
    """Whether this PC runs on battery."""
    with contextlib.suppress(OSError, RuntimeError, AttributeError):
        found = psutil.sensors_battery()
        return found is not None and found.power_plugged is False
    return False


# --- the GPU ----------------------------------------------------------------------------------


def read_card(output: tuple[int, str] | None) -> NvidiaCard | None:
    """Parse the output of ``nvidia-smi``: versions in the header, a row per GPU."""
    if output is None:
        return None
    code, text = output
    if code:
        return NvidiaCard(error=" ".join(text.split())[:300] or f"nvidia-smi ended with {code}")
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", text)
    names = re.findall(r"^\|\s+\d+\s{2,}(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s+\|", text, re.M)
    return NvidiaCard(
        names=tuple(re.sub(r"\s+(?:WDDM|TCC|MCDM)$", "", name) for name in names),
        driver=driver[1] if driver else "",
        cuda=cuda[1] if cuda else "",
    )


def _is_plugged_in() -> bool | None:
    """Whether an NVIDIA display adapter is on the PCI bus; Linux only."""
    devices = Path("/sys/bus/pci/devices")
    if sys.platform != "linux" or not devices.is_dir():
        return None
    for device in devices.iterdir():
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
            if vendor == _NVIDIA_VENDOR and kind.startswith("0x03"):
                return True
    return False
