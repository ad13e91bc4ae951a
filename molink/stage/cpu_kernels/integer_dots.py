"""Products of quantized weights with rows in 8 bits, as integers.

Codes of 4 to 6 bits become *quads*: four unsigned bytes of a column in one lane, multiplied by four
bytes of a row. With AVX2, sums of two products are 16-bit and overflow after few quads; VNNI adds
four products to 32 bits. 8-bit codes are signed and are widened to 16 bits; so are the values of a
codebook, which are looked up in a register.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from molink.gguf.block_formats import RUN_CODES, BlockFormat, locate_pair
from molink.stage.cpu_kernels.block_decoders import LoadWord
from molink.stage.cpu_kernels.emit import (
    BYTE,
    I32,
    I64,
    Values,
    declare_function,
    emit_broadcast,
    emit_offset,
)
from molink.stage.cpu_kernels.row_quantizer import MAX_CODE

_I16 = ir.IntType(16)
_MAX_SUM = 2**15 - 1
#: Bytes of a register's lane; lookups don't cross lanes.
_LOOKUP_BYTES = 16


@dataclass(frozen=True, slots=True)
class IntegerInstructions:
    """Instructions for products in registers of ``lanes`` 32-bit sums."""

    lanes: int
    vnni: bool = False

    def _call(self, builder: ir.IRBuilder, name: str, kind: ir.Type, *given: ir.Value) -> ir.Value:
        function = ir.FunctionType(kind, [each.type for each in given])
        return builder.call(declare_function(builder.module, f"llvm.x86.{name}", function), given)

    def add_quads(
        self, builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, row: ir.Value
    ) -> ir.Value:
        """Add four products of unsigned ``codes`` and signed bytes to each lane (VNNI)."""
        name = f"avx512.vpdpbusd.{32 * self.lanes}"
        return self._call(builder, name, total.type, total, codes, row)

    def add_pairs(
        self, builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, row: ir.Value
    ) -> ir.Value:
        """Add two products of 16-bit numbers to each lane."""
        whole, halves = total.type, ir.VectorType(_I16, 2 * self.lanes)
        if self.vnni:
            name = f"avx512.vpdpwssd.{32 * self.lanes}"
            return self._call(builder, name, whole, total, codes, row)
        given = (builder.bitcast(each, halves) for each in (codes, row))
        name = "avx2.pmadd.wd" if self.lanes == 8 else "avx512.pmaddw.d.512"
        return builder.add(total, self._call(builder, name, whole, *given))

    def multiply_bytes(self, builder: ir.IRBuilder, codes: ir.Value, row: ir.Value) -> ir.Value:
        """Return 16-bit sums of two products of unsigned ``codes`` and signed bytes."""
        kind, halves = ir.VectorType(BYTE, 4 * self.lanes), ir.VectorType(_I16, 2 * self.lanes)
        given = (builder.bitcast(each, kind) for each in (codes, row))
        name = "avx2.pmadd.ub.sw" if self.lanes == 8 else "avx512.pmaddubs.w.512"
        return self._call(builder, name, halves, *given)

    def look_up(self, builder: ir.IRBuilder, table: Sequence[int], codes: ir.Value) -> ir.Value:
        """Look up bytes ``codes``, below 16, in a ``table`` of bytes."""
        kind = ir.VectorType(BYTE, 4 * self.lanes)
        name = "avx2.pshuf.b" if self.lanes == 8 else "avx512.pshuf.b.512"
        found = ir.Constant(kind, [*table] * (kind.count // _LOOKUP_BYTES))
        return self._call(builder, name, kind, found, builder.bitcast(codes, kind))


def has_wide_codes(form: BlockFormat) -> bool:
    """Whether codes and rows become 16-bit numbers."""
    return form.bits == 8 or bool(form.codebook)


def codebook_step(form: BlockFormat) -> float:
    """Return the value of one step of the integers that represent a codebook.

    Codebooks whose values aren't multiples of 0.5 are rounded to 16 bits.
    """
    for step in (1.0, 0.5):
        if all((value / step).is_integer() for value in form.codebook):
            return step
    return max(map(abs, form.codebook)) / _MAX_SUM


def quad_order(form: BlockFormat) -> tuple[int, ...]:
    """Return the order in which a group of a row is stored: the order of codes in quads."""
    if has_wide_codes(form):
        return tuple(range(form.group))
    run = _run_codes(form)
    order = [2 * pair + odd for quad in _quad_pairs(form) for odd in (0, 1) for pair in quad]
    return tuple(first + each for first in range(0, form.group, run) for each in order)


def _run_codes(form: BlockFormat) -> int:
    return min(form.group, RUN_CODES)


def _quad_pairs(form: BlockFormat) -> list[tuple[int, int]]:
    """Return the pairs of codes that share a quad: those that one mask extracts, if any."""
    pairs = _run_codes(form) // 2
    if form.bits > 5:
        return [(first, first + 1) for first in range(0, pairs, 2)]
    return [(first + at, first + at + 2) for first in range(0, pairs, 4) for at in (0, 1)]


def emit_run(
    builder: ir.IRBuilder,
    form: BlockFormat,
    instructions: IntegerInstructions,
    words: Sequence[LoadWord],
    rows: Values,
    totals: Values,
) -> Values:
    """Add products of a run of codes with ``rows`` to 32-bit ``totals``, by row, then by vector.

    ``words`` loads the words of each vector; ``rows`` points to the rows' bytes, in
    :func:`quad_order`.
    """
    whole = ir.VectorType(I32, instructions.lanes)

    def load(row: ir.Value, step: int) -> ir.Value:
        four = builder.load(emit_offset(builder, row, I64(4 * step)), typ=I32, align=1)
        return emit_broadcast(builder, four, instructions.lanes)

    totals = list(totals)
    if has_wide_codes(form):
        pairs = [_create_pairs(builder, form, instructions, word) for word in words]
        for step in range(_run_codes(form) // 2):
            columns = [emit_pair(step) for emit_pair in pairs]
            given = [load(row, step) for row in rows]
            products = [(column, row) for row in given for column in columns]
            totals = [
                instructions.add_pairs(builder, total, *each)
                for total, each in zip(totals, products, strict=True)
            ]
        return totals
    quads = _quad_pairs(form)
    most = _MAX_SUM // (2 * MAX_CODE * (2**form.bits - 1))
    halves: list[ir.Value] = []
    ones = ir.Constant(ir.VectorType(_I16, 2 * instructions.lanes), [1] * 2 * instructions.lanes)
    for step, quad in enumerate(quads):
        columns = [_emit_quad(builder, form, word, quad) for word in words]
        given = [load(row, step) for row in rows]
        products = [(column, row) for row in given for column in columns]
        if instructions.vnni:
            totals = [
                instructions.add_quads(builder, total, *each)
                for total, each in zip(totals, products, strict=True)
            ]
            continue
        found = [instructions.multiply_bytes(builder, *each) for each in products]
        halves = (
            [builder.add(*each) for each in zip(halves, found, strict=True)] if halves else found
        )
        if (step + 1) % most == 0 or step + 1 == len(quads):
            totals = [
                instructions.add_pairs(
                    builder, total, builder.bitcast(half, whole), builder.bitcast(ones, whole)
                )
                for total, half in zip(totals, halves, strict=True)
            ]
            halves = []
    return totals


def _create_pairs(
    builder: ir.IRBuilder, form: BlockFormat, instructions: IntegerInstructions, words: LoadWord
) -> Callable[[int], ir.Value]:
    """Return a function that emits a pair of a run as 16-bit numbers."""
    whole = ir.VectorType(I32, instructions.lanes)
    halves = ir.VectorType(_I16, 2 * instructions.lanes)

    def emit_signed(index: int) -> ir.Value:
        codes = builder.bitcast(words(index), ir.VectorType(BYTE, halves.count))
        return builder.bitcast(builder.sext(codes, halves), whole)

    if not form.codebook:
        return emit_signed
    step = codebook_step(form)
    values = [round(value / step) for value in form.codebook]
    low, high = [value & 0xFF for value in values], [value >> 8 & 0xFF for value in values]
    eight, mask = (ir.Constant(halves, [bits] * halves.count) for bits in (8, 0xFF))

    @cache
    def look_up(number: int, upper: bool) -> Values:
        """Look up the values, as bytes, of half of a word's codes."""
        codes, four = words(number), ir.Constant(whole, [4] * whole.count)
        codes = builder.lshr(codes, four) if upper else codes
        codes = builder.and_(codes, ir.Constant(whole, [0x0F0F0F0F] * whole.count))
        tables = [low] if all(-128 <= value < 128 for value in values) else [low, high]
        found = (instructions.look_up(builder, table, codes) for table in tables)
        return [builder.bitcast(each, halves) for each in found]

    def emit_pair(index: int) -> ir.Value:
        # A byte has two codes of one half of the word; their neighbours are in the other half.
        bytes_ = look_up(index // 4, bool(index % 2))
        second = index % 4 > 1
        if len(bytes_) == 1:
            moved = bytes_[0] if second else builder.shl(bytes_[0], eight)
            return builder.bitcast(builder.ashr(moved, eight), whole)
        if second:
            below = builder.lshr(bytes_[0], eight)
            above = builder.and_(bytes_[1], builder.not_(mask))
        else:
            below, above = builder.and_(bytes_[0], mask), builder.shl(bytes_[1], eight)
        return builder.bitcast(builder.or_(below, above), whole)

    return emit_pair


def _emit_quad(
    builder: ir.IRBuilder, form: BlockFormat, word: LoadWord, quad: tuple[int, int]
) -> ir.Value:
    """Extract two pairs of codes as bytes: the even codes of both, then the odd ones."""
    masks: dict[tuple[int, int], int] = {}  # keyed by word and right shift
    for byte, pair in enumerate(quad):
        for part in locate_pair(form.bits, pair):
            target = part.target_bit + 8 * byte
            mask = ((1 << part.bits) - 1) << target
            key = part.word, part.source_bit - target
            masks[key] = masks.get(key, 0) | mask | mask << 16
    found: ir.Value | None = None
    for (number, shift), mask in masks.items():
        loaded = word(number)
        count = loaded.type.count
        if shift:
            by = ir.Constant(loaded.type, [abs(shift)] * count)
            loaded = builder.lshr(loaded, by) if shift > 0 else builder.shl(loaded, by)
        part = builder.and_(loaded, ir.Constant(loaded.type, [mask] * count))
        found = part if found is None else builder.or_(found, part)
    return found
