"""Decodes codes of quantized weights in registers.

Bit positions of codes are described in :func:`molink.gguf.block_formats.locate_pair`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from llvmlite import ir

from molink.gguf.block_formats import HALF_BITS, BitRange, BlockFormat, locate_pair
from molink.stage.cpu_kernels.emit import BYTE, FLOAT, I32, BFloat, Values, declare_function

_I16 = ir.IntType(16)

#: Power of two at which bf16 has a step of 1, and its bits.
_BASE, _BASE_BITS = 128, 0x4300


#: Given the number of a group's word, returns the vector of these words, one per column.
LoadWord = Callable[[int], ir.Value]


class CodeDecoder(Protocol):
    """Decodes a group's words to pairs of weights."""

    @property
    def excess(self) -> int:
        """Difference between decoded weights and ``code - offset``."""

    def emit_pair(self, builder: ir.IRBuilder, words: LoadWord, index: int) -> Values:
        """Decode pair ``index`` of the group."""


@dataclass(frozen=True, slots=True)
class Bf16Decoder:
    """Decodes to bf16 (AVX512).

    Codes of 4 and 5 bits are looked up in a register. Codes of 6 bits become the mantissa of a
    number offset by 128, since a table would be too large.
    """

    form: BlockFormat
    lanes: int = 16

    @property
    def excess(self) -> int:
        return _BASE + self.form.offset if self.form.bits == 6 else 0

    def emit_pair(self, builder: ir.IRBuilder, words: LoadWord, index: int) -> Values:
        count = 2 * self.lanes
        if self.form.bits == 8:
            codes = builder.bitcast(words(index), ir.VectorType(BYTE, count))
            return (self._narrow_codes(builder, codes),)
        halves = ir.VectorType(_I16, count)
        found: ir.Value | None = None
        if self.form.bits == 6:
            found = ir.Constant(halves, [_BASE_BITS] * count)
        parts = locate_pair(self.form.bits, index)
        for bit_range in reversed(parts):
            word = builder.bitcast(words(bit_range.word), halves)
            # A lookup uses five bits of the index and ignores the rest.
            loose = self.form.bits == 4 and len(parts) == 1
            part = _extract_bits(builder, word, bit_range, 0, HALF_BITS, loose)
            found = part if found is None else builder.or_(part, found)
        if self.form.bits < 6:
            found = self._look_up_codes(builder, found)
        return (builder.bitcast(found, ir.VectorType(BFloat(), count)),)

    def _look_up_codes(self, builder: ir.IRBuilder, codes: ir.Value | None) -> ir.Value:
        # The table has 32 entries: with 4-bit codes each weight appears twice.
        halves = ir.VectorType(_I16, 2 * self.lanes)
        weights = torch.arange(halves.count).remainder(1 << self.form.bits)
        if self.form.codebook:
            weights = torch.tensor(self.form.codebook)[weights]
        else:
            weights = weights.sub(self.form.offset)
        table = ir.Constant(halves, weights.bfloat16().view(torch.int16).tolist())
        kind = ir.FunctionType(halves, [halves, halves])
        look_up = declare_function(builder.module, "llvm.x86.avx512.permvar.hi.512", kind)
        return builder.call(look_up, [table, codes])

    def _narrow_codes(self, builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
        """Convert 8-bit integers, which bf16 holds exactly."""
        floats, places = ir.VectorType(FLOAT, self.lanes), ir.VectorType(I32, self.lanes)
        kind = ir.FunctionType(ir.VectorType(BFloat(), 2 * self.lanes), [floats, floats])
        narrow = declare_function(builder.module, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind)
        parts = []
        for first in (self.lanes, 0):  # the second operand fills the lower half
            order = ir.Constant(places, list(range(first, first + self.lanes)))
            wide = builder.sext(builder.shuffle_vector(codes, codes, order), places)
            parts.append(builder.sitofp(wide, floats))
        return builder.call(narrow, parts)


@dataclass(frozen=True, slots=True)
class Float32Decoder:
    """Decodes to float32, for fused multiply-adds."""

    form: BlockFormat
    lanes: int

    @property
    def excess(self) -> int:
        return 0

    def emit_pair(self, builder: ir.IRBuilder, words: LoadWord, index: int) -> Values:
        whole, floats = ir.VectorType(I32, self.lanes), ir.VectorType(FLOAT, self.lanes)
        if self.form.bits == 8:
            pairs = builder.sext(words(index), whole)
            eight, most = (ir.Constant(whole, [bits] * self.lanes) for bits in (8, 24))
            codes = [builder.ashr(builder.shl(pairs, most), most), builder.ashr(pairs, eight)]
        else:
            codes = [self._decode_code(builder, words, index, parity) for parity in (0, 1)]
        if self.form.codebook:
            return tuple(self._look_up_code(builder, code) for code in codes)
        return tuple(builder.sitofp(code, floats) for code in codes)

    def _decode_code(
        self, builder: ir.IRBuilder, words: LoadWord, index: int, parity: int
    ) -> ir.Value:
        found: ir.Value | None = None
        for bit_range in locate_pair(self.form.bits, index):
            # A lookup ignores the bits of other codes.
            loose = bool(self.form.codebook)
            part = _extract_bits(
                builder, words(bit_range.word), bit_range, HALF_BITS * parity, 2 * HALF_BITS, loose
            )
            found = part if found is None else builder.or_(found, part)
        if not self.form.offset:
            return found
        offset = ir.Constant(ir.VectorType(I32, self.lanes), [self.form.offset] * self.lanes)
        return builder.sub(found, offset)

    def _look_up_code(self, builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
        floats, size = ir.VectorType(FLOAT, self.lanes), self.lanes
        tables = [
            ir.Constant(floats, self.form.codebook[first : first + size])
            for first in range(0, len(self.form.codebook), size)
        ]
        kind = ir.FunctionType(floats, [floats, codes.type])
        name = "avx2.permps" if size == 8 else "avx512.permvar.sf.512"
        look_up = declare_function(builder.module, f"llvm.x86.{name}", kind)
        found = [builder.call(look_up, [table, codes]) for table in tables]
        if len(found) == 1:
            return found[0]
        # The fourth bit, as the sign, selects a half of the table.
        sign = builder.shl(codes, ir.Constant(codes.type, [28] * size))
        above = builder.icmp_signed("<", sign, ir.Constant(codes.type, [0] * size))
        return builder.select(above, found[1], found[0])


def _extract_bits(
    builder: ir.IRBuilder,
    words: ir.Value,
    bit_range: BitRange,
    begin: int,
    width: int,
    loose: bool = False,
) -> ir.Value:
    """Shift a code's bits from ``begin`` to their place in the code.

    If ``loose``, bits of other codes may remain. Words have ``width`` bits.
    """
    count, by = words.type.count, bit_range.source_bit + begin - bit_range.target_bit
    if by:
        shift = ir.Constant(words.type, [abs(by)] * count)
        words = builder.lshr(words, shift) if by > 0 else builder.shl(words, shift)
    if loose or (bit_range.target_bit == 0 and by + bit_range.bits == width):
        return words
    mask = ((1 << bit_range.bits) - 1) << bit_range.target_bit
    return builder.and_(words, ir.Constant(words.type, [mask] * count))
