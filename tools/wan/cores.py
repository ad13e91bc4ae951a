"""CPU quotas for the nodes of a rig, by control groups (Linux, root).

Without quotas, nodes on shared cores slow each other down unpredictably.
"""

import contextlib
import time
from pathlib import Path

from tools.wan.namespaces import RigError, left_over

#: Short periods make a slow core, not a stuttering one.
_PERIOD_US = 10_000
_ROOT = Path("/sys/fs/cgroup")
_LONG_S, _LOOK_S = 5.0, 0.05


class CoreShares:
    """A control group per node, named like its namespace."""

    def __init__(self, names: list[str], cores: float) -> None:
        """``cores`` bounds each node's processes together."""
        self._groups = [_find_root() / name for name in names]
        self._cores = cores

    def create(self) -> None:
        """Create the groups after removing those of dead processes.

        Raises:
            RigError: CPU control groups are unavailable.
        """
        for name in left_over(_find_root()):
            with contextlib.suppress(OSError):
                (_find_root() / name).rmdir()
        quota = round(self._cores * _PERIOD_US)
        try:
            for group in self._groups:
                group.mkdir()
                if (group / "cpu.max").exists():
                    _write_file(group / "cpu.max", f"{quota} {_PERIOD_US}")
                else:
                    _write_file(group / "cpu.cfs_period_us", f"{_PERIOD_US}")
                    _write_file(group / "cpu.cfs_quota_us", f"{quota}")
        except OSError as error:
            self.remove()
            raise RigError(f"no CPU control groups here: {error}") from error

    def enter(self, index: int) -> list[str]:
        """Command prefix that runs within the quota of node ``index``."""
        members = str(self._groups[index] / "cgroup.procs")
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', members]

    def remove(self) -> None:
        """Remove the groups once their processes have ended."""
        deadline = time.monotonic() + _LONG_S
        for group in self._groups:
            while group.exists() and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(_LOOK_S)


def _find_root() -> Path:
    """Root of CPU groups (cgroup v1 or v2)."""
    return _ROOT / "cpu" if (_ROOT / "cpu").is_dir() else _ROOT


def _write_file(file: Path, text: str) -> None:
    file.write_text(text, encoding="ascii")
