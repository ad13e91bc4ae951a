"""Choice of the torch build for a PC."""

import sys

import pytest

from molink.errors import UsageError
from molinkd.cli.installation import torch_build
from molinkd.cli.installation.torch_build import (
    TORCH,
    build_for,
    choose_build,
    is_suitable,
    read_driver,
)


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [
        ("581.15", 8.9, "cu130"),
        ("580.65.06", 12.0, "cu130"),
        ("560.94", 8.6, "cu126"),
        ("528.49", 7.5, "cu126"),
        ("600", 7.5, "cu130"),
        ("unknown", 7.5, "cu130"),
    ],
)
def test_the_build_suits_the_driver(driver: str, capability: float, build: str) -> None:
    assert build_for(driver, capability) == build


@pytest.mark.parametrize(("driver", "capability"), [("516.94", 8.6), ("572.16", 12.0)])
def test_a_driver_that_is_too_old_is_refused(driver: str, capability: float) -> None:
    with pytest.raises(UsageError, match=f"driver {driver} is too old.*580.*--cpu"):
        build_for(driver, capability)


def test_what_nvidia_smi_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_driver("560.94, 8.6\n560.94, 12.0\n") == ("560.94", 12.0)
    assert read_driver("") is None
    assert read_driver("NVIDIA-SMI has failed\n") is None
    for answer, text in ((None, ""), ((9, "failed"), ""), ((0, "560.94, 8.6\n"), "560.94, 8.6\n")):
        monkeypatch.setattr(torch_build, "run_program", lambda *_, said=answer: said)
        assert torch_build.query_driver() == text


def test_the_pc_decides_unless_its_user_does() -> None:
    assert choose_build(None, lambda: "") == "cpu"
    assert choose_build(None, lambda: "560.94, 8.6") == "cu126"
    assert choose_build("cuda", lambda: "") == "cu130"
    assert choose_build("cpu", lambda: "560.94, 8.6") == "cpu"


def test_a_torch_that_serves_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_suitable(f"{TORCH}+cpu", "cpu")
    assert is_suitable(f"{TORCH}+cu130", "cpu"), "it computes on CPUs too"
    assert is_suitable(f"{TORCH}+cu130", "cu130")
    assert not is_suitable(f"{TORCH}+cu126", "cu130")
    assert not is_suitable(f"{TORCH}+cpu", "cu130")
    assert not is_suitable("2.0.0+cpu", "cpu")
    assert not is_suitable("none", "cpu")
    for platform, cuda in (("linux", True), ("win32", False)):
        monkeypatch.setattr(sys, "platform", platform)
        assert is_suitable(TORCH, "cu130") is cuda
