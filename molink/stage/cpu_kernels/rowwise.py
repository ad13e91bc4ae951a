"""Row-wise operators between two products, fused into one call each.

Torch needs five operators each for a norm and a rotation, whose overhead exceeds the arithmetic of
few rows. Rows are bf16 or float32; computation is in float32, rounded once.
"""

import math

import torch
from llvmlite import ir
from torch import Tensor

from molink.checkpoint.traits import Activation
from molink.stage.cpu_kernels.compiler import CompiledLibrary
from molink.stage.cpu_kernels.emit import (
    FLOAT,
    FLOATS,
    I64,
    Values,
    begin_function,
    emit_broadcast,
    emit_call,
    emit_constant,
    emit_element_pointer,
    emit_load,
    emit_loop,
    emit_offset,
    emit_power_of_two,
    emit_reduction,
    emit_store,
)
from molink.stage.cpu_kernels.kernel_shape import F32, LANES
from molink.stage.cpu_kernels.openmp import OpenMp, emit_parallel_for

#: Elements below which a second thread doesn't pay off.
_MIN_PARALLEL_NUMBERS = 1 << 16
#: gelu by tanh is ``x · sigmoid(2 √(2/π) (x + 0.044715 x³))`` (Hendrycks and Gimpel 2016).
_GELU, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


class RowwiseKernels:
    """Kernels for a model's norms (``eps``) and activation; see :func:`supports_rowwise`."""

    def __init__(
        self,
        dtype: torch.dtype,
        eps: float,
        activation: Activation,
        openmp: OpenMp | None = None,
        threads: int = 1,
        features: str | None = None,
    ) -> None:
        """Compile for rows of ``dtype``.

        Raises:
            RuntimeError: LLVM can't compile for this CPU or ``features``.
        """
        self._threads = threads
        #: Type of rows, results and angles.
        self.dtype = dtype
        module, element = ir.Module("rowwise"), dtype.itemsize
        parts = (
            _emit_norm(module, element, eps),
            _emit_gate(module, element, activation),
            _emit_rotate(module, element),
            _emit_head_norm(module, element, eps),
        )
        wholes = [emit_parallel_for(module, part, openmp).name for part in parts]
        self._library = library = CompiledLibrary(module, features)
        self._norm = library.get_function(wholes[0], pointers=3, integers=3)
        self._gate = library.get_function(wholes[1], pointers=2, integers=3)
        self._rotate = library.get_function(wholes[2], pointers=2, integers=6)
        self._norm_heads = library.get_function(wholes[3], pointers=2, integers=5)

    def normalize_rows(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Norm rows ``[T, n]`` and multiply by ``weight`` (float32 ``[n]``)."""
        rows = rows.contiguous()
        count, width = rows.shape
        result = rows.new_empty(count, width)
        self._norm(
            rows.data_ptr(),
            weight.data_ptr(),
            result.data_ptr(),
            count,
            width,
            self._count_threads(count * width),
        )
        return result

    def normalize_heads(self, heads: Tensor, weight: Tensor) -> None:
        """Norm each head of ``[T, n, head_dim]`` in place, and multiply by its ``weight``.

        Weights are float32 ``[n, head_dim]``; ``head_dim`` is a multiple of :data:`.LANES`.
        """
        count, members, size = heads.shape
        self._norm_heads(
            heads.data_ptr(),
            weight.data_ptr(),
            count,
            members,
            heads.stride(0) * self.dtype.itemsize,
            size,
            self._count_threads(count * members * size),
        )

    def apply_gate(self, rows: Tensor) -> Tensor:
        """Compute ``activate(gate) * up`` of rows ``[T, 2n]``: gate, then up."""
        rows = rows.contiguous()
        count, width = rows.shape[0], rows.shape[1] // 2
        result = rows.new_empty(count, width)
        self._gate(
            rows.data_ptr(), result.data_ptr(), count, width, self._count_threads(count * width)
        )
        return result

    def rotate_heads(self, heads: Tensor, angles: Tensor) -> None:
        """Rotate ``heads`` in place; see :func:`molink.stage.decoder.rotary.rotate_half`."""
        count, members, size = heads.shape
        row, head, _ = heads.stride()
        self._rotate(
            heads.data_ptr(),
            angles.data_ptr(),
            count,
            members,
            row * self.dtype.itemsize,
            head * self.dtype.itemsize,
            angles.shape[-1],
            self._count_threads(count * members * size),
        )

    def _count_threads(self, numbers: int) -> int:
        return self._threads if numbers > _MIN_PARALLEL_NUMBERS else 1


def _emit_norm(module: ir.Module, element: int, eps: float) -> ir.Function:
    """``norm(rows, weight, result, count, width, begin, end, thread)``."""
    function, builder = begin_function(module, "norm", pointers=3, numbers=5)
    rows, weight, result, _, width, begin, end, _ = function.args

    def emit_row(row: ir.Value, _: Values) -> Values:
        at = builder.mul(builder.mul(row, width), I64(element))
        source, target = (emit_offset(builder, each, at) for each in (rows, result))
        _emit_normed(builder, element, eps, width, (source, weight, target))
        return ()

    emit_loop(builder, begin, end, 1, emit_row)
    builder.ret_void()
    return function


def _emit_head_norm(module: ir.Module, element: int, eps: float) -> ir.Function:
    """``head_norm(heads, weight, count, members, row_bytes, width, begin, end, thread)``."""
    function, builder = begin_function(module, "head_norm", pointers=2, numbers=7)
    heads, weight, _, members, row_bytes, width, begin, end, _ = function.args

    def emit_row(row: ir.Value, _: Values) -> Values:
        base = emit_offset(builder, heads, builder.mul(row, row_bytes))

        def emit_head(member: ir.Value, _: Values) -> Values:
            first = builder.mul(member, width)
            place = emit_element_pointer(builder, base, first, element)
            own = emit_element_pointer(builder, weight, first, F32)
            _emit_normed(builder, element, eps, width, (place, own, place))
            return ()

        emit_loop(builder, I64(0), members, 1, emit_head)
        return ()

    emit_loop(builder, begin, end, 1, emit_row)
    builder.ret_void()
    return function


def _emit_normed(
    builder: ir.IRBuilder, element: int, eps: float, width: ir.Value, places: Values
) -> None:
    """Norm a row and multiply it by a weight; ``places`` are those of row, weight and result."""
    source, weight, target = places

    def load_at(column: ir.Value) -> ir.Value:
        return emit_load(builder, emit_element_pointer(builder, source, column, element), element)

    def emit_square(column: ir.Value, carried: Values) -> Values:
        value = load_at(column)
        return (emit_call(builder, "llvm.fma.v16f32", value, value, carried[0]),)

    _, (sums,) = emit_loop(builder, I64(0), width, LANES, emit_square, (emit_constant(0.0),))
    total = emit_reduction(builder, "fadd", sums)
    mean = builder.fdiv(total, builder.sitofp(width, FLOAT))
    root = emit_call(builder, "llvm.sqrt.f32", builder.fadd(mean, FLOAT(eps)))
    scale = emit_broadcast(builder, builder.fdiv(FLOAT(1.0), root), LANES)

    def emit_scaled(column: ir.Value, _: Values) -> Values:
        address = emit_element_pointer(builder, weight, column, F32)
        factor = builder.load(address, typ=FLOATS, align=4)
        scaled = builder.fmul(builder.fmul(load_at(column), scale), factor)
        emit_store(builder, scaled, emit_element_pointer(builder, target, column, element), element)
        return ()

    emit_loop(builder, I64(0), width, LANES, emit_scaled)


def _emit_gate(module: ir.Module, element: int, activation: Activation) -> ir.Function:
    """``gate(rows, result, count, width, begin, end, thread)``."""
    function, builder = begin_function(module, "gate", pointers=2, numbers=5)
    rows, result, _, width, begin, end, _ = function.args
    log2_e = math.log2(math.e)

    def emit_exponent(value: ir.Value) -> ir.Value:
        """Emit the exponent of the sigmoid, as a negative power of two."""
        if activation == "silu":
            return builder.fmul(value, emit_constant(-log2_e))
        square = builder.fmul(value, value)
        bent = emit_call(
            builder, "llvm.fma.v16f32", square, emit_constant(_CUBE), emit_constant(1.0)
        )
        return builder.fmul(builder.fmul(value, bent), emit_constant(-_GELU * log2_e))

    def emit_row(row: ir.Value, _: Values) -> Values:
        at = builder.mul(builder.mul(row, width), I64(element))
        target = emit_offset(builder, result, at)
        gate = emit_offset(builder, rows, builder.mul(at, I64(2)))
        up = emit_offset(builder, gate, builder.mul(width, I64(element)))

        def emit_vector(column: ir.Value, _: Values) -> Values:
            given, factor = (
                emit_load(builder, emit_element_pointer(builder, each, column, element), element)
                for each in (gate, up)
            )
            power = emit_power_of_two(builder, emit_exponent(given))
            active = builder.fdiv(given, builder.fadd(power, emit_constant(1.0)))
            address = emit_element_pointer(builder, target, column, element)
            emit_store(builder, builder.fmul(active, factor), address, element)
            return ()

        emit_loop(builder, I64(0), width, LANES, emit_vector)
        return ()

    emit_loop(builder, begin, end, 1, emit_row)
    builder.ret_void()
    return function


def _emit_rotate(module: ir.Module, element: int) -> ir.Function:
    """``rotate(heads, angles, count, members, row, head, rotary, begin, end, thread)``.

    ``row`` and ``head`` are strides in bytes.
    """
    function, builder = begin_function(module, "rotate", pointers=2, numbers=8)
    heads, angles, _, members, row_bytes, head_bytes, rotary, begin, end, _ = function.args
    half = builder.udiv(rotary, I64(2))

    def emit_row(row: ir.Value, _: Values) -> Values:
        cosines = emit_element_pointer(
            builder, angles, builder.mul(row, builder.mul(rotary, I64(2))), element
        )
        sines = emit_element_pointer(builder, cosines, rotary, element)
        base = emit_offset(builder, heads, builder.mul(row, row_bytes))

        def emit_head(member: ir.Value, _: Values) -> Values:
            first = emit_offset(builder, base, builder.mul(member, head_bytes))
            second = emit_element_pointer(builder, first, half, element)

            def emit_vector(column: ir.Value, _: Values) -> Values:
                low, high = (
                    emit_element_pointer(builder, each, column, element) for each in (first, second)
                )
                ats = (column, builder.add(column, half))
                _emit_rotated(builder, element, (low, high), (cosines, sines), ats)
                return ()

            emit_loop(builder, I64(0), half, LANES, emit_vector)
            return ()

        emit_loop(builder, I64(0), members, 1, emit_head)
        return ()

    emit_loop(builder, begin, end, 1, emit_row)
    builder.ret_void()
    return function


def _emit_rotated(
    builder: ir.IRBuilder, element: int, addresses: Values, tables: Values, ats: Values
) -> None:
    """Rotate a vector of pairs at two ``places`` by their cosines and sines."""
    low, high = (emit_load(builder, address, element) for address in addresses)
    for address, own, other, at in zip(addresses, (low, high), (high, low), ats, strict=True):
        cosine, sine = (
            emit_load(builder, emit_element_pointer(builder, table, at, element), element)
            for table in tables
        )
        turned = builder.fmul(other, sine)
        turned = emit_call(builder, "llvm.fma.v16f32", own, cosine, turned)
        emit_store(builder, turned, address, element)
