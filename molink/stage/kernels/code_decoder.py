"""How codes of few bits become what a CPU multiplies by, in its registers.

Where the codes of a group lie in its words, :func:`molink.gguf.block_formats.pieces` tells.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from llvmlite import ir

from molink.gguf.block_formats import HALF_BITS, BitRange, BlockFormat, locate_pair
from molink.stage.kernels.emit import FLOAT, I32, BFloat, Values, declare_function

I8, I16 = ir.IntType(8), ir.IntType(16)
#: A power of two from which on bf16 has steps of 1, and its bits.
_BASE, _BASE_BITS = 128, 0x4300

#: Gives the vector of a group's words with that number, one a column.
LoadWord = Callable[[int], ir.Value]


class CodeDecoder(Protocol):
    """Makes pairs of weights, as an arithmetic multiplies by them, of the words of a group."""

    @property
    def excess(self) -> int:
        """By how much more the weights are than ``code - offset``."""
        ...

    def emit_pair(self, builder: ir.IRBuilder, words: LoadWord, index: int) -> Values:
        """Pair ``index`` of the group."""
        ...


@dataclass(frozen=True, slots=True)
class Bf16Decoder:
    """bf16 weights, for products of bf16 pairs (AVX512).

    Those of 4 and 5 bits are looked up in a register. Those of 6 bits become the mantissa of a
    number that is 128 without them: for a table there are too many.
    """

    form: BlockFormat
    lanes: int = 16

    @property
    def excess(self) -> int:
        """See :class:`CodeDecoder`."""
        return _BASE + self.form.offset if self.form.bits == 6 else 0

    def emit_pair(self, builder: ir.IRBuilder, words: LoadWord, index: int) -> Values:
        """See :class:`CodeDecoder`."""
        count = 2 * self.lanes
        if self.form.bits == 8:
            codes = builder.bitcast(words(index), ir.VectorType(I8, count))
            return (self._narrow_codes(builder, codes),)
        halves = ir.VectorType(I16, count)
        found: ir.Value | None = None
        if self.form.bits == 6:
            found = ir.Constant(halves, [_BASE_BITS] * count)
        parts = locate_pair(self.form.bits, index)
        for piece in reversed(parts):
            word = builder.bitcast(words(piece.word), halves)
            # A look-up takes five bits of an index, whatever the others are.
            loose = self.form.bits == 4 and len(parts) == 1
            part = _extract_bits(builder, word, piece, 0, HALF_BITS, loose)
            found = part if found is None else builder.or_(part, found)
        if self.form.bits < 6:
            found = self._look_up_codes(builder, found)
        return (builder.bitcast(found, ir.VectorType(BFloat(), count)),)

    def _look_up_codes(self, builder: ir.IRBuilder, codes: ir.Value | None) -> ir.Value:
        # 32 entries: codes of four bits have each weight twice.
        halves = ir.VectorType(I16, 2 * self.lanes)
        weights = torch.arange(halves.count).remainder(1 << self.form.bits).sub(self.form.offset)
        table = ir.Constant(halves, weights.bfloat16().view(torch.int16).tolist())
        kind = ir.FunctionType(halves, [halves, halves])
        look_up = declare_function(builder.module, "llvm.x86.avx512.permvar.hi.512", kind)
        return builder.call(look_up, [table, codes])

    def _narrow_codes(self, builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
        """Whole numbers of 8 bits, which bf16 holds exactly."""
        floats, places = ir.VectorType(FLOAT, self.lanes), ir.VectorType(I32, self.lanes)
        kind = ir.FunctionType(ir.VectorType(BFloat(), 2 * self.lanes), [floats, floats])
        narrow = declare_function(builder.module, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind)
        parts = []
        for first in (self.lanes, 0):  # the second operand becomes the lower half
            order = ir.Constant(places, list(range(first, first + self.lanes)))
            wide = builder.sext(builder.shuffle_vector(codes, codes, order), places)
            parts.append(builder.sitofp(wide, floats))
        return builder.call(narrow, parts)


@dataclass(frozen=True, slots=True)
class Float32Decoder:
    """float32 weights: for fused multiply-adds."""

    form: BlockFormat
    lanes: int

    @property
    def excess(self) -> int:
        """See :class:`CodeDecoder`."""
        return 0

    def emit_pair(self, builder: ir.IRBuilder, words: LoadWord, index: int) -> Values:
        """See :class:`CodeDecoder`."""
        whole, floats = ir.VectorType(I32, self.lanes), ir.VectorType(FLOAT, self.lanes)
        if self.form.bits == 8:
            pairs = builder.sext(words(index), whole)
            eight, most = (ir.Constant(whole, [bits] * self.lanes) for bits in (8, 24))
            codes = [builder.ashr(builder.shl(pairs, most), most), builder.ashr(pairs, eight)]
        else:
            codes = [self._decode_code(builder, words, index, parity) for parity in (0, 1)]
        return tuple(builder.sitofp(code, floats) for code in codes)

    def _decode_code(
        self, builder: ir.IRBuilder, words: LoadWord, index: int, parity: int
    ) -> ir.Value:
        found: ir.Value | None = None
        for piece in locate_pair(self.form.bits, index):
            part = _extract_bits(
                builder, words(piece.word), piece, HALF_BITS * parity, 2 * HALF_BITS
            )
            found = part if found is None else builder.or_(found, part)
        if not self.form.offset:
            return found
        offset = ir.Constant(ir.VectorType(I32, self.lanes), [self.form.offset] * self.lanes)
        return builder.sub(found, offset)


def _extract_bits(
    builder: ir.IRBuilder,
    words: ir.Value,
    piece: BitRange,
    begin: int,
    width: int,
    loose: bool = False,
) -> ir.Value:
    """A piece of a code, which lies from bit ``begin`` on, where it is in the code.

    Others' bits are beside it if it is ``loose``. Words have ``width`` bits.
    """
    count, by = words.type.count, piece.source_bit + begin - piece.target_bit
    if by:
        shift = ir.Constant(words.type, [abs(by)] * count)
        words = builder.lshr(words, shift) if by > 0 else builder.shl(words, shift)
    if loose or (piece.target_bit == 0 and by + piece.bits == width):
        return words
    mask = ((1 << piece.bits) - 1) << piece.target_bit
    return builder.and_(words, ir.Constant(words.type, [mask] * count))
