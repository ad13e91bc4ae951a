"""The environment that molink is installed in, and who manages it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import molink

#: Written by the installers into their ``.venv``.
INSTALLER_MARK = ".molink-clone"

#: ``clone``: runs from a source folder; ``release``: installed by the installers from a release;
#: ``uv``, ``pipx`` and ``brew``: one of their tools; ``pip``: in an environment of somebody else's.
Kind = Literal["clone", "release", "uv", "pipx", "brew", "pip"]


@dataclass(frozen=True, slots=True)
class Installation:
    """``folder`` is what belongs to molink: a clone, or the environment's own folder."""

    kind: Kind
    folder: Path


def find_installation(prefix: Path | None = None) -> Installation:
    """The environment that runs this process; ``prefix`` is its folder."""
    prefix = Path(sys.prefix) if prefix is None else prefix
    if (source := find_source_folder()) is not None:
        return Installation("clone", source)
    if (prefix / INSTALLER_MARK).exists():
        return Installation("release", prefix.parent)
    if (prefix / "uv-receipt.toml").exists():
        return Installation("uv", prefix)
    if (prefix / "pipx_metadata.json").exists():
        return Installation("pipx", prefix)
    if "Cellar" in prefix.resolve().parts:
        return Installation("brew", prefix)
    return Installation("pip", prefix)


def find_source_folder() -> Path | None:
    """The clone that molink runs from, if it is not installed from a wheel."""
    folder = Path(molink.__file__).resolve().parents[1]
    return folder if (folder / "pyproject.toml").exists() else None
