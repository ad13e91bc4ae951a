"""Prints PyTorch's index with the CUDA build for this PC's NVIDIA driver; the installers ask it.

It needs the standard library alone, as nothing is installed yet. Exit code 1 and a line for a
person if there is no build for the driver.
"""

import subprocess
import sys
from collections.abc import Sequence

INDEX = "https://download.pytorch.org/whl"
#: The CUDA builds of our torch, and the first number of the oldest driver that runs each.
NEWEST, NEWEST_DRIVER = "cu130", 580
LEGACY = "cu126"
LEGACY_DRIVER = 528 if sys.platform == "win32" else 525
#: Cards of this compute capability and above (RTX 50) have no code in the legacy build.
_BLACKWELL = 10.0
_QUERY = ("nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader")


class TooOld(Exception):
    """No build of torch runs with the driver."""


def build_for(driver: str, capability: float) -> str:
    """The build for a driver such as ``551.86`` and the newest card's compute capability.

    Raises:
        TooOld: there is none.
    """
    major = int(driver.partition(".")[0])
    if major >= NEWEST_DRIVER:
        return NEWEST
    if major < LEGACY_DRIVER or capability >= _BLACKWELL:
        raise TooOld(
            f"the NVIDIA driver {driver} is too old for torch: install {NEWEST_DRIVER} or newer "
            "from https://www.nvidia.com/drivers, or take the CPU build with --cpu"
        )
    return LEGACY


def read(text: str) -> tuple[str, float] | None:
    """The driver and the highest compute capability of nvidia-smi's lines; ``None`` if unclear."""
    lines = [line.split(",") for line in text.strip().splitlines()]
    try:
        return lines[0][0].strip(), max(float(capability) for _, capability in lines)
    except (ValueError, IndexError):
        return None


def ask(command: Sequence[str] = _QUERY) -> str:
    """What nvidia-smi says; nothing where it isn't."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def main() -> int:
    """Print the index; returns the exit code."""
    found = read(ask())
    try:
        build = NEWEST if found is None else build_for(*found)
    except (TooOld, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{INDEX}/{build}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
