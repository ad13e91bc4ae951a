"""Where tests of GPU kernels run: on a GPU if there is one, else in Triton's interpreter.

``tests/conftest.py`` chooses the interpreter before anything imports Triton.
"""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from molink.stage.gpu_kernels.triton_support import find_triton_problem, is_interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

_problem = find_triton_problem()
if not _problem and DEVICE.type == "cpu" and not is_interpreted():
    _problem = "torch sees no GPU, and the PC's driver rules out the interpreter"

#: For modules whose tests launch kernels.
needs_triton = pytest.mark.skipif(bool(_problem), reason=f"no Triton: {_problem}")


class _PatchOnce:
    """Triton 3.7's interpreter patches its language again in each call of a kernel's functions.

    Once for all functions that see the same modules of it, kernels take half as long.
    """

    def __init__(self, language: tuple[Any, ...], patch: Any) -> None:
        self._language, self._patch = language, patch
        self._patched: set[frozenset[int]] = set()

    def __call__(self, function: Any) -> "_PatchOnce":
        modules = filter(inspect.ismodule, function.__globals__.values())
        seen = frozenset(id(module) for module in modules if module in self._language)
        if seen not in self._patched:
            self._patched.add(seen)
            self._patch(function)
        return self

    def restore(self) -> None:
        """Nothing: the process runs no other kernels."""


def _hasten_interpreter() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang = _PatchOnce((tl, tl.core), interpreter._patch_lang)
    # Integer arithmetic isn't checked for overflow, as it isn't on a GPU.
    numpy_type = interpreter._get_np_dtype
    of_scalar = cache(numpy_type)
    interpreter._get_np_dtype = lambda kind: (
        of_scalar(kind.scalar) if type(kind.scalar) is tl.dtype else numpy_type(kind)
    )
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if is_interpreted() and not _problem:
    _hasten_interpreter()


def widen_products(patch: pytest.MonkeyPatch) -> None:
    """Triton 3.7's interpreter holds bf16 as integers and would multiply those."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        wide = [
            self.cast_impl(one, tl.float32) if one.dtype.scalar == tl.bfloat16 else one
            for one in (a, b)
        ]
        return multiply(self, *wide, *others)

    patch.setattr(builder, "create_dot", create_dot)
