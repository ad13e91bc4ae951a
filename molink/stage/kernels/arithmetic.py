"""How a CPU multiplies 16-bit weights by rows: by its own bf16 products, or widened to float32."""

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
    declare,
    emit_offset,
    emit_spread,
)


class Arithmetic(Protocol):
    """Sums ``lanes`` columns in a register, ``tile`` rows × ``vectors`` registers at a time.

    What a row holds for two neighbours in depth is a *pair*; a pair of weights has four bytes.
    """

    @property
    def lanes(self) -> int: ...
    @property
    def vectors(self) -> int: ...
    @property
    def tile(self) -> int: ...
    @property
    def element(self) -> int:
        """Bytes of an element of rows and results."""
        ...

    @property
    def kept(self) -> torch.dtype:
        """The type of weights."""
        ...

    def load_pair(self, builder: ir.IRBuilder, pointer: ir.Value) -> Values:
        """A row's pair, spread over the lanes."""
        ...

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        """Pairs of as many columns as there are lanes, of number ``vector`` at ``pointer``."""
        ...

    def add_product(
        self, builder: ir.IRBuilder, total: ir.Value, pair: Values, weights: Values
    ) -> ir.Value:
        """``total + pair · weights``, lane by lane."""
        ...

    def store(self, builder: ir.IRBuilder, total: ir.Value, pointer: ir.Value) -> None:
        """Write sums as elements of the result."""
        ...


@dataclass(frozen=True, slots=True)
class DotBf16:
    """bf16 rows, by AVX512-BF16: a product of 16 pairs in one instruction.

    24 of the 32 registers hold sums: more rows at a time than a batch of streams usually has, so
    that their weights come from memory once.
    """

    lanes: int = 16
    vectors: int = 2
    tile: int = 12
    element: int = 2
    kept: torch.dtype = torch.bfloat16

    def load_pair(self, builder: ir.IRBuilder, pointer: ir.Value) -> Values:
        """See :class:`Arithmetic`."""
        pair = emit_spread(builder, builder.load(pointer, typ=I32, align=2), self.lanes)
        return (builder.bitcast(pair, ir.VectorType(BFloat(), 2 * self.lanes)),)

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        """See :class:`Arithmetic`."""
        place = emit_offset(builder, pointer, I64(4 * self.lanes * vector))
        return (builder.load(place, typ=ir.VectorType(BFloat(), 2 * self.lanes), align=64),)

    def add_product(
        self, builder: ir.IRBuilder, total: ir.Value, pair: Values, weights: Values
    ) -> ir.Value:
        """See :class:`Arithmetic`."""
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        vector = ir.VectorType(BFloat(), 2 * self.lanes)
        kind = ir.FunctionType(total.type, [total.type, vector, vector])
        return builder.call(declare(builder.module, name, kind), [total, *pair, *weights])

    def store(self, builder: ir.IRBuilder, total: ir.Value, pointer: ir.Value) -> None:
        """See :class:`Arithmetic`."""
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
    element: int = 4
    kept: torch.dtype = torch.bfloat16

    def load_pair(self, builder: ir.IRBuilder, pointer: ir.Value) -> Values:
        """See :class:`Arithmetic`."""
        second = emit_offset(builder, pointer, I64(self.element))
        both = (builder.load(place, typ=FLOAT, align=4) for place in (pointer, second))
        return tuple(emit_spread(builder, value, self.lanes) for value in both)

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        """See :class:`Arithmetic`. A bf16 is the upper half of a float32."""
        whole, floats = ir.VectorType(I32, self.lanes), ir.VectorType(FLOAT, self.lanes)
        place = emit_offset(builder, pointer, I64(4 * self.lanes * vector))
        pairs = builder.load(place, typ=whole, align=32)
        first = builder.shl(pairs, ir.Constant(whole, [16] * self.lanes))
        second = builder.and_(pairs, ir.Constant(whole, [0xFFFF0000] * self.lanes))
        return builder.bitcast(first, floats), builder.bitcast(second, floats)

    def add_product(
        self, builder: ir.IRBuilder, total: ir.Value, pair: Values, weights: Values
    ) -> ir.Value:
        """See :class:`Arithmetic`."""
        kind = ir.FunctionType(total.type, [total.type] * 3)
        fma = declare(builder.module, f"llvm.fma.v{self.lanes}f32", kind)
        for value, weight in zip(pair, weights, strict=True):
            total = builder.call(fma, [value, weight, total])
        return total

    def store(self, builder: ir.IRBuilder, total: ir.Value, pointer: ir.Value) -> None:
        """See :class:`Arithmetic`."""
        builder.store(total, pointer, align=4)


@dataclass(frozen=True, slots=True)
class WidenedF16(WidenedBf16):
    """The same with float16 weights, which F16C widens as they are read."""

    kept: torch.dtype = torch.float16

    def load_weights(self, builder: ir.IRBuilder, pointer: ir.Value, vector: int) -> Values:
        """See :class:`Arithmetic`. The second of all pairs follow the first of all."""
        halves, floats = (ir.VectorType(kind, self.lanes) for kind in (ir.HalfType(), FLOAT))
        first = 2 * self.lanes * vector
        offsets = (first, first + 2 * self.lanes * self.vectors)
        places = (emit_offset(builder, pointer, I64(offset)) for offset in offsets)
        return tuple(
            builder.fpext(builder.load(place, typ=halves, align=16), floats) for place in places
        )
