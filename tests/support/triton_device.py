"""Where tests of GPU kernels run: on a GPU if there is one, else in Triton's interpreter.

``tests/conftest.py`` chooses the interpreter before anything imports Triton.
"""

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
