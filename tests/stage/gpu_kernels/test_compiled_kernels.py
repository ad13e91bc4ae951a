"""GPU kernels compile to machine code for all supported generations of cards."""

import importlib
from pathlib import Path

import pytest

from tests.support.triton_device import needs_triton
from tests.support.triton_targets import TARGETS, compile_in_child

#: Modules of kernels. Each has a module of its name in ``tests/support/launches`` with
#: ``LAUNCHES``: molink's launches in shapes of real models.
MODULES = sorted(
    path.stem
    for path in (Path(__file__).parents[3] / "molink/stage/gpu_kernels").glob("*_kernels.py")
)

pytestmark = [needs_triton, pytest.mark.parametrize("module", MODULES)]


def launched_kernels(module: str) -> set[str]:
    """Names of kernels; functions that only kernels call begin with an underscore."""
    return {
        f"{module}.{name}"
        for name, value in vars(importlib.import_module(module)).items()
        if type(value).__name__ in ("JITFunction", "InterpretedFunction")
        if value.fn.__module__ == module and not name.startswith("_")
    }


@pytest.mark.parametrize("options", [(), pytest.param(("--all",), marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_kernels_compile_for_devices(module: str, options: tuple[str, ...]) -> None:
    compiled = compile_in_child(*options, f"tests.support.launches.{module}")
    problems = [
        f"{one.kernel} for {one.capability}: {one.problem}" for one in compiled if one.problem
    ]
    assert problems == []
    made = {(one.kernel.partition(" ")[0], one.capability) for one in compiled}
    kernels = launched_kernels(f"molink.stage.gpu_kernels.{module}")
    devices = TARGETS if options else [min(TARGETS)]
    assert made >= {(name, each) for name in kernels for each in devices}
