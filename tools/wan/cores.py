"""How much of the CPU each node of a rig may take, by control groups. Linux and root only.

Nodes that share cores without a bound are as fast as the others let them be, which changes from
second to second; with a share each, of no more than there is, they are PCs of one pace.
"""

import contextlib
import time
from pathlib import Path

from tools.wan.namespaces import RigError, left_over

#: A group that was used up waits for the next period: short ones make a slow core, not a stuttering
#: one.
_PERIOD_US = 10_000
_ROOT = Path("/sys/fs/cgroup")
_LONG_S, _LOOK_S = 5.0, 0.05


class CoreShares:
    """A control group for each node, named as its namespace is."""

    def __init__(self, names: list[str], cores: float) -> None:
        """``cores`` is what each may take, all its processes together."""
        self._groups = [_place() / name for name in names]
        self._cores = cores

    def create(self) -> None:
        """Make them, once what dead processes left has been removed.

        Raises:
            RigError: this system has no control groups of the CPU, or not for us.
        """
        for name in left_over(_place()):
            with contextlib.suppress(OSError):
                (_place() / name).rmdir()
        quota = round(self._cores * _PERIOD_US)
        try:
            for group in self._groups:
                group.mkdir()
                if (group / "cpu.max").exists():
                    _write(group / "cpu.max", f"{quota} {_PERIOD_US}")
                else:
                    _write(group / "cpu.cfs_period_us", f"{_PERIOD_US}")
                    _write(group / "cpu.cfs_quota_us", f"{quota}")
        except OSError as error:
            self.remove()
            raise RigError(f"no shares of the CPU here: {error}") from error

    def enter(self, index: int) -> list[str]:
        """The beginning of a command line that runs with the share of node ``index``."""
        members = str(self._groups[index] / "cgroup.procs")
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', members]

    def remove(self) -> None:
        """Remove them, once what ran in them has ended."""
        deadline = time.monotonic() + _LONG_S
        for group in self._groups:
            while group.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(_LOOK_S)


def _place() -> Path:
    """Where groups of the CPU are: of version 1 by themselves, of version 2 with all else."""
    return _ROOT / "cpu" if (_ROOT / "cpu").is_dir() else _ROOT


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="ascii")
