"""Finds out what ``molink doctor`` judges; whatever can't be found out here stays unknown."""

import contextlib
import getpass
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

import molink
from molink.errors import MolinkError
from molinkd.cli import local_daemon
from molinkd.cli.doctor.facts import (
    Card,
    DeviceFacts,
    Facts,
    PeerFact,
    PlaceFacts,
    SwarmFacts,
)
from molinkd.cli.doctor.gather_network import network_facts
from molinkd.cli.local_daemon import Found
from molinkd.peer.agent.device_probe import worker_threads
from molinkd.peer.agent.self_test import SelfTest, remember, self_test
from molinkd.peer.artifacts.models_here import models_here
from molinkd.peer.home import Home
from molinkd.peer.platform import child_options
from molinkd.peer.remembered import read_options
from molinkd.peer.settings import Settings, load_settings

#: Of another program that is asked something.
_PATIENCE_S = 10.0
_NVIDIA = "0x10de"

Say = Callable[[str], None]


def gather(home: Home, say: Say) -> Facts:
    """All facts of this PC and its swarm; takes some seconds, and ``say`` what it is about."""
    settings, damaged = _settings(home)
    found = local_daemon.find_daemon(home)
    if found is not None and found.demo:
        found = None
    say("Looking at this PC and its network …")
    swarm, trouble = (None, "") if found is None else _swarm(found)
    network = network_facts(settings, found is not None)
    say("Trying the kernels of its device …")
    test = _tested(home, settings, "" if swarm is None else swarm.model)
    device = DeviceFacts(
        system=sys.platform,
        test=test,
        wanted=settings.devices[0],
        card=read_card(_ask(["nvidia-smi"])),
        on_bus=_on_bus(),
    )
    return Facts(
        device=device,
        network=network,
        place=_place(home, settings, damaged, trouble),
        daemon=0 if found is None else found.note.pid,
        swarm=swarm,
    )


def _settings(home: Home) -> tuple[Settings, str]:
    """As the next start would have them; without the last start's options if they are damaged."""
    damaged, options = "", {}
    try:
        options = read_options(home.options)
    except MolinkError as error:
        damaged = str(error)
    return load_settings(home, {}, os.environ, options), damaged


def _tested(home: Home, settings: Settings, served: str) -> SelfTest:
    model = _model(home, served) if served else None
    test = self_test(settings.devices[0], worker_threads(settings), model=model)
    if test.results and home.root.is_dir():
        with contextlib.suppress(OSError, MolinkError):
            remember(home.avoid, test)
            # Workers try again what they have found before.
            home.proofs.unlink(missing_ok=True)
    return test


def _model(home: Home, name: str) -> Path | None:
    """The folder of the model called ``name``, as far as it is on this PC."""
    called = (one.path for one in models_here(home) if one.is_called(name))
    return next((path for path in called if (path / "config.json").is_file()), None)


# --- the swarm --------------------------------------------------------------------------------


def _swarm(found: Found) -> tuple[SwarmFacts | None, str]:
    """The swarm by the daemon here, or why it can't be asked."""
    began = time.time()
    try:
        status = local_daemon.fetch_status(found)
    except MolinkError as error:
        return None, str(error)
    return read_swarm(status, found.note.pid, began, time.time()), str(status.get("trouble") or "")


def read_swarm(status: dict[str, Any], pid: int, began: float, ended: float) -> SwarmFacts:
    """What of ``molink status --json`` counts; it was asked between two times of this PC."""
    peers = [
        PeerFact(
            id=str(one.get("id", "")),
            name=str(one.get("name", "")),
            version=str(one.get("version", "")),
            address=str(one.get("address", "")),
            here=one.get("state") == "here",
        )
        for one in status.get("peers", ())
    ]
    me = next((one["id"] for one in status.get("peers", ()) if one.get("daemon_pid") == pid), "")
    theirs = status.get("time")
    return SwarmFacts(
        id=str(status.get("swarm", "")),
        me=str(me),
        leader=str(status.get("leader", "")),
        porch=int(status.get("porch") or 0),
        model=str(status.get("model") or ""),
        trouble=str(status.get("trouble") or ""),
        peers=tuple(peers),
        closed=tuple((str(by), str(to)) for by, to in status.get("unreachable", ())),
        relayed=tuple(
            (str(one["from"]), str(one["to"]), str(one["through"]))
            for one in status.get("relays", ())
        ),
        clock=None if theirs is None else (began + ended) / 2 - float(theirs),
        unsure=(ended - began) / 2,
    )


# --- this PC ----------------------------------------------------------------------------------


def _place(home: Home, settings: Settings, damaged: str, trouble: str) -> PlaceFacts:
    root = _nearest(home.root)
    battery = _battery()
    return PlaceFacts(
        system=sys.platform,
        home=home.root,
        user=_user(),
        unwritable=_unwritable(root),
        open_to_others=sys.platform != "win32" and _open_to_others(home.root),
        damaged=damaged,
        free=psutil.disk_usage(str(root)).free,
        models=_size(home.models),
        year=time.localtime().tm_year,
        keep_awake=settings.keep_awake,
        inhibitor=sys.platform != "linux" or shutil.which("systemd-inhibit") is not None,
        on_battery=battery,
        version=molink.__version__,
        trouble=trouble,
    )


def _nearest(path: Path) -> Path:
    """The folder, or the one in which it would be made."""
    return next(one for one in (path, *path.parents) if one.is_dir())


def _unwritable(folder: Path) -> str:
    probe = folder / f".molink-doctor-{os.getpid()}"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _open_to_others(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & 0o077)
    except OSError:
        return False


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "YOU"


def _battery() -> bool:
    """Whether this PC runs on its battery now."""
    with contextlib.suppress(OSError, RuntimeError, AttributeError, NotImplementedError):
        found = psutil.sensors_battery()
        return found is not None and found.power_plugged is False
    return False


# --- the GPU ----------------------------------------------------------------------------------


def _ask(command: Sequence[str]) -> tuple[int, str] | None:
    """Exit code and output of another program; ``None`` if there is none of that name."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_S,
            check=False,
            **child_options(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def read_card(told: tuple[int, str] | None) -> Card | None:
    """What ``nvidia-smi`` has printed: its head has the versions, a row each card's name."""
    if told is None:
        return None
    code, text = told
    if code:
        return Card(error=" ".join(text.split())[:300] or f"nvidia-smi ended with {code}")
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", text)
    names = re.findall(r"^\|\s+\d+\s{2,}(\S.*?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s+\|", text, re.M)
    return Card(
        names=tuple(re.sub(r"\s+(?:WDDM|TCC|MCDM)$", "", name) for name in names),
        driver=driver[1] if driver else "",
        cuda=cuda[1] if cuda else "",
    )


def _on_bus() -> bool | None:
    """Whether an NVIDIA display adapter is plugged in, where Linux tells it."""
    devices = Path("/sys/bus/pci/devices")
    if sys.platform != "linux" or not devices.is_dir():
        return None
    for device in devices.iterdir():
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
            if vendor == _NVIDIA and kind.startswith("0x03"):
                return True
    return False
