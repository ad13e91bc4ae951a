"""Time until many daemons form a swarm, and the cost of its control plane.

    python -m tools.swarm_bench [--peers 10,25,50] [--seconds 20] [--in-each 10] [--repeats 3]

All daemons run on this PC, ``--in-each`` per process, each with its own home, keys, sockets and
endpoint; the coordinator is a process as usual. Stages are emulated (:mod:`tools.emulation`), one
per layer of the bundled model; all other PCs are spare peers.

All have joined before. *Formed* is the time from the start until the last daemon reports the model
ready. Afterwards no requests are sent, so CPU and loopback traffic are the control plane's.
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
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from molinkd.peer.home import Home
from molinkd.peer.launch import (
    DaemonStartedEvent,
    Launch,
    ModelReadinessChangedEvent,
    SwarmOpenedEvent,
)
from molinkd.peer.settings import Settings
from tools.emulation.model import Emulation
from tools.swarm_bench.host import HostEvent, Order

_LOOPBACK = "lo" if sys.platform == "linux" else "Loopback Pseudo-Interface 1"
_START_S = 300.0


class HostProcess:
    """A process that runs several daemons."""

    def __init__(self, emulation: Path, report: "queue.Queue[HostEvent]") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.swarm_bench.host", str(emulation)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._events = report
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(msgspec.json.decode(line, type=HostEvent))

    def start(self, launches: list[Launch]) -> None:
        """Start a daemon per launch."""
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(Order(tuple(launches))) + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Stop all daemons."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Measured:
    """One swarm: time to form, and cost per peer and second without requests."""

    peers: int
    formed_s: float
    cpu_ms: float
    coordinator_ms: float
    kilobytes: float


class Bench:
    """Runs swarms in one folder."""

    def __init__(self, folder: Path, in_each: int) -> None:
        self._folder, self._in_each = folder, in_each
        self._events: queue.Queue[HostEvent] = queue.Queue()
        #: First control port of each daemon, kept over restarts.
        self._ports: dict[str, int] = {}
        rows = folder / "rows.bin"
        rows.write_bytes(os.urandom(64 * Emulation(activations="").row_bytes))
        self._emulation = folder / "emulation.json"
        made = Emulation(activations=str(rows), stages=16)
        self._emulation.write_bytes(msgspec.json.encode(made))

    def run(self, peers: int, seconds: float) -> Measured:
        """Let ``peers`` PCs join, restart all, and measure for ``seconds``."""
        homes = [self._folder / f"{peers}" / f"pc{number}" for number in range(peers)]
        self._join_all(homes)
        with ExitStack() as stack:
            hosts = list(self._start_hosts(len(homes), stack))
            time.sleep(5)  # exclude imports
            began = time.monotonic()
            for host, mine in zip(hosts, self._share_homes(homes), strict=True):
                host.start([self._launch_daemon(home, homes) for home in mine])
            formed = self._until_ready(homes) - began
            time.sleep(5)
            return self._poll_status(hosts, peers, formed, seconds)

    def _poll_status(
        self, hosts: list[HostProcess], peers: int, formed: float, seconds: float
    ) -> Measured:
        daemons = [psutil.Process(host.process.pid) for host in hosts]
        (coordinator,) = (
            child
            for child in daemons[0].children()
            if "molinkd.coordinator" in " ".join(child.cmdline())
        )
        before = _sum_cpu_time(daemons), _sum_cpu_time([coordinator]), _read_loopback()
        time.sleep(seconds)
        after = _sum_cpu_time(daemons), _sum_cpu_time([coordinator]), _read_loopback()
        cpu, central, carried = (b - a for a, b in zip(before, after, strict=True))
        return Measured(
            peers=peers,
            formed_s=formed,
            cpu_ms=1e3 * cpu / seconds / peers,
            coordinator_ms=1e3 * central / seconds / peers,
            kilobytes=carried / 1e3 / seconds / peers,
        )

    def _join_all(self, homes: list[Path]) -> None:
        """Let all join a swarm, then stop it; tokens limit the rate."""
        with ExitStack() as stack:
            hosts = list(self._start_hosts(len(homes), stack))
            hosts[0].start([self._launch_daemon(homes[0], homes)])
            token = ""
            while not token:
                event = self._next_event().event
                token = event.token if isinstance(event, SwarmOpenedEvent) else ""
            shares = list(self._share_homes(homes))
            for number, home in enumerate(homes[1:], 1):
                Home(home).create_folders()
                shutil.copy(Home(homes[0]).device, Home(home).device)
                host = next(index for index, share in enumerate(shares) if home in share)
                hosts[host].start([self._launch_daemon(home, homes, token)])
                self._until_listening(home)
                time.sleep(0.5 if number > 8 else 0.0)
            self._until_ready(homes)

    def _start_hosts(self, peers: int, stack: ExitStack) -> Iterator[HostProcess]:
        for _ in range(-(-peers // self._in_each)):
            host = HostProcess(self._emulation, self._events)
            stack.callback(host.end)
            yield host

    def _share_homes(self, homes: list[Path]) -> Iterator[list[Path]]:
        for first in range(0, len(homes), self._in_each):
            yield homes[first : first + self._in_each]

    def _launch_daemon(self, home: Path, homes: list[Path], token: str | None = None) -> Launch:
        first = home == homes[0]
        settings = Settings(
            name=home.name,
            host="127.0.0.1",
            api_port=0,
            coordinator_port=0,
            control_port=self._ports.get(str(home), 0),
            worker_ports=(0, 0),
            discovery=False,
            standby_worker=False,
            replicate_models=False,
            keep_awake=False,
            stages_per_host=min(64, len(homes)),
            device="cpu",
            min_peers=len(homes),
            min_stages=16,
            log_level="warning",
        )
        name = str(home)
        if first:
            return Launch(home=name, settings=settings, role="up", invite=255)
        return Launch(home=name, settings=settings, role="join", token=token)

    def _next_event(self) -> HostEvent:
        report = self._events.get(timeout=_START_S)
        if isinstance(report.event, DaemonStartedEvent):
            self._ports[report.home] = report.event.control_port
        return report

    def _until_listening(self, home: Path) -> None:
        while True:
            report = self._next_event()
            if report.home == str(home) and isinstance(report.event, DaemonStartedEvent):
                return

    def _until_ready(self, homes: list[Path]) -> float:
        """Wait for all daemons; return when the last one was ready."""
        ready: dict[str, float] = {}
        while len(ready) < len(homes):
            report = self._next_event()
            if isinstance(report.event, ModelReadinessChangedEvent):
                if report.event.ready:
                    ready[report.home] = report.at
                else:
                    ready.pop(report.home, None)
        return max(ready.values())


def _sum_cpu_time(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _read_loopback() -> int:
    return int(psutil.net_io_counters(pernic=True)[_LOOPBACK].bytes_sent)


def main() -> None:
    """Measure, and print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="10,25,50")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--in-each", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(
        "| daemons | formed in, s | CPU of each, ms/s | coordinator, ms/s for each | kB/s of each |"
    )
    print("|---:|---:|---:|---:|---:|")
    for peers in map(int, options.peers.split(",")):
        found = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(Path(folder), options.in_each)
                found.append(bench.run(peers, options.seconds))
        formed = [one.formed_s for one in found]
        print(
            f"| {peers} | {statistics.median(formed):.1f} ({min(formed):.1f}–{max(formed):.1f})"
            f" | {statistics.median(one.cpu_ms for one in found):.1f}"
            f" | {statistics.median(one.coordinator_ms for one in found):.2f}"
            f" | {statistics.median(one.kilobytes for one in found):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
