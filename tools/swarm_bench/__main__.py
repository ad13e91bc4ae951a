"""Time until many daemons form a swarm, and the cost of its control plane.

    python -m tools.swarm_bench [--peers 8,25,50,64] [--seconds 20] [--repeats 3] [--folder F]

Each daemon is a process of this PC with its own home, keys, sockets and endpoint; coordinator and
workers are processes as usual. Stages are emulated (:mod:`tools.emulation`), one per layer of the
bundled model, and import no torch; all other PCs are spare peers.

All have joined before, and ``--folder`` keeps them for the next run. *Formed* is the time from the
start of the first process, imports included, until the last daemon reports the model ready;
*imports* is the CPU time of all daemons' imports, measured with one. Afterwards no requests are
sent, so CPU, messages and loopback traffic are the control plane's.
"""

import argparse
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from molinkd.cli.daemon_client import fetch_status, require_daemon
from molinkd.peer.home import Home
from molinkd.peer.launch import (
    DaemonStartedEvent,
    Launch,
    ModelReadinessChangedEvent,
    SwarmOpenedEvent,
    read_event,
)
from molinkd.peer.settings import Settings
from tools.emulation.model import Emulation

_LOOPBACK = "lo" if sys.platform == "linux" else "Loopback Pseudo-Interface 1"
_START_S = 300.0
#: Starts whose imports are measured.
_IMPORTS = 3
#: Control port of the first daemon; the others have the next ones.
_FIRST_PORT = 21000
_COLUMNS = (
    "daemons",
    "formed in, s",
    "imports, CPU s",
    "CPU of each, ms/s",
    "coordinator, ms/s for each",
    "messages/s of each",
    "kB/s of each",
    "threads of each",
)


@dataclass(frozen=True)
class HostEvent:
    """An event of a daemon, at a monotonic time."""

    home: Path
    at: float
    event: object


class HostProcess:
    """A daemon, whose events go to a queue."""

    def __init__(
        self, command: list[str], launch: Launch, events: "queue.Queue[HostEvent]"
    ) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._home, self._events = Path(launch.home), events
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(launch) + b"\n")
        self.process.stdin.flush()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while (event := read_event(self.process.stdout)) is not None:  # type: ignore[arg-type]
            self._events.put(HostEvent(self._home, time.monotonic(), event))

    def stop(self) -> None:
        """Stop the daemon; :meth:`wait` for it."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> None:
        """Wait for the end, and enforce it after a minute."""
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Measured:
    """One swarm: time to form, and cost per peer and second without requests."""

    formed_s: float
    cpu_ms: float
    coordinator_ms: float
    messages: float
    kilobytes: float
    threads: int


class Bench:
    """Runs one swarm in one folder."""

    def __init__(self, folder: Path, peers: int) -> None:
        self._homes = [folder / f"{peers}" / f"pc{number}" for number in range(peers)]
        self._events: queue.Queue[HostEvent] = queue.Queue()
        rows = folder / "rows.bin"
        rows.write_bytes(os.urandom(64 * Emulation(activations="").row_bytes))
        emulation = folder / "emulation.json"
        made = Emulation(activations=str(rows), stages=16, serves=False)
        emulation.write_bytes(msgspec.json.encode(made))
        self._command = [sys.executable, "-m", "tools.swarm_bench.host", str(emulation)]

    def run_swarm(self, seconds: float) -> Measured:
        """Start all daemons, which have joined, and measure for ``seconds``."""
        with ExitStack() as stack:
            began = time.monotonic()
            hosts = [self._start_daemon(home, stack) for home in self._homes]
            formed = self._until_ready() - began
            time.sleep(5)
            return self._measure_idle(hosts, formed, seconds)

    def _measure_idle(self, hosts: list[HostProcess], formed: float, seconds: float) -> Measured:
        daemons = [psutil.Process(host.process.pid) for host in hosts]
        (coordinator,) = (
            child
            for child in daemons[0].children()
            if "molinkd.coordinator" in " ".join(child.cmdline())
        )

        def read_counters() -> tuple[float, ...]:
            return (
                _sum_cpu_time(daemons),
                _sum_cpu_time([coordinator]),
                self._count_messages(),
                float(psutil.net_io_counters(pernic=True)[_LOOPBACK].bytes_sent),
            )

        before = read_counters()
        time.sleep(seconds)
        after = read_counters()
        each = [(b - a) / seconds / len(hosts) for a, b in zip(before, after, strict=True)]
        return Measured(
            formed_s=formed,
            cpu_ms=1e3 * each[0],
            coordinator_ms=1e3 * each[1],
            messages=each[2],
            kilobytes=each[3] / 1e3,
            threads=max(one.num_threads() for one in daemons),
        )

    def _count_messages(self) -> float:
        """Control messages of all daemons so far."""
        counters = fetch_status(require_daemon(self._homes[0]))["counters"]
        return float(counters["received"] + counters["sent"])

    def join_all(self) -> None:
        """Let all join a swarm, unless they have, then stop it; tokens limit the rate."""
        if (self._homes[-1] / "swarm.json").exists():
            return
        with ExitStack() as stack:
            self._start_daemon(self._homes[0], stack, invite=255)
            token = ""
            while not token:
                event = self._next_event().event
                token = event.token if isinstance(event, SwarmOpenedEvent) else ""
            for number, home in enumerate(self._homes[1:], 1):
                Home(home).create_folders()
                shutil.copy(Home(self._homes[0]).device, Home(home).device)
                self._start_daemon(home, stack, token)
                self._until_listening(home)
                time.sleep(0.5 if number > 8 else 0.0)
            self._until_ready()

    def _start_daemon(
        self, home: Path, stack: ExitStack, token: str | None = None, invite: int = 0
    ) -> HostProcess:
        number = self._homes.index(home)
        settings = Settings(
            name=home.name,
            host="127.0.0.1",
            api_port=0,
            coordinator_port=0,
            control_port=_FIRST_PORT + number,
            worker_ports=(0, 0),
            discovery=False,
            standby_worker=False,
            replicate_models=False,
            keep_awake=False,
            stages_per_host=min(64, len(self._homes)),
            device="cpu",
            min_peers=len(self._homes),
            min_stages=16,
            log_level="warning",
        )
        launch = Launch(
            home=str(home),
            settings=settings,
            role="join" if number else "up",
            invite=invite,
            token=token,
        )
        host = HostProcess(self._command, launch, self._events)
        stack.callback(host.wait)
        stack.callback(host.stop)
        return host

    def _next_event(self) -> HostEvent:
        return self._events.get(timeout=_START_S)

    def _until_listening(self, home: Path) -> None:
        while True:
            report = self._next_event()
            if report.home == home and isinstance(report.event, DaemonStartedEvent):
                return

    def _until_ready(self) -> float:
        """Wait for all daemons; return when the last one was ready."""
        ready: dict[Path, float] = {}
        while len(ready) < len(self._homes):
            report = self._next_event()
            if isinstance(report.event, ModelReadinessChangedEvent):
                if report.event.ready:
                    ready[report.home] = report.at
                else:
                    ready.pop(report.home, None)
        return max(ready.values())


def _sum_cpu_time(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure_imports() -> float:
    """CPU time of a daemon's imports, in seconds."""
    before = os.times()
    for _ in range(_IMPORTS):
        subprocess.run([sys.executable, "-c", "import tools.swarm_bench.host"], check=True)
    after = os.times()
    spent = after.children_user + after.children_system
    return (spent - before.children_user - before.children_system) / _IMPORTS


def _format_row(peers: int, imports_s: float, found: list[Measured]) -> str:
    formed = [one.formed_s for one in found]
    figures = [
        f"{peers}",
        f"{statistics.median(formed):.1f} ({min(formed):.1f}–{max(formed):.1f})",
        f"{peers * imports_s:.1f}",
        *(
            f"{statistics.median(values):.{digits}f}"
            for values, digits in (
                ([one.cpu_ms for one in found], 1),
                ([one.coordinator_ms for one in found], 2),
                ([one.messages for one in found], 1),
                ([one.kilobytes for one in found], 2),
                ([one.threads for one in found], 0),
            )
        ),
    ]
    return f"| {' | '.join(figures)} |"


def main() -> None:
    """Measure, and print a table as Markdown."""
    # Installed daemons find their compiled modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="8,25,50,64")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the homes here")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        print(f"| {' | '.join(_COLUMNS)} |\n|{'---:|' * len(_COLUMNS)}", flush=True)
        for peers in map(int, options.peers.split(",")):
            bench = Bench(folder, peers)
            bench.join_all()
            imports_s = measure_imports()
            found = [bench.run_swarm(options.seconds) for _ in range(options.repeats)]
            print(_format_row(peers, imports_s, found), flush=True)


if __name__ == "__main__":
    main()
