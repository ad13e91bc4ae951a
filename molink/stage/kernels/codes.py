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
#: A power of two, and its bits as a bf16.
_BASE, _BASE_BITS = 64, 0x4280


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

    @property
    def lanes(self) -> int:
        """Columns of a register."""
        ...

    @property
    def excess(self) -> int:
        """By how much more the weights are than ``code - offset``."""
        ...

    def pair(self, builder: ir.IRBuilder, words: Values, index: int) -> Values:
        """Pair ``index`` of its group; ``words`` are those that hold it, a vector a plane."""
        ...


@dataclass(frozen=True, slots=True)
class Bf16Decoder:
    """bf16 weights, for products of bf16 pairs (AVX512).

    Those of 4 and 5 bits are looked up in a register. Those of 6 bits are put into the mantissa of
    a number that is 64 without them: a table in two registers takes three times as long.
    """

    form: BlockFormat
    lanes: int = 16

    @property
    def excess(self) -> int:
        """See :class:`Decoder`."""
        return _BASE + self.form.offset if self.form.bits == 6 else 0

    def pair(self, builder: ir.IRBuilder, words: Values, index: int) -> Values:
        """See :class:`Decoder`."""
        count = 2 * self.lanes
        halves, weights = ir.VectorType(I16, count), ir.VectorType(BFloat(), count)
        if self.form.bits == 8:
            return (self._narrowed(builder, builder.bitcast(words[0], ir.VectorType(I8, count))),)
        given = [builder.bitcast(word, halves) for word in words]
        if self.form.bits == 6:
            found = self._in_mantissa(builder, given, index)
        else:
            found = self._looked_up(builder, given, index)
        return (builder.bitcast(found, weights),)

    def _in_mantissa(self, builder: ir.IRBuilder, words: Values, index: int) -> ir.Value:
        # From 64 to 128 a bf16 has steps of a half: its lowest bit stays 0.
        halves = words[0].type
        base = ir.Constant(halves, [_BASE_BITS] * halves.count)
        upper = builder.or_(_field(builder, words[1], 2, index, _LOW_BITS + 1), base)
        return builder.or_(_field(builder, words[0], _LOW_BITS, index, 1), upper)

    def _looked_up(self, builder: ir.IRBuilder, words: Values, index: int) -> ir.Value:
        halves = words[0].type
        codes = _shifted(builder, words[0], _LOW_BITS * (index % 4))
        if len(words) > 1:
            low = ir.Constant(halves, [_LOW] * halves.count)
            fifth = _field(builder, words[1], 1, index, _LOW_BITS)
            codes = builder.or_(builder.and_(codes, low), fifth)
        # Only five bits of an index count: with four bits every weight is there twice.
        weights = torch.arange(halves.count).remainder(1 << self.form.bits).sub(self.form.offset)
        table = ir.Constant(halves, weights.bfloat16().view(torch.int16).tolist())
        kind = ir.FunctionType(halves, [halves, halves])
        look_up = declare(builder.module, "llvm.x86.avx512.permvar.hi.512", kind)
        return builder.call(look_up, [table, codes])

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

    @property
    def excess(self) -> int:
        """See :class:`Decoder`."""
        return 0

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


def _field(
    builder: ir.IRBuilder, halves: ir.Value, bits: int, index: int, place: int
) -> ir.Value:
    """The ``bits`` bits of pair ``index``, at ``place`` of each half, and nothing beside."""
    shifted = _shifted(builder, halves, bits * (index % (_HALF // bits)) - place)
    mask = ((1 << bits) - 1) << place
    return builder.and_(shifted, ir.Constant(halves.type, [mask] * halves.type.count))


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
