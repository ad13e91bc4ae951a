"""Runs kernels on torch's own OpenMP threads.

Torch's threads stay awake between operators, so no thread must be woken, and no second pool
competes for cores. GCC's library (torch on Linux) and LLVM's (Intel's ``libiomp5md`` on Windows)
have different entry points.
"""

import ctypes
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

import llvmlite.binding as llvm
import psutil
from llvmlite import ir

from molink.stage.cpu_kernels.emit import (
    I32,
    I64,
    POINTER,
    VOID,
    declare_function,
    emit_alloca,
    emit_offset,
)

ForkSymbol = Literal["gnu", "llvm"]

#: Library file names, and the symbol that forks a team.
_LIBRARY_NAMES: tuple[tuple[str, ForkSymbol], ...] = (
    ("gomp", "gnu"),
    ("iomp5", "llvm"),
    ("libomp.", "llvm"),
)
_SYMBOLS: dict[ForkSymbol, tuple[str, ...]] = {
    "gnu": ("GOMP_parallel",),
    "llvm": ("__kmpc_fork_call", "__kmpc_push_num_threads", "__kmpc_global_thread_num"),
}
#: Bytes of a pointer and of an integer argument.
_WORD_BYTES = 8
_THREAD_QUERIES = ("omp_get_thread_num", "omp_get_num_threads")


@dataclass(frozen=True, slots=True)
class OpenMp:
    """A library whose symbols are known to LLVM."""

    entry: ForkSymbol

    @classmethod
    def find_loaded(cls) -> "OpenMp | None":
        """Find the library that torch loaded, if supported."""
        try:
            paths = [mapped.path for mapped in psutil.Process().memory_maps(grouped=True)]
        except (psutil.Error, AttributeError):
            return None  # not available on all systems
        for path in paths:
            name = PurePath(path).name.lower()
            for part, entry in _LIBRARY_NAMES:
                if part in name and _register_symbols(path, (*_SYMBOLS[entry], *_THREAD_QUERIES)):
                    return cls(entry)
        return None

    def emit_fork(
        self, builder: ir.IRBuilder, task: ir.Function, shared: ir.Value, threads: ir.Value
    ) -> None:
        """Run ``task(…, shared)`` on ``threads`` threads and wait."""
        module, count = builder.module, builder.trunc(threads, I32)
        if self.entry == "gnu":
            kind = ir.FunctionType(VOID, [POINTER, POINTER, I32, I32])
            parallel = declare_function(module, "GOMP_parallel", kind)
            builder.call(parallel, [task, shared, count, I32(0)])
            return
        # Source location: `{reserved, flags, reserved, reserved, source}`; compilers set flag 2.
        place = ir.LiteralStructType([I32, I32, I32, I32, POINTER])
        caller = ir.GlobalVariable(module, place, module.get_unique_name("caller"))
        text = ir.Constant(ir.ArrayType(ir.IntType(8), 3), bytearray(b";;\0"))
        source = ir.GlobalVariable(module, text.type, module.get_unique_name("source"))
        source.initializer, caller.initializer = (
            text,
            place([I32(0), I32(2), I32(0), I32(0), source]),
        )
        number = declare_function(
            module, "__kmpc_global_thread_num", ir.FunctionType(I32, [POINTER])
        )
        push = declare_function(
            module, "__kmpc_push_num_threads", ir.FunctionType(VOID, [POINTER, I32, I32])
        )
        fork = declare_function(
            module, "__kmpc_fork_call", ir.FunctionType(VOID, [POINTER, I32, POINTER], var_arg=True)
        )
        builder.call(push, [caller, builder.call(number, [caller]), count])
        builder.call(fork, [caller, I32(1), task, shared])

    @property
    def task_type(self) -> ir.FunctionType:
        """Type of a task; its last argument is shared by all threads."""
        return ir.FunctionType(VOID, [POINTER] * (1 if self.entry == "gnu" else 3))


def emit_parallel_for(module: ir.Module, part: ir.Function, openmp: OpenMp | None) -> ir.Function:
    """Emit ``whole(…, parts, …, threads)``, which distributes ``part(…, parts, …, begin, end,
    thread)``.

    ``parts`` is the first integer of both. Without ``openmp`` the calling thread does all parts.
    """
    handed = part.function_type.args[:-3]
    whole = ir.Function(module, ir.FunctionType(VOID, [*handed, I64]), f"whole_{part.name}")
    *given, threads = whole.args
    builder = ir.IRBuilder(whole.append_basic_block())
    if openmp is None:
        builder.call(part, [*given, I64(0), given[handed.index(I64)], I64(0)])
    else:
        shared = emit_alloca(builder, _WORD_BYTES * len(given))
        for index, value in enumerate(given):
            builder.store(value, emit_offset(builder, shared, I64(_WORD_BYTES * index)))
        openmp.emit_fork(builder, _emit_task(module, part, openmp), shared, threads)
    builder.ret_void()
    return whole


def _emit_task(module: ir.Module, part: ir.Function, openmp: OpenMp) -> ir.Function:
    """Emit what each thread of a team runs: its share of the parts."""
    handed = part.function_type.args[:-3]
    task = ir.Function(module, openmp.task_type, f"task_{part.name}")
    builder = ir.IRBuilder(task.append_basic_block())
    given = [
        builder.load(emit_offset(builder, task.args[-1], I64(_WORD_BYTES * index)), typ=kind)
        for index, kind in enumerate(handed)
    ]
    query = ir.FunctionType(I32, [])
    thread, team = (
        builder.zext(builder.call(declare_function(module, name, query), []), I64)
        for name in _THREAD_QUERIES
    )
    parts = given[handed.index(I64)]
    begin = builder.udiv(builder.mul(parts, thread), team)
    end = builder.udiv(builder.mul(parts, builder.add(thread, I64(1))), team)
    builder.call(part, [*given, begin, end, thread])
    builder.ret_void()
    return task


def _register_symbols(path: str, symbols: tuple[str, ...]) -> bool:
    """Register ``symbols`` with LLVM if the loaded library at ``path`` has all of them."""
    try:
        library = ctypes.CDLL(path)
        found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in symbols}
    except (OSError, AttributeError):
        return False
    for name, address in found.items():
        llvm.add_symbol(name, address.value)
    return True
