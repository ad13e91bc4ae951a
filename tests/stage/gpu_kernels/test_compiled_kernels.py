"""Every GPU kernel becomes machine code for every generation of cards that molink knows."""

import importlib
from pathlib import Path

import pytest

from tests.support.triton_device import needs_triton
from tests.support.triton_targets import TARGETS, compile_in_child

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "molink/stage/gpu_kernels"
#: Modules with ``LAUNCHES``: what molink launches, in shapes of real models.
LAUNCHES = ROOT / "tests/support/launches"

pytestmark = needs_triton


def module_names(folder: Path, pattern: str) -> list[str]:
    return [
        f"{'.'.join(folder.relative_to(ROOT).parts)}.{path.stem}" for path in folder.glob(pattern)
    ]


def launched_kernels() -> set[str]:
    """Kernels; functions that only kernels call begin with an underscore."""
    return {
        f"{module}.{name}"
        for module in module_names(KERNELS, "*_kernels.py")
        for name, value in vars(importlib.import_module(module)).items()
        if type(value).__name__ in ("JITFunction", "InterpretedFunction")
        if value.fn.__module__ == module and not name.startswith("_")
    }


@pytest.mark.timeout(600)  # six devices for each kernel
def test_all_kernels_compile_for_all_devices() -> None:
    compiled = compile_in_child(*module_names(LAUNCHES, "*.py"))
    problems = [
        f"{one.kernel} for {one.capability}: {one.problem}" for one in compiled if one.problem
    ]
    assert problems == []
    made = {(one.kernel.partition(" ")[0], one.capability) for one in compiled}
    assert made == {(name, each) for name in launched_kernels() for each in TARGETS}
