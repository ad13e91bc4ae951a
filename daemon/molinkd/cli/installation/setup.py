"""``molink setup``."""

import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import typer

from molink.errors import MolinkError, UsageError
from molinkd.cli.installation.packages import install_packages
from molinkd.cli.installation.torch_build import (
    CPU,
    INDEX,
    NEWEST,
    TORCH,
    Flavour,
    choose_build,
    is_suitable,
)
from molinkd.peer.agent.device_probe import torch_version
from molinkd.platform import child_options

#: Download and space on disk of torch and what comes with it, in MB.
_SIZES = {CPU: (200, 1000), "cuda": (3000, 5000)}
_REACH_TIMEOUT_S = 5.0
_CHECK = "import torch; print(torch.cuda.is_available())"


def setup(
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU build.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="A build for NVIDIA GPUs.")] = False,
    lock: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Requirements with hashes of the default index's build.  [default: none]",
        ),
    ] = None,
) -> None:
    """Install the build of torch for this PC, which computes layers.

    By default the build for its NVIDIA driver, or the CPU build without one. A PC that holds no
    layers (--stage none) needs no torch.
    """
    if cpu and cuda:
        raise UsageError("--cpu and --cuda exclude each other")
    flavour: Flavour | None = "cuda" if cuda else "cpu" if cpu else None
    build = choose_build(flavour)
    have = torch_version()
    if not is_suitable(have, build):
        _install_torch(build, lock, replace=have != "none")
    missing = list_missing_companions()
    if missing:
        install_packages(missing, "what goes with torch")
    _check_torch(build)
    print(f"torch {torch_version()} is installed.")


def _install_torch(build: str, lock: Path | None, *, replace: bool) -> None:
    download, space = _SIZES["cpu" if build == CPU else "cuda"]
    free = shutil.disk_usage(sys.prefix).free // 10**6
    if free < space:
        raise UsageError(
            f"the disk is too full: {free} MB are free in {sys.prefix}, torch takes about {space}"
        )
    print(
        f"Installing torch {TORCH} ({build} build): a download of about {download} MB, about "
        f"{space} MB on disk",
        flush=True,
    )
    source, what = choose_source(build, lock), f"torch {TORCH}"
    if replace:  # builds of one version replace each other only when forced
        install_packages(["--force-reinstall", "--no-deps", *source], what)
    install_packages(source, what)


def choose_source(build: str, lock: Path | None) -> list[str]:
    """Arguments of ``pip install`` for a build of torch.

    Raises:
        UsageError: its index can't be reached, and no other one has it.
    """
    # The default index has the newest CUDA build for Linux, and CPU builds for the others.
    is_default = build == (NEWEST if sys.platform == "linux" else CPU)
    index = f"{INDEX}/{build}"
    if is_default and lock is not None:
        return ["--require-hashes", "--no-deps", "-r", str(lock)]
    if is_reachable(f"{index}/torch/"):
        return ["--index-url", index, f"torch=={TORCH}"]
    if build != CPU and not is_default:
        raise UsageError(
            f"{index} can't be reached, and only it has the {build} build: check the network, or "
            "install the CPU build with --cpu"
        )
    print(f"{index} can't be reached: using the default index's build", flush=True)
    return [f"torch=={TORCH}"]


def is_reachable(url: str) -> bool:
    """Whether a server answers at ``url``."""
    try:
        urllib.request.urlopen(url, timeout=_REACH_TIMEOUT_S).close()
    except (OSError, urllib.error.URLError):
        return False
    return True


def list_missing_companions() -> list[str]:
    """Requirements of molink's extra ``torch`` that are not installed."""
    try:
        lines = requires("molink") or []
    except PackageNotFoundError:  # run from a source folder
        return []
    found = [line.partition(";") for line in lines]
    return [
        head.strip()
        for head, _, marker in found
        if re.search(r"extra == .torch.", marker)
        and ("win32" not in marker or sys.platform == "win32")
        and not _is_installed(head)
    ]


def _is_installed(requirement: str) -> bool:
    name = re.match(r"[\w.-]+", requirement)
    try:
        return name is not None and bool(version(name[0]))
    except PackageNotFoundError:
        return False


def _check_torch(build: str) -> None:
    """Import torch in a process of its own.

    Raises:
        MolinkError: that fails.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHECK],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        **child_options(),
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        hint = ""
        if sys.platform == "win32":
            hint = ". It needs the Visual C++ runtime: winget install Microsoft.VCRedist.2015+.x64"
        raise MolinkError(f"torch is installed but can't be loaded: {last}{hint}")
    if build != CPU and done.stdout.strip() != "True":
        print(
            "torch sees no CUDA device: is the NVIDIA driver recent enough? The stages here will "
            "use the CPU."
        )
