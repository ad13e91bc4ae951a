"""Network namespaces and TUN devices. Linux and root only; importable everywhere."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

_FOLDER = Path("/run/netns")
_PREFIX = "molink-wan"
_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
#: Congestion control ``none``: TCP with a large initial window that is kept in pauses. With routers
#: that drop nothing it approximates no congestion control.
NONE = "none"
FULL_WINDOW = 1000
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_numbers = count()


class RigError(Exception):
    """The rig cannot be set up, or one of its commands failed."""


def unavailable() -> str | None:
    """Reason why namespaces are unavailable, or ``None``."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux's network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "it needs root, for network namespaces"
    if not _TUN.exists():
        return f"there is no {_TUN}"
    if shutil.which("ip") is None:
        return "there is no `ip` command: install iproute2"
    return None


def require_support() -> None:
    """Raise :class:`RigError` if namespaces are unavailable."""
    reason = unavailable()
    if reason is not None:
        raise RigError(f"no WAN rig here: {reason}. Without it: `python -m tools.wan --proxy`.")


def run_system(*words: str) -> str:
    """Run a system command, or raise :class:`RigError`."""
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RigError(f"`{' '.join(words)}` failed: {result.stderr.strip()}")
    return result.stdout


def run_ip(*words: str) -> str:
    """Run ``ip``."""
    return run_system("ip", *words)


class Namespaces:
    """A few namespaces of this process, with their loopback devices up."""

    def __init__(self, number: int, congestion: str) -> None:
        """``congestion`` is TCP's congestion control in all of them, or :data:`NONE`."""
        rig = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.names = [f"{rig}-{index}" for index in range(number)]
        self._keeps_windows = congestion == NONE
        self._congestion = "cubic" if congestion == NONE else congestion

    def create(self) -> None:
        """Create them after removing those of dead processes."""
        remove_stale()
        allow_congestion(self._congestion)
        # No TCP metrics from earlier connections.
        settings = {
            "ipv4/tcp_congestion_control": self._congestion,
            "ipv4/tcp_no_metrics_save": "1",
            "ipv4/tcp_slow_start_after_idle": "0" if self._keeps_windows else "1",
        }
        script = " && ".join(
            f"echo {value} > /proc/sys/net/{key}" for key, value in settings.items()
        )
        quiet = (
            "for each in all default; do echo 1 > /proc/sys/net/ipv6/conf/$each/disable_ipv6; done"
        )
        for name in self.names:
            run_ip("netns", "add", name)
            run_ip("-n", name, "link", "set", "lo", "up")
            run_system(
                *enter_command(name), "sh", "-c", f"{script} && {{ {quiet}; }} 2>/dev/null || true"
            )
            used = run_system(
                *enter_command(name), "cat", "/proc/sys/net/ipv4/tcp_congestion_control"
            )
            if used.strip() != self._congestion:
                raise RigError(f"{self._congestion!r} can't be set in a namespace, {used} is used")

    def connected(self, index: int, network: str) -> None:
        """Configure the route of ``wan0`` in namespace ``index`` to ``network``."""
        if self._keeps_windows:
            way = ("route", "replace", network, "dev", "wan0", "initcwnd", str(FULL_WINDOW))
            run_ip("-n", self.names[index], *way)

    def remove(self) -> None:
        """Kill their processes and remove them."""
        for name in self.names:
            remove_namespace(name)


def allow_congestion(congestion: str) -> None:
    """Allow a congestion control in namespaces; the setting outlives the rig.

    Raises:
        RigError: the kernel lacks it.
    """
    try:
        with socket.socket() as own:  # as root, this loads its module
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except OSError as error:
        raise RigError(f"this kernel has no congestion control {congestion!r}") from error
    path = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    allowed = path.read_text(encoding="utf-8").split()
    if congestion not in allowed:
        path.write_text(" ".join([*allowed, congestion]), encoding="utf-8")


def enter_command(name: str) -> list[str]:
    """Command prefix that runs in namespace ``name``."""
    return ["ip", "netns", "exec", name]


def remove_namespace(name: str) -> None:
    """Kill every process in a namespace and remove it, if it exists."""
    with contextlib.suppress(RigError):
        for pid in run_ip("netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(RigError):
        run_ip("netns", "delete", name)


def remove_stale() -> None:
    """Remove namespaces of dead processes."""
    for name in left_over(_FOLDER):
        remove_namespace(name)


def left_over(folder: Path) -> list[str]:
    """Names in ``folder`` of rigs whose process is dead."""
    found = []
    for path in folder.glob(f"{_PREFIX}-*"):
        pid = path.name.removeprefix(f"{_PREFIX}-").split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            found.append(path.name)
    return found


def list_namespaces(pid: int) -> Sequence[str]:
    """Namespaces of process ``pid``."""
    return sorted(path.name for path in _FOLDER.glob(f"{_PREFIX}-{pid}-*"))


def open_tun() -> tuple[int, str]:
    """Open a TUN device: file descriptor and name."""
    import fcntl

    device = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", b"molink%d", _IFF_TUN | _IFF_NO_PI)
        answer = fcntl.ioctl(device, _TUNSETIFF, request)
    except OSError as error:
        os.close(device)
        raise RigError(f"no TUN device: {errno.errorcode.get(error.errno or 0)}") from error
    return device, answer[:16].rstrip(b"\0").decode()


def has_netem() -> bool:
    """Whether this kernel supports netem (tried in a namespace)."""
    require_support()
    name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}-netem"
    run_ip("netns", "add", name)
    try:
        run_system("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except (RigError, FileNotFoundError):
        return False
    finally:
        remove_namespace(name)
    return True
