"""Emulates an AVX2-only CPU: ``MOLINK_CPU_ISA=avx2``, for tests and benchmarks.

Torch, oneDNN, MKL and compiled kernels then use no instructions beyond AVX2, FMA and F16C, in this
process and its children. The libraries read their variables once, so ``molink`` sets these on
import.
"""

import os
import platform
from collections.abc import Mapping, MutableMapping

_VARIABLE, _AVX2 = "MOLINK_CPU_ISA", "avx2"
#: Environment variables of a process that emulates such a CPU.
AVX2_ONLY: Mapping[str, str] = {_VARIABLE: _AVX2}
#: Variables that torch, oneDNN and MKL read.
_LIBRARIES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
_X86 = ("x86_64", "amd64")


def avx2_only(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether an AVX2-only CPU is emulated.

    Raises:
        ValueError: the variable has an unknown value.
    """
    wanted = environment.get(_VARIABLE, "")
    if wanted not in ("", _AVX2):
        raise ValueError(f"{_VARIABLE} is {wanted!r}; it must be {_AVX2!r} or unset")
    return bool(wanted)


def limit_libraries(environment: MutableMapping[str, str] = os.environ) -> None:
    """Limit libraries that have not been used yet to AVX2, if an AVX2-only CPU is emulated."""
    if avx2_only(environment) and platform.machine().lower() in _X86:
        environment.update(_LIBRARIES)
