"""Arithmetic of products on a CPU: native bf16 products, or float32 after widening."""

from dataclasses import dataclass
from typing import Protocol

import torch
from llvmlite import ir

from molink.stage.cpu_kernels.emit import (
    FLOAT,
    I32,
    I64,
    BFloat,
    Values,
    declare_function,
    emit_broadcast,
    emit_offset,
)


class Arithmetic(Protocol):
    """Sums ``lanes`` columns per register, ``tile`` rows × ``vectors`` registers at a time.

    Two neighbours in depth form a *pair*; a pair of 16-bit weights has four bytes. With float32
    weights each element counts as a pair.
    """

    @property
    def lanes(self) -> int: ...
    @property
    def vectors(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def prefetch_min_rows(self) -> int | None:
        """Minimum rows per tile for prefetching weights; the CPU's own prefetcher falls behind."""

    @property
    def element(self) -> int:
        """Bytes of an element of rows and results."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """Type of weights."""

    @property
    def pair_bytes(self) -> int:
        """Bytes of a row's pair."""

    def load_pair(self, builder: ir.IRBuilder, pointer: ir.Value) -> Values:
        """Load a row's pair, broadcast to all lanes."""

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        """Load the pairs of ``lanes`` columns: vector number ``vector`` at ``pointer``."""

    def add_product(
        self, builder: ir.IRBuilder, total: ir.Value, pair: Values, weights: Values
    ) -> ir.Value:
        """Compute ``total + pair · weights``, lane by lane."""

    def store_sum(self, builder: ir.IRBuilder, total: ir.Value, pointer: ir.Value) -> None:
        """Store sums as elements of the result."""


@dataclass(frozen=True, slots=True)
class DotBf16:
    """bf16 rows with AVX512-BF16: one instruction multiplies 16 pairs.

    24 of the 32 registers hold sums. That covers more rows than most batches have, so weights are
    read from memory once.
    """

    lanes: int = 16
    vectors: int = 2
    tile: int = 12
    prefetch_min_rows: int | None = 9
    element: int = 2
    weight_dtype: torch.dtype = torch.bfloat16
    pair_bytes: int = 4

    def load_pair(self, builder: ir.IRBuilder, pointer: ir.Value) -> Values:
        pair = emit_broadcast(builder, builder.load(pointer, typ=I32, align=2), self.lanes)
        return (builder.bitcast(pair, ir.VectorType(BFloat(), 2 * self.lanes)),)

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        place = emit_offset(builder, pointer, I64(4 * self.lanes * vector))
        return (builder.load(place, typ=ir.VectorType(BFloat(), 2 * self.lanes), align=64),)

    def add_product(
        self, builder: ir.IRBuilder, total: ir.Value, pair: Values, weights: Values
    ) -> ir.Value:
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        vector = ir.VectorType(BFloat(), 2 * self.lanes)
        kind = ir.FunctionType(total.type, [total.type, vector, vector])
        return builder.call(declare_function(builder.module, name, kind), [total, *pair, *weights])

    def store_sum(self, builder: ir.IRBuilder, total: ir.Value, pointer: ir.Value) -> None:
        rounded = builder.fptrunc(total, ir.VectorType(BFloat(), self.lanes))
        builder.store(rounded, pointer, align=2)


@dataclass(frozen=True, slots=True)
class WidenedBf16:
    """float32 rows with fused multiply-adds, for CPUs without bf16 products (AVX2).

    bf16 weights stay exact, and take half the memory and read time of float32.
    """

    lanes: int = 8
    vectors: int = 2
    tile: int = 5
    prefetch_min_rows: int | None = 2
    element: int = 4
    weight_dtype: torch.dtype = torch.bfloat16
    pair_bytes: int = 8

    def load_pair(self, builder: ir.IRBuilder, pointer: ir.Value) -> Values:
        second = emit_offset(builder, pointer, I64(self.element))
        both = (builder.load(place, typ=FLOAT, align=4) for place in (pointer, second))
        return tuple(emit_broadcast(builder, value, self.lanes) for value in both)

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        whole, floats = ir.VectorType(I32, self.lanes), ir.VectorType(FLOAT, self.lanes)
        place = emit_offset(builder, pointer, I64(4 * self.lanes * vector))
        pairs = builder.load(place, typ=whole, align=32)
        first = builder.shl(pairs, ir.Constant(whole, [16] * self.lanes))
        second = builder.and_(pairs, ir.Constant(whole, [0xFFFF0000] * self.lanes))
        return builder.bitcast(first, floats), builder.bitcast(second, floats)

    def add_product(
        self, builder: ir.IRBuilder, total: ir.Value, pair: Values, weights: Values
    ) -> ir.Value:
        return _emit_multiply_add(builder, total, pair, weights)

    def store_sum(self, builder: ir.IRBuilder, total: ir.Value, pointer: ir.Value) -> None:
        builder.store(total, pointer, align=4)


@dataclass(frozen=True, slots=True)
class WidenedF16(WidenedBf16):
    """float32 rows and float16 weights, widened by F16C."""

    weight_dtype: torch.dtype = torch.float16

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        halves, floats = (ir.VectorType(kind, self.lanes) for kind in (ir.HalfType(), FLOAT))
        first = 2 * self.lanes * vector
        offsets = (first, first + 2 * self.lanes * self.vectors)
        places = (emit_offset(builder, pointer, I64(offset)) for offset in offsets)
        return tuple(
            builder.fpext(builder.load(place, typ=halves, align=16), floats) for place in places
        )


@dataclass(frozen=True, slots=True)
class Float32:
    """float32 rows and weights, with fused multiply-adds of AVX2 or AVX-512."""

    lanes: int = 8
    vectors: int = 2
    tile: int = 6
    prefetch_min_rows: int | None = None
    element: int = 4
    weight_dtype: torch.dtype = torch.float32
    pair_bytes: int = 4

    def load_pair(self, builder: ir.IRBuilder, pointer: ir.Value) -> Values:
        return (emit_broadcast(builder, builder.load(pointer, typ=FLOAT, align=4), self.lanes),)

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        place = emit_offset(builder, pointer, I64(4 * self.lanes * vector))
        return (builder.load(place, typ=ir.VectorType(FLOAT, self.lanes), align=4),)

    def add_product(
        self, builder: ir.IRBuilder, total: ir.Value, pair: Values, weights: Values
    ) -> ir.Value:
        return _emit_multiply_add(builder, total, pair, weights)

    def store_sum(self, builder: ir.IRBuilder, total: ir.Value, pointer: ir.Value) -> None:
        builder.store(total, pointer, align=4)


def _emit_multiply_add(
    builder: ir.IRBuilder, total: ir.Value, pair: Values, weights: Values
) -> ir.Value:
    kind = ir.FunctionType(total.type, [total.type] * 3)
    fma = declare_function(builder.module, f"llvm.fma.v{total.type.count}f32", kind)
    for value, weight in zip(pair, weights, strict=True):
        total = builder.call(fma, [value, weight, total])
    return total
