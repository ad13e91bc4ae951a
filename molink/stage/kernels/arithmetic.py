"""How a CPU multiplies: by its own products of bf16, or in float32, of what 16 bits widen to."""

from dataclasses import dataclass
from typing import Protocol

import torch
from llvmlite import ir

from molink.stage.kernels.emit import (
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
    """Sums ``lanes`` columns in a register, ``tile`` rows × ``vectors`` registers at a time.

    What a row holds for two neighbours in depth is a *pair*; a pair of weights has four bytes.
    Where weights are float32 each is a pair of its own.
    """

    @property
    def lanes(self) -> int: ...
    @property
    def vectors(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def prefetch_min_rows(self) -> int | None:
        """So many rows at a time compute for so long that the CPU's prefetcher falls behind: from
        them on weights are asked for ahead."""

    @property
    def element(self) -> int:
        """Bytes of an element of rows and results."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """The type of weights."""

    @property
    def pair_bytes(self) -> int:
        """Bytes of a row's pair."""

    def load_pair(self, builder: ir.IRBuilder, pointer: ir.Value) -> Values:
        """A row's pair, spread over the lanes."""

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        """Pairs of as many columns as there are lanes, of number ``vector`` at ``pointer``."""

    def add_product(
        self, builder: ir.IRBuilder, total: ir.Value, pair: Values, weights: Values
    ) -> ir.Value:
        """``total + pair · weights``, lane by lane."""

    def store_sum(self, builder: ir.IRBuilder, total: ir.Value, pointer: ir.Value) -> None:
        """Write sums as elements of the result."""


@dataclass(frozen=True, slots=True)
class DotBf16:
    """bf16 rows, by AVX512-BF16: a product of 16 pairs in one instruction.

    24 of the 32 registers hold sums: more rows at a time than a batch of streams usually has, so
    that their weights come from memory once.
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
    """float32 rows, by fused multiply-adds: what CPUs without products of bf16 have (AVX2).

    The weights are what the model's file holds, to the bit; they take half the memory, and half the
    time to read, of those that are kept as float32.
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
    """The same with float16 weights, which F16C widens as they are read."""

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
    """float32 rows by float32, in fused multiply-adds of AVX2 or AVX-512."""

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
