"""Chooses the build of torch for this PC."""

import sys
from collections.abc import Callable
from typing import Literal

from molink.errors import UsageError
from molinkd.cli.doctor.run_program import run_program

#: The version that molink was tested with.
TORCH = "2.13.0"
#: PyTorch's own index; each build has a folder in it.
INDEX = "https://download.pytorch.org/whl"
CPU = "cpu"
#: The CUDA builds, and the first number of the oldest driver that runs each.
NEWEST, NEWEST_DRIVER = "cu130", 580
LEGACY = "cu126"
LEGACY_DRIVER = 528 if sys.platform == "win32" else 525
#: Cards of this compute capability and above (RTX 50) have no code in the legacy build.
_BLACKWELL = 10.0
_QUERY = ("--query-gpu=driver_version,compute_cap", "--format=csv,noheader")

Flavour = Literal["cpu", "cuda"]


def choose_build(flavour: Flavour | None, ask: Callable[[], str] | None = None) -> str:
    """The build of ``flavour`` for this PC; by default CUDA where there is an NVIDIA driver.

    Raises:
        UsageError: no CUDA build runs with the driver.
    """
    answer = "" if flavour == "cpu" else (ask or query_driver)()
    if flavour == "cpu" or (flavour is None and not answer):
        return CPU
    found = read_driver(answer)
    return NEWEST if found is None else build_for(*found)


def build_for(driver: str, capability: float) -> str:
    """The build for a driver such as ``551.86`` and the newest card's compute capability.

    Raises:
        UsageError: there is none.
    """
    number = driver.partition(".")[0]
    major = int(number) if number.isdecimal() else NEWEST_DRIVER
    if major >= NEWEST_DRIVER:
        return NEWEST
    if major < LEGACY_DRIVER or capability >= _BLACKWELL:
        raise UsageError(
            f"the NVIDIA driver {driver} is too old for torch: install {NEWEST_DRIVER} or newer "
            "from https://www.nvidia.com/drivers, or take the CPU build with --cpu"
        )
    return LEGACY


def read_driver(text: str) -> tuple[str, float] | None:
    """The driver and the highest compute capability of nvidia-smi's lines; ``None`` if unclear."""
    lines = [line.split(",") for line in text.strip().splitlines()]
    try:
        return lines[0][0].strip(), max(float(capability) for _, capability in lines)
    except (ValueError, IndexError):
        return None


def query_driver() -> str:
    """What nvidia-smi says; empty where there is no driver."""
    code, text = run_program("nvidia-smi", *_QUERY) or (1, "")
    return text if code == 0 else ""


def is_suitable(installed: str, build: str) -> bool:
    """Whether the installed torch, such as ``2.13.0+cpu``, serves where ``build`` is wanted."""
    version, _, local = installed.partition("+")
    if version != TORCH:
        return False
    # The default index has builds without a name: CUDA on Linux, CPU elsewhere.
    have = local or (NEWEST if sys.platform == "linux" else CPU)
    return build in (CPU, have)
