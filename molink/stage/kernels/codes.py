"""How the codes of a GGUF file's blocks become what a CPU multiplies by, in its registers.

Codes of up to 6 bits lie in *planes*: their low four bits in one, the others in a second. A word of
32 bits has those of one column and as many neighbours in depth as it holds; its lower half those at
even depths, its upper half the others, so that a shift brings a pair of neighbours forth. Codes of
8 bits lie in pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from llvmlite import ir

from molink.gguf.formats import BlockFormat
from molink.stage.kernels.emit import FLOAT, I32, I64, BFloat, Values, declare, emit_offset

I8, I16 = ir.IntType(8), ir.IntType(16)
_HALF = 16
_LOW_BITS, _LOW = 4, 15


@dataclass(frozen=True, slots=True)
class Plane:
    """``bits`` of each code; ``depth`` neighbours of a column share a word of ``word`` bytes."""

    bits: int
    word: int = 4

    @property
    def depth(self) -> int:
        """Codes of a word."""
        return 8 * self.word // self.bits


def planes(form: BlockFormat) -> tuple[Plane, ...]:
    """Those of a format, in the order in which they lie."""
    if form.bits == 8:
        return (Plane(8, 2),)
    high = form.bits - _LOW_BITS
    return (Plane(_LOW_BITS), Plane(high)) if high else (Plane(_LOW_BITS),)


class Decoder(Protocol):
    """Makes pairs of weights, as an arithmetic multiplies by them, of the words of all planes."""

    def pair(self, builder: ir.IRBuilder, words: Values, index: int) -> Values:
        """Pair ``index`` of its group; ``words`` are those that hold it, a vector a plane."""
        ...


@dataclass(frozen=True, slots=True)
class TableDecoder:
    """bf16 weights, looked up in registers: for products of bf16 pairs (AVX512)."""

    form: BlockFormat
    lanes: int = 16

    def pair(self, builder: ir.IRBuilder, words: Values, index: int) -> Values:
        """See :class:`Decoder`."""
        count = 2 * self.lanes
        halves, weights = ir.VectorType(I16, count), ir.VectorType(BFloat(), count)
        if self.form.bits == 8:
            return (self._narrowed(builder, builder.bitcast(words[0], ir.VectorType(I8, count))),)
        shift = _LOW_BITS * (index % 4)
        codes = _shifted(builder, builder.bitcast(words[0], halves), shift)
        if len(words) > 1:
            high = self.form.bits - _LOW_BITS
            place = high * (index % (_HALF // high)) - _LOW_BITS
            upper = _shifted(builder, builder.bitcast(words[1], halves), place)
            mask = ((1 << high) - 1) << _LOW_BITS
            codes = builder.or_(
                builder.and_(codes, ir.Constant(halves, [_LOW] * count)),
                builder.and_(upper, ir.Constant(halves, [mask] * count)),
            )
        # A look-up takes as many bits of an index as the table has entries for.
        tables = self._tables(halves, count)
        name, given = "permvar", [tables[0], codes]
        if len(tables) > 1:
            name, given = "vpermi2var", [tables[0], codes, tables[1]]
        kind = ir.FunctionType(halves, [halves] * len(given))
        found = builder.call(declare(builder.module, f"llvm.x86.avx512.{name}.hi.512", kind), given)
        return (builder.bitcast(found, weights),)

    def _tables(self, halves: ir.VectorType, count: int) -> list[ir.Constant]:
        """The weights of all codes, ``count`` in a register; those of 4 bits are there twice."""
        codes = max(count, 1 << self.form.bits)
        weights = torch.arange(codes).remainder(1 << self.form.bits).sub(self.form.offset)
        entries = weights.bfloat16().view(torch.int16).tolist()
        return [ir.Constant(halves, entries[at : at + count]) for at in range(0, codes, count)]

    def _narrowed(self, builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
        """Whole numbers of 8 bits, which bf16 holds exactly."""
        floats = ir.VectorType(FLOAT, self.lanes)
        kind = ir.FunctionType(ir.VectorType(BFloat(), 2 * self.lanes), [floats, floats])
        narrow = declare(builder.module, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind)
        parts = []
        for first in (self.lanes, 0):  # the second operand becomes the lower half
            places = range(first, first + self.lanes)
            order = ir.Constant(ir.VectorType(I32, self.lanes), list(places))
            part = builder.shuffle_vector(codes, codes, order)
            wide = builder.sext(part, ir.VectorType(I32, self.lanes))
            parts.append(builder.sitofp(wide, floats))
        return builder.call(narrow, parts)


@dataclass(frozen=True, slots=True)
class WideningDecoder:
    """float32 weights: for fused multiply-adds."""

    form: BlockFormat
    lanes: int

    def pair(self, builder: ir.IRBuilder, words: Values, index: int) -> Values:
        """See :class:`Decoder`."""
        whole, floats = ir.VectorType(I32, self.lanes), ir.VectorType(FLOAT, self.lanes)
        if self.form.bits == 8:
            pairs = builder.sext(words[0], whole)
            eight, high = (ir.Constant(whole, [bits] * self.lanes) for bits in (8, 24))
            codes = [
                builder.ashr(builder.shl(pairs, high), high),
                builder.ashr(pairs, eight),
            ]
        else:
            codes = [
                self._code(builder, words, index, parity, whole) for parity in (0, 1)
            ]
        return tuple(builder.sitofp(code, floats) for code in codes)

    def _code(
        self, builder: ir.IRBuilder, words: Values, index: int, parity: int, whole: ir.VectorType
    ) -> ir.Value:
        found = None
        for word, plane, low in zip(words, planes(self.form), (0, _LOW_BITS), strict=False):
            place = plane.bits * (index % (_HALF // plane.bits)) + _HALF * parity - low
            mask = ((1 << plane.bits) - 1) << low
            part = builder.and_(
                _shifted(builder, word, place), ir.Constant(whole, [mask] * self.lanes)
            )
            found = part if found is None else builder.or_(found, part)
        if self.form.offset:
            found = builder.sub(found, ir.Constant(whole, [self.form.offset] * self.lanes))
        return found


def _shifted(builder: ir.IRBuilder, words: ir.Value, place: int) -> ir.Value:
    """``words`` with the bit at ``place`` moved to the lowest; to the left if it is negative."""
    if not place:
        return words
    by = ir.Constant(words.type, [abs(place)] * words.type.count)
    return builder.lshr(words, by) if place > 0 else builder.shl(words, by)


def emit_pairs(
    builder: ir.IRBuilder, form: BlockFormat, decoder: Decoder, first: list[ir.Value], columns: int
) -> Iterator[Values]:
    """The pairs of a group, one after the other.

    ``first`` are where the words of a register's columns begin in each plane; ``columns`` is of how
    many columns the words lie side by side.
    """
    loaded: dict[tuple[int, int], ir.Value] = {}
    for index in range(form.group // 2):
        words = []
        for number, (plane, begin) in enumerate(zip(planes(form), first, strict=True)):
            key = number, 2 * index // plane.depth
            if key not in loaded:
                place = emit_offset(builder, begin, I64(key[1] * columns * plane.word))
                kind = ir.VectorType(ir.IntType(8 * plane.word), decoder.lanes)
                loaded[key] = builder.load(place, typ=kind, align=plane.word)
            words.append(loaded[key])
        yield decoder.pair(builder, words, index)
