"""The lock files contain what ``pyproject.toml`` requires, with hashes, for every platform."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from molinkd.cli.installation.torch_build import TORCH

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = {"linux": ("posix", "Linux", "x86_64"), "win32": ("nt", "Windows", "AMD64")}


def blocks(name: str) -> list[str]:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return re.split(r"\n(?=\S)", lines.strip())


def environment(python: str, platform: str) -> dict[str, str]:
    system, name, machine = PLATFORMS[platform]
    return {
        "implementation_name": "cpython",
        "os_name": system,
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": name,
        "python_full_version": f"{python}.1",
        "python_version": python,
        "sys_platform": platform,
        "extra": "",
    }


def locked(names: tuple[str, ...], python: str, platform: str) -> dict[str, str]:
    """Versions that pip would install there, by name; one per package."""
    found: dict[str, str] = {}
    here = environment(python, platform)
    for block in (block for name in names for block in blocks(name)):
        requirement = Requirement(block.partition("\\")[0].strip())
        if requirement.marker is not None and not requirement.marker.evaluate(here):
            continue
        name, version = (
            canonicalize_name(requirement.name),
            next(iter(requirement.specifier)).version,
        )
        assert found.get(name, version) == version, f"{name} twice on {platform}, Python {python}"
        found[name] = version
    return found


@pytest.mark.parametrize("name", ["base.txt", "test.txt", "docs.txt", "torch.txt"])
def test_every_line_is_a_version_with_hashes(name: str) -> None:
    for block in blocks(name):
        first, *hashes = block.replace(" \\\n", "\n").splitlines()
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; .+)?", first), first
        assert hashes, first
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in hashes), first


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_pyproject_asks_for_is_locked(python: str, platform: str) -> None:
    project = PYPROJECT["project"]
    base = locked(("base.txt", "torch.txt"), python, platform)
    whole = locked(("base.txt", "torch.txt", "test.txt"), python, platform)
    site = locked(("base.txt", "torch.txt", "docs.txt"), python, platform)
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["torch"], *PYPROJECT["build-system"]["requires"]]
    wanted = [(base, text) for text in asked]
    wanted += [(whole, text) for text in extras["test"]] + [(site, text) for text in extras["docs"]]
    for versions, text in wanted:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate(environment(python, platform)):
            continue
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{text}: run `python -m tools.lock`"
        assert requirement.specifier.contains(versions[name]), f"{text}: run `python -m tools.lock`"


def test_setup_and_the_lock_name_one_torch() -> None:
    assert {locked(("torch.txt",), "3.11", platform)["torch"] for platform in PLATFORMS} == {TORCH}


def test_only_linux_gets_the_packages_of_cuda() -> None:
    assert set(locked(("torch.txt",), "3.12", "win32")) == {"torch"}
    assert len(locked(("torch.txt",), "3.12", "linux")) > 10


def test_windows_gets_the_triton_that_torch_wants_on_linux() -> None:
    wanted = locked(("torch.txt",), "3.12", "linux")["triton"]
    assert locked(("test.txt",), "3.12", "linux")["triton"] == wanted
    assert locked(("base.txt",), "3.12", "win32")["triton-windows"].startswith(f"{wanted}.")


def test_paths_in_install_ps1_are_taken_literally() -> None:
    """``[`` in a path is a wildcard otherwise."""
    text = (ROOT / "install.ps1").read_text(encoding="utf-8")
    takers = r"\b(?:Test-Path|(?:Get|Set)-Content|Remove-Item|Select-String|Set-Location)\b"
    assert not re.findall(rf"{takers}(?![^|)\n]*-LiteralPath)[^|)\n]*", text)
