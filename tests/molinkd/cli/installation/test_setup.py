"""``molink setup`` asks for the right packages; pip itself is not run."""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from molink.errors import MolinkError
from molinkd.cli.installation import packages, setup
from molinkd.cli.installation.torch_build import INDEX, TORCH
from molinkd.cli.main import run


class FakePip:
    """Records what is installed; afterwards torch has the version ``gives``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, have: str, gives: str) -> None:
        self.have, self.gives = have, gives
        self.asked: list[list[str]] = []
        monkeypatch.setattr(setup, "install_packages", self.install)
        monkeypatch.setattr(setup, "torch_version", lambda: self.have)
        monkeypatch.setattr(setup, "is_reachable", lambda _: True)
        monkeypatch.setattr(setup, "list_missing_companions", list)
        monkeypatch.setattr(setup, "_check_torch", lambda _: None)
        self.free_space(monkeypatch, 10**11)

    @staticmethod
    def free_space(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        disk = SimpleNamespace(free=size)
        monkeypatch.setattr(setup.shutil, "disk_usage", lambda _: disk)

    def install(self, arguments: Sequence[str], what: str) -> None:
        self.asked.append(list(arguments))
        self.have = self.gives


def test_it_installs_what_is_missing_and_then_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = FakePip(monkeypatch, "none", f"{TORCH}+cpu")
    assert run(["setup", "--cpu"]) == 0
    assert pip.asked == [["--index-url", f"{INDEX}/cpu", f"torch=={TORCH}"]]
    assert f"torch {TORCH}+cpu is installed." in capsys.readouterr().out
    assert run(["setup", "--cpu"]) == 0
    assert len(pip.asked) == 1


def test_another_build_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "choose_build", lambda _: "cu126")
    pip = FakePip(monkeypatch, f"{TORCH}+cpu", f"{TORCH}+cu126")
    assert run(["setup", "--cuda"]) == 0
    source = ["--index-url", f"{INDEX}/cu126", f"torch=={TORCH}"]
    assert pip.asked == [["--force-reinstall", "--no-deps", *source], source]


def test_a_full_disk_is_reported_before_the_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = FakePip(monkeypatch, "none", "")
    pip.free_space(monkeypatch, 10**6)
    assert run(["setup", "--cpu"]) == 2
    assert "the disk is too full: 1 MB are free" in capsys.readouterr().err
    assert pip.asked == []


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_the_source_is_the_index_that_has_the_build(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Path("torch.txt")
    default, other = ("cu130", "cpu") if platform == "linux" else ("cpu", "cu130")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(setup, "is_reachable", lambda _: True)
    locked = ["--require-hashes", "--no-deps", "-r", "torch.txt"]
    assert setup.choose_source(default, lock) == locked
    assert setup.choose_source(other, lock)[:2] == ["--index-url", f"{INDEX}/{other}"]
    monkeypatch.setattr(setup, "is_reachable", lambda _: False)
    assert setup.choose_source(default, None) == setup.choose_source("cpu", None)
    with pytest.raises(MolinkError, match="can't be reached, and only it has the cu126 build"):
        setup.choose_source("cu126", lock)


def test_companions_of_torch_are_read_from_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    lines = [
        "numpy>=2.0",
        'bitsandbytes>=0.50; extra == "torch"',
        'torch>=2.7; extra == "torch"',
        'triton-windows<3.8,>=3.7.1; sys_platform == "win32" and extra == "torch"',
        'pytest>=8; extra == "test"',
    ]
    monkeypatch.setattr(setup, "requires", lambda _: lines)
    monkeypatch.setattr(setup, "version", version)
    there["torch"] = TORCH
    monkeypatch.setattr(sys, "platform", "linux")
    assert setup.list_missing_companions() == ["bitsandbytes>=0.50"]
    there["bitsandbytes"] = "0.50.2"
    assert setup.list_missing_companions() == []
    monkeypatch.setattr(sys, "platform", "win32")
    assert setup.list_missing_companions() == ["triton-windows<3.8,>=3.7.1"]


def test_an_environment_without_pip_uses_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: name)
    assert packages.installer_command()[:3] == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(packages.shutil, "which", lambda _: "/opt/uv")
    expected = ["/opt/uv", "pip", "install", "--python", sys.executable]
    assert packages.installer_command() == expected
    monkeypatch.setattr(packages.shutil, "which", lambda _: None)
    with pytest.raises(MolinkError, match="has no pip"):
        packages.installer_command()


def test_a_failed_installation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in ("import sys; sys.exit(3)", ""):
        command = [sys.executable, "-c", code]
        monkeypatch.setattr(packages, "installer_command", lambda words=command: words)
        if not code:
            packages.install_packages([], "torch")
            continue
        with pytest.raises(MolinkError, match="torch could not be installed"):
            packages.install_packages([], "torch")
