"""Generated code that shares work among the threads of either OpenMP library is valid."""

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from molink.stage.cpu_kernels.emit import I64, POINTER, VOID
from molink.stage.cpu_kernels.openmp import ForkSymbol, OpenMp, emit_parallel_for


@pytest.mark.parametrize("entry", ["gnu", "llvm"])
def test_several_functions_of_one_module(entry: ForkSymbol) -> None:
    module = ir.Module()
    for name in ("one", "another"):
        kind = ir.FunctionType(VOID, [POINTER, I64, I64, I64, I64])
        part = ir.Function(module, kind, name)
        ir.IRBuilder(part.append_basic_block()).ret_void()
        emit_parallel_for(module, part, OpenMp(entry))
    llvm.parse_assembly(str(module)).verify()
