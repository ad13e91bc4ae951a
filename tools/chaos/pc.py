"""One PC of a run: its home, ports and processes."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from molink.cpu_isa import AVX2_ONLY

Role = Literal["daemon", "coordinator", "worker", "other"]

ROOT = Path(__file__).resolve().parents[2]
#: First import paths of a PC's processes: the adjustable clock, and this checkout.
_PATHS = (ROOT / "tools" / "chaos" / "clock", ROOT, ROOT / "daemon")
#: Worker ports per PC; a dying worker may still hold one.
WORKER_PORTS = 8
#: Below the ephemeral range, so that no outgoing connection takes a port between starts.
_PORTS = range(20_000, 32_000)
#: Longest wait for an orderly exit, in seconds.
_END_S = 40.0


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Ports of a PC; others reach them at ``advertised``."""

    host: str
    advertised: str
    endpoint: int
    coordinator: int
    control: int
    workers: tuple[int, int]

    @classmethod
    def free(cls, host: str, advertised: str, rng: random.Random) -> "ListenAddress":
        """Pick ports that are free now."""
        count = 3 + WORKER_PORTS
        while True:
            first = rng.randrange(_PORTS.start, _PORTS.stop - count)
            ports = range(first, first + count)
            if all(_is_free(address, p) for p in ports for address in (host, advertised)):
                return cls(host, advertised, first, first + 1, first + 2, (first + 3, ports[-1]))

    @property
    def for_others(self) -> tuple[int, ...]:
        """The ports that other PCs connect to."""
        return (self.coordinator, self.control, *range(self.workers[0], self.workers[1] + 1))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


class Pc:
    """A home and its processes; restarts keep home and ports."""

    def __init__(
        self,
        name: str,
        home: Path,
        place: ListenAddress,
        options: Sequence[str],
        module: str = "molinkd",
    ) -> None:
        """``options`` are appended to ``molink up`` and ``molink join``.

        ``module`` is run in place of ``molink``.
        """
        self.name = name
        self.home = home
        self.place = place
        self._options = list(options)
        self._module = module
        self.process: subprocess.Popen[bytes] | None = None
        #: How often its daemon ended; that ends the streams it served.
        self.deaths = 0
        #: Exit codes of daemons that ended on their own.
        self.strange_exits: list[int] = []
        home.mkdir(parents=True, exist_ok=True)
        self._clock = home / "clock"

    @property
    def url(self) -> str:
        """The root of its endpoint."""
        return f"http://127.0.0.1:{self.place.endpoint}"

    @property
    def output(self) -> str:
        """Everything its daemons printed."""
        return (self.home / "terminal.log").read_text(encoding="utf-8", errors="replace")

    def start(self, *command: str) -> None:
        """Run ``molink COMMAND`` with the PC's options."""
        assert self.process is None
        arguments = [*command, *self._make_addresses(), *self._options]
        with (self.home / "terminal.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self._module, *arguments],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )

    def _make_addresses(self) -> list[str]:
        place = self.place
        first, last = place.workers
        options = ["--name", self.name, "--host", place.host, "--advertise", place.advertised]
        options += ["--api-port", str(place.endpoint), "--control-port", str(place.control)]
        return [*options, "--worker-ports", f"{first}-{last}", "--threads", "1"]

    def environment(self) -> dict[str, str]:
        """Environment of its processes."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith("MOLINK_") or k in AVX2_ONLY
        }
        return {
            **kept,
            "MOLINK_HOME": str(self.home),
            # Only `up` has an option for this setting.
            "MOLINK_COORDINATOR_PORT": str(self.place.coordinator),
            "PYTHONPATH": os.pathsep.join(map(str, _PATHS)),
            "PYTHONIOENCODING": "utf-8",
            "CHAOS_CLOCK": str(self._clock),
            "OMP_NUM_THREADS": "1",
        }

    def set_clock(self, seconds: float) -> None:
        """Shift its wall clock by ``seconds``."""
        self._clock.write_text(str(seconds), encoding="ascii")

    @property
    def running(self) -> bool:
        """Whether its daemon runs; records an unexpected exit."""
        if self.process is None:
            return False
        code = self.process.poll()
        if code is None:
            return True
        self.strange_exits.append(code)
        self.deaths += 1
        self.process = None
        return False

    def kill(self) -> None:
        """Kill its daemon; children notice by themselves."""
        if self.running:
            assert self.process is not None
            self.deaths += 1
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """Stop it as a user would, or raise :class:`TimeoutError`."""
        if not self.running:
            return
        assert self.process is not None
        stop = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM)
        self.process.send_signal(stop)
        self.ended()

    def ended(self) -> None:
        """Wait for a stopping daemon, or raise :class:`TimeoutError`."""
        assert self.process is not None
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise TimeoutError(f"{self.name} did not end within {_END_S:.0f} s") from None
        finally:
            self.process = None

    def processes(self, role: Role | None = None) -> list[psutil.Process]:
        """Find its processes, the daemon first, optionally of one role."""
        found = find_processes(self.home)
        daemon = 0 if self.process is None else self.process.pid
        found.sort(key=lambda process: process.pid != daemon)
        return [p for p in found if role is None or self.role(p) == role]

    def role(self, process: psutil.Process) -> Role:
        """Role of one of its processes."""
        if self.process is not None and process.pid == self.process.pid:
            return "daemon"
        roles: Mapping[str, Role]
        roles = {"molinkd.worker": "worker", "molinkd.coordinator": "coordinator"}
        with contextlib.suppress(psutil.NoSuchProcess):
            return next((roles[word] for word in process.cmdline() if word in roles), "other")
        return "other"


def find_processes(home: Path) -> list[psutil.Process]:
    """Find all live processes with that home."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if find_home(process.pid) == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def find_home(pid: int) -> str | None:
    """Home in a process's environment; ``None`` if absent or unreadable."""
    try:
        home: str | None = psutil.Process(pid).environ().get("MOLINK_HOME")
    except (psutil.Error, OSError):
        return None
    return home
