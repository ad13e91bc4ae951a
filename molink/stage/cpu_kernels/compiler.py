"""Compiles LLVM IR to functions in this process, with llvmlite."""

import ctypes
from collections.abc import Mapping
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

from molink.cpu_isa import avx2_only

#: Prefixes of LLVM's features that an AVX2-only CPU lacks.
_BEYOND_AVX2 = ("avx512", "avx10", "avxvnni", "amx", "evex512")


@cache
def host_features() -> Mapping[str, bool]:
    """Return this CPU's features by LLVM's names (``avx512bf16``, ``fma``, …)."""
    found: Mapping[str, bool] = llvm.get_host_cpu_features()
    if avx2_only():
        return {name: on and not name.startswith(_BEYOND_AVX2) for name, on in found.items()}
    return found


class CompiledLibrary:
    """A compiled module; its functions are valid while it exists."""

    def __init__(self, module: ir.Module, features: str | None = None) -> None:
        """Compile for this CPU, or for a subset of its ``features`` (``+avx2,+fma,…``).

        Raises:
            RuntimeError: LLVM rejects the module or CPU.
        """
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        flags = (f"{'+' if on else '-'}{name}" for name, on in host_features().items())
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name() if features is None else "x86-64",
            features=",".join(flags) if features is None else features,
            opt=3,
        )
        self._engine = llvm.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()

    def get_function(self, name: str, pointers: int, integers: int) -> "ctypes._FuncPointer":
        """Return a function that takes pointers, then 64-bit integers, and returns nothing.

        It releases the GIL.
        """
        address = self._engine.get_function_address(name)
        arguments = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * integers
        return ctypes.CFUNCTYPE(None, *arguments)(address)
