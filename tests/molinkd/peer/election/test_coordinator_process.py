"""The supervised coordinator process, with fake executables."""

import asyncio
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from molink.errors import PortInUse, StateError, UsageError
from molink.swarm.election.events import StartCoordinatorAction
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.election import coordinator_process as coordinator_module
from molinkd.peer.election.coordinator_process import CoordinatorProcess, create_coordinator_process
from molinkd.peer.home import Home
from molinkd.peer.settings import Settings, load_settings
from tests.support.net import Net

GOOD = """
import json, sys
print("some other line")
port = int(sys.argv[sys.argv.index("--port") + 1]) or 4321
print(json.dumps({"port": port, "public_key": "k", "swarm": "s"}), flush=True)
sys.stdin.read()
"""
BAD = "import sys; print('error: the state is damaged', file=sys.stderr); sys.exit(1)"


def make(tmp_path: Path, code: str) -> CoordinatorProcess:
    return CoordinatorProcess(
        lambda port: ["--port", str(port)], 0, tmp_path, (sys.executable, "-c", code)
    )


async def test_it_is_restarted_on_the_same_port(
    tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "BACK_OFF_S", (0.01,))
    process = make(tmp_path, GOOD)
    announcement = await process.start()
    assert (announcement.port, announcement.swarm) == (4321, "s")
    first = process.pid
    psutil.Process(first).kill()
    await net.until(lambda: process.pid not in (0, first))
    second = process.pid
    # The process has a command line once it has replaced its parent's program.
    await net.until(lambda: psutil.Process(second).cmdline())
    assert "4321" in psutil.Process(second).cmdline()
    await process.close()
    assert not psutil.pid_exists(second)
    assert process.pid == 0


NOTING = """
import json, pathlib, sys
print(json.dumps({"port": 4321, "public_key": "k", "swarm": "s", "term": 3}), flush=True)
for line in sys.stdin:
    pathlib.Path(sys.argv[-1]).write_text(line)
"""


async def test_a_raised_term_survives_a_restart(
    tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "BACK_OFF_S", (0.01,))
    reported = tmp_path / "told"
    process = CoordinatorProcess(
        lambda port: ["--port", str(port), str(reported)],
        0,
        tmp_path,
        (sys.executable, "-u", "-c", NOTING),
    )
    await process.start()
    first = process.pid
    psutil.Process(first).kill()
    process.raise_term(7)
    await net.until(lambda: reported.exists() and reported.read_text(encoding="utf-8") == "7\n")
    assert process.pid != first
    await process.close()


EXITING = """
import json, sys
with open(sys.argv[-2], "a") as runs:
    runs.write("x")
print(json.dumps({"port": 4321, "public_key": "k", "swarm": "s"}), flush=True)
sys.stdin.readline()
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize(("code", "runs"), [(1, 3), (StateError.exit_code, 2)])
async def test_repeated_failures_are_reported(
    code: int, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported sooner if the state can't be written, since a restart seldom helps."""
    monkeypatch.setattr(coordinator_module, "BACK_OFF_S", (0.01,))
    started = tmp_path / "started"
    failing = asyncio.Event()
    process = CoordinatorProcess(
        lambda port: ["--port", str(port), str(started), str(code)],
        0,
        tmp_path,
        (sys.executable, "-c", EXITING),
        failing.set,
    )
    await process.start()
    process.raise_term(7)  # each run exits when it reads this
    await failing.wait()
    assert started.read_text(encoding="utf-8") == "x" * runs
    await process.close()


async def test_startup_failures_quote_the_reason(tmp_path: Path) -> None:
    process = make(tmp_path, BAD)
    with pytest.raises(UsageError, match="the state is damaged"):
        await process.start()
    await process.close()


async def test_a_chosen_port_in_use_keeps_its_exit_code(tmp_path: Path) -> None:
    """Uses the real coordinator; the first coordinator of a swarm takes no other port."""
    home = Home(tmp_path / "home").create_folders()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {"host": "127.0.0.1", "coordinator_port": port, "discovery": False}
        host = ChosenPort(load_settings(home, options, {}), home, home.load_keys())
        process = create_coordinator_process(host, None, None, StartCoordinatorAction(0), leader="")
        with pytest.raises(PortInUse, match=f"port {port} is in use"):
            await process.start()


@dataclass(frozen=True, slots=True)
class ChosenPort:
    settings: Settings
    home: Home
    keys: KeyPair
    addresses: tuple[str, ...] = ()
