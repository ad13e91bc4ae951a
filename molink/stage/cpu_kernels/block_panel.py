"""Product of many rows with quantized weights, dequantized once into a panel.

A slice of a weight's part, as deep as fits the L1 or L2 cache, is dequantized to a *panel* in the
layout of 16-bit weights, by which all rows are multiplied::

    panel     [depth / 2, columns, 2] bf16, or [depth, columns] float32
    numbers   [groups, scales and others, columns]        float32
    totals    [rows, columns]                             float32

Sums have the same terms in the same order as with few rows
(:mod:`molink.stage.cpu_kernels.block_matmul`), so results are bit-identical.
"""

from collections.abc import Callable
from dataclasses import replace

from llvmlite import ir

from molink.gguf.block_formats import RUN_CODES, BlockFormat
from molink.stage.cpu_kernels.arithmetic import Arithmetic, DotBf16, Float32
from molink.stage.cpu_kernels.block_reader import PackedBlockReader, ReadNumbers
from molink.stage.cpu_kernels.dots import (
    PAIR_BYTES,
    emit_dots,
    emit_few_tiles,
    emit_prefetch,
    emit_result_pointers,
)
from molink.stage.cpu_kernels.emit import (
    FLOAT,
    I64,
    Values,
    begin_function,
    emit_element_pointer,
    emit_loop,
    emit_minimum,
    emit_offset,
)
from molink.stage.cpu_kernels.kernel_shape import LANES

_F32, _LINE = 4, 64
#: Depth of a panel whose codes take 16 KB.
_PANEL_DEPTH = 256
#: Rows multiplied at once; the last tile repeats the last row.
_TILES = (6, 4, 2)


def panel_arithmetic(arithmetic: Arithmetic) -> Arithmetic:
    """Return the arithmetic for a panel in cache."""
    if isinstance(arithmetic, DotBf16):
        return replace(arithmetic, prefetch_min_rows=None)
    return Float32(lanes=arithmetic.lanes)


class PanelProduct:
    """``panel(weight, rows, sums, bias, result, scratch, …)``.

    The rest is ``parts, blocks, row_bytes, count, room, begin, end, thread``: it multiplies
    ``count`` rows, ``row_bytes`` apart, by parts ``begin … end - 1`` of a weight ``blocks`` deep.
    Each thread has ``room`` bytes of ``scratch``.
    """

    def __init__(self, module: ir.Module, form: BlockFormat, arithmetic: Arithmetic) -> None:
        self._form, self._arguments = form, arithmetic
        self._arithmetic = panel_arithmetic(arithmetic)
        self._columns = arithmetic.vectors * arithmetic.lanes
        self._floats = ir.VectorType(FLOAT, arithmetic.lanes)
        #: Whether there are 32 registers, enough for a tile's totals besides its sums.
        self._keeps_totals = arithmetic.lanes == LANES
        #: Blocks per panel.
        self._panel_blocks = max(1, _PANEL_DEPTH // form.block)
        groups = self._panel_blocks * form.groups_per_block
        #: Bytes of a group's codes and of its numbers, and offsets of numbers and totals.
        pairs = form.group * self._arithmetic.element // self._arithmetic.pair_bytes
        self._code_bytes = pairs * self._columns * PAIR_BYTES
        self._number_bytes = form.numbers_per_group * self._columns * _F32
        self._numbers_at = groups * self._code_bytes
        self._totals_at = self._numbers_at + groups * self._number_bytes
        self.function, self._builder = begin_function(module, "panel", pointers=6, numbers=8)
        self._reader = PackedBlockReader(self._builder, form, arithmetic)
        self._emit()

    def scratch_bytes(self, count: int) -> int:
        """Bytes of scratch per thread for ``count`` rows."""
        padded = -(-count // _TILES[-1]) * _TILES[-1]
        return self._totals_at + padded * self._columns * _F32

    def _emit(self) -> None:
        builder, element = self._builder, I64(self._arguments.element)
        weight, rows, sums, bias, result, scratch, *numbers = self.function.args
        parts, blocks, self._row_bytes, count, room, begin, end, thread = numbers
        self._rows, self._sums, self._count, self._blocks = rows, sums, count, blocks
        self._memory = emit_element_pointer(builder, scratch, thread, room)
        self._totals = emit_offset(builder, self._memory, I64(self._totals_at))
        depth = builder.mul(blocks, I64(self._form.block))
        self._sum_bytes = builder.mul(builder.udiv(depth, I64(self._form.group)), I64(_F32))
        part_bytes = builder.mul(blocks, I64(self._columns * self._form.nbytes))
        result_bytes = builder.mul(builder.mul(parts, I64(self._columns)), element)
        least = I64(_TILES[-1])
        up = builder.add(count, I64(_TILES[-1] - 1))
        self._padded = builder.mul(builder.udiv(up, least), least)

        def emit_part(part: ir.Value, _: Values) -> Values:
            column = builder.mul(part, I64(self._columns))
            self._init_totals(emit_element_pointer(builder, bias, column, _F32))
            weights = emit_element_pointer(builder, weight, part, part_bytes)

            def emit_panel(panel: ir.Value, _: Values) -> Values:
                first = builder.mul(panel, I64(self._panel_blocks))
                last = emit_minimum(builder, blocks, builder.add(first, I64(self._panel_blocks)))
                self._unpack_panel(weights, first, last)
                ahead = self._reader.end_pointer(weights, blocks, last)
                emit_tile = self._multiply_panel(first, last, ahead)
                emit_few_tiles(builder, self._padded, _TILES, emit_tile)
                return ()

            up = builder.add(blocks, I64(self._panel_blocks - 1))
            emit_loop(builder, I64(0), builder.udiv(up, I64(self._panel_blocks)), 1, emit_panel)
            below = emit_offset(builder, result, builder.mul(column, element))
            self._store_totals(below, result_bytes)
            return ()

        emit_loop(builder, begin, end, 1, emit_part)
        builder.ret_void()

    def _init_totals(self, bias: ir.Value) -> None:
        """Initialize totals with the ``bias``."""
        added = self._load_floats(bias)

        def emit_row(row: ir.Value, _: Values) -> Values:
            self._store_floats(
                added, emit_element_pointer(self._builder, self._totals, row, self._columns * _F32)
            )
            return ()

        emit_loop(self._builder, I64(0), self._padded, 1, emit_row)

    def _unpack_panel(self, weights: ir.Value, first: ir.Value, last: ir.Value) -> None:
        """Dequantize blocks ``first … last - 1`` of a part."""
        builder, form = self._builder, self._form
        begin = builder.mul(first, I64(form.groups_per_block))
        pair_bytes = 2 * self._code_bytes // form.group

        def emit_group(
            group: ir.Value, codes: ir.Value, read_numbers: ReadNumbers, _: Values
        ) -> Values:
            local = builder.sub(group, begin)
            self._store_floats(read_numbers(), self._group_numbers(local))
            panel = emit_element_pointer(builder, self._memory, local, self._code_bytes)

            def emit_pair(run: ir.Value, index: int, found: list[Values], _: Values) -> Values:
                at = builder.mul(run, I64(RUN_CODES // 2 * pair_bytes))
                address = emit_offset(builder, panel, builder.add(at, I64(index * pair_bytes)))
                # bf16 pairs share a vector; float32 neighbours are consecutive.
                for vectors in zip(*found, strict=True):
                    for vector in vectors:
                        builder.store(vector, address, align=4)
                        width = self._arithmetic.lanes * PAIR_BYTES
                        address = emit_offset(builder, address, I64(width))
                return ()

            self._reader.emit_pairs(codes, emit_pair)
            return ()

        self._reader.emit_groups(weights, self._blocks, first, last, emit_group)

    def _multiply_panel(
        self, first: ir.Value, last: ir.Value, ahead: ir.Value
    ) -> Callable[[ir.Value, int], None]:
        """Emit the product of a tile of rows with the panel.

        Each tile prefetches its share of the next panel, at ``ahead``.
        """
        builder, form, arithmetic = self._builder, self._form, self._arithmetic
        begin, end = (builder.mul(each, I64(form.groups_per_block)) for each in (first, last))
        pairs = I64(self._code_bytes // (self._columns * PAIR_BYTES))
        behind = builder.sub(self._count, I64(1))
        panel_bytes = I64(self._panel_blocks * self._columns * form.nbytes)
        share = builder.add(builder.udiv(panel_bytes, self._padded), I64(1))

        def emit_ask(at: ir.Value, _: Values) -> Values:
            emit_prefetch(builder, emit_offset(builder, ahead, at))
            return ()

        def emit_tile(row: ir.Value, size: int) -> None:
            begun_at = builder.mul(row, share)
            enough = builder.add(
                begun_at, builder.add(builder.mul(share, I64(size)), I64(_LINE - 1))
            )
            emit_loop(builder, begun_at, enough, _LINE, emit_ask)
            each = [emit_minimum(builder, builder.add(row, I64(at)), behind) for at in range(size)]
            rows = [emit_element_pointer(builder, self._rows, one, self._row_bytes) for one in each]
            sums = []
            if self._reader.needs_sums:
                sums = [
                    emit_element_pointer(builder, self._sums, one, self._sum_bytes) for one in each
                ]
            at = emit_element_pointer(builder, self._totals, row, self._columns * _F32)

            def emit_group(group: ir.Value, totals: Values) -> Values:
                local = builder.sub(group, begin)
                codes = emit_element_pointer(builder, self._memory, local, self._code_bytes)
                given = [
                    emit_element_pointer(builder, one, group, form.group * arithmetic.element)
                    for one in rows
                ]
                begun = self._reader.initial_dots(sums, group, size)
                dots = emit_dots(builder, arithmetic, codes, given, pairs, begun)
                numbers = self._load_floats(self._group_numbers(local), form.numbers_per_group)
                before = totals or self._load_floats(at, size)
                found = self._reader.add_group(before, dots, numbers, sums, group)
                if totals:
                    return found
                self._store_floats(found, at)
                return ()

            totals = self._load_floats(at, size) if self._keeps_totals else ()
            self._store_floats(emit_loop(builder, begin, end, 1, emit_group, totals)[1], at)

        return emit_tile

    def _store_totals(self, result: ir.Value, result_bytes: ir.Value) -> None:
        """Convert totals to elements of the result."""
        builder, arithmetic = self._builder, self._arguments

        def emit_row(row: ir.Value, _: Values) -> Values:
            totals = self._load_floats(
                emit_element_pointer(builder, self._totals, row, self._columns * _F32)
            )
            below = emit_element_pointer(builder, result, row, result_bytes)
            places = emit_result_pointers(builder, [below], arithmetic, arithmetic.element)
            for total, address in zip(totals, places, strict=True):
                arithmetic.store_sum(builder, total, address)
            return ()

        emit_loop(builder, I64(0), self._count, 1, emit_row)

    def _group_numbers(self, group: ir.Value) -> ir.Value:
        at = emit_offset(self._builder, self._memory, I64(self._numbers_at))
        return emit_element_pointer(self._builder, at, group, self._number_bytes)

    def _load_floats(self, address: ir.Value, count: int = 1) -> Values:
        """Load ``count`` times ``columns`` float32."""
        vectors = count * self._arithmetic.vectors
        width = self._arithmetic.lanes * _F32
        places = (emit_offset(self._builder, address, I64(at * width)) for at in range(vectors))
        return [self._builder.load(each, typ=self._floats, align=4) for each in places]

    def _store_floats(self, values: Values, address: ir.Value) -> None:
        width = self._arithmetic.lanes * _F32
        for at, value in enumerate(values):
            self._builder.store(
                value, emit_offset(self._builder, address, I64(at * width)), align=4
            )
