"""Two namespaces joined by a veth pair, limited by the kernel's token bucket: no relay."""

import contextlib
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from tools.wan.namespaces import (
    Namespaces,
    RigError,
    enter_command,
    require_support,
    run_ip,
    run_system,
)

#: Seconds that an end may take to come up; the kernel reports it up to a second later.
_UP_S = 10.0


class VethPair:
    """A fast link without delay during a ``with`` block; used like a rig."""

    def __init__(self, mbps: float = 1000.0, *, congestion: str = "cubic") -> None:
        self._mbps = mbps
        self._spaces = Namespaces(2, congestion)
        self._started: list[subprocess.Popen[Any]] = []
        self._network = "10.77.0"

    def __enter__(self) -> Self:
        require_support()
        try:
            self._spaces.create()
            one, two = self._spaces.names
            peer = ("peer", "name", "wan0", "netns", two)
            run_ip("-n", one, "link", "add", "wan0", "type", "veth", *peer)
            for index, name in enumerate(self._spaces.names):
                run_ip("-n", name, "address", "add", f"{self.address(index)}/24", "dev", "wan0")
                run_ip("-n", name, "link", "set", "wan0", "up")
                bucket = ("rate", f"{self._mbps}mbit", "burst", "256kb", "latency", "20ms")
                run_system("tc", "-n", name, "qdisc", "add", "dev", "wan0", "root", "tbf", *bucket)
            for name in self._spaces.names:
                _wait_until_up(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes and clean up."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self._started.clear()
        self._spaces.remove()

    def address(self, index: int) -> str:
        """The IPv4 address of end ``index``."""
        return f"{self._network}.{index + 1}"

    def renumber(self, network: str) -> None:
        """Move both ends to another network (first three bytes)."""
        for index, name in enumerate(self._spaces.names):
            run_ip("-n", name, "address", "flush", "dev", "wan0")
            run_ip("-n", name, "address", "add", f"{network}.{index + 1}/24", "dev", "wan0")
        self._network = network

    def run(self, index: int, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a program at end ``index``; it is killed when the pair closes."""
        process = subprocess.Popen([*enter_command(self._spaces.names[index]), *argv], **popen)
        self._started.append(process)
        return process


def _wait_until_up(name: str) -> None:
    """Wait until programs in a namespace see its end as running."""
    until = time.monotonic() + _UP_S
    while "state UP" not in run_ip("-n", name, "link", "show", "wan0"):
        if time.monotonic() > until:
            raise RigError(f"wan0 of {name} did not come up within {_UP_S:.0f} s")
        time.sleep(0.05)
