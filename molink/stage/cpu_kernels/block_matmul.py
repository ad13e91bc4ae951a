"""Matrix product with quantized weights, dequantized in registers.

A weight ``[columns, depth]`` is stored in read order (see :mod:`molink.gguf.block_formats`). For
``C`` columns::

    per block with nested scales:  scale [C], minimum [C]?
    per group:                     scale [C], minimum [C] or shift [C]?, words of codes [words, C]

Group numbers are bytes with nested scales, else 16 or 32 bits. Memory is read in one or two
sequential streams, which the prefetcher can follow. With block numbers before each block's groups,
nested formats would be read at half the rate. Codes are integers that bf16 holds exactly, or
indices into a codebook, whose values bf16 may round. Products are summed in float32 over a group,
then scaled. Minimum or shift are multiplied by the sum of the row's values, which also corrects a
decoder's excess.

Groups are prefetched from far ahead: the CPU's own prefetcher reads at two thirds of that rate.

Many rows use :mod:`molink.stage.cpu_kernels.block_panel`, with bit-identical results: as in
:mod:`molink.stage.cpu_kernels.matmul`, a row's result doesn't depend on other rows or on threads.
"""

import torch
from llvmlite import ir
from torch import Tensor

from molink.gguf.block_formats import RUN_CODES, BlockFormat
from molink.stage.cpu_kernels.arithmetic import Arithmetic, DotBf16
from molink.stage.cpu_kernels.block_panel import PanelProduct
from molink.stage.cpu_kernels.block_reader import PackedBlockReader, ReadNumbers
from molink.stage.cpu_kernels.compiler import CompiledLibrary
from molink.stage.cpu_kernels.dots import emit_few_tiles, emit_prefetch, emit_result_pointers
from molink.stage.cpu_kernels.emit import (
    FLOAT,
    I32,
    I64,
    POINTER,
    Values,
    begin_function,
    declare_function,
    emit_element_pointer,
    emit_loop,
    emit_offset,
)
from molink.stage.cpu_kernels.matmul import pad_row_stride
from molink.stage.cpu_kernels.openmp import OpenMp, emit_parallel_for
from molink.stage.cpu_kernels.segments import Segments, WeightTable

#: Prefetch distance in weights, and bytes of a cache line.
_PREFETCH_BYTES, _LINE_BYTES = 6144, 64
#: Rows multiplied at once; decoding also needs registers besides the sums.
_TILES = (6, 4, 2, 1)
#: Rows from which dequantizing once into a panel is faster: float32 rows, bf16 rows, and bf16 rows
#: with 8-bit codes.
_MANY, _MANY_BF16, _MANY_BYTES = 12, 24, 8


class BlockMatMul:
    """A compiled product for all weights of one format."""

    def __init__(
        self,
        form: BlockFormat,
        arithmetic: Arithmetic,
        openmp: OpenMp | None = None,
        threads: int = 1,
        features: str | None = None,
    ) -> None:
        """Compile for ``threads`` threads of ``openmp`` if given.

        Raises:
            RuntimeError: LLVM can't compile for this CPU or ``features``.
        """
        self.form, self._threads = form, threads
        #: Columns stored side by side.
        self.columns = arithmetic.vectors * arithmetic.lanes
        #: Rows from which a panel is used.
        self.unpack_min_rows = _MANY
        if isinstance(arithmetic, DotBf16):
            self.unpack_min_rows = _MANY_BYTES if form.bits == 8 else _MANY_BF16
        module = ir.Module("block_matmul")
        product, panel = (
            BlockProduct(module, form, arithmetic),
            PanelProduct(module, form, arithmetic),
        )
        multiply = emit_parallel_for(module, product.function, openmp)
        segments = emit_parallel_for(module, product.emit_segments(module), openmp)
        multiply_many = emit_parallel_for(module, panel.function, openmp)
        self._needs_sums, self._scratch_bytes = product.reader.needs_sums, panel.scratch_bytes
        sums = _emit_sums(module, arithmetic.element, form.group, product.reader.sum_factor)
        self._library = CompiledLibrary(module, features)
        self._multiply = self._library.get_function(multiply.name, pointers=5, integers=4)
        self._multiply_unpacked = self._library.get_function(
            multiply_many.name, pointers=6, integers=6
        )
        self._multiply_segments = self._library.get_function(segments.name, pointers=6, integers=5)
        self._sum = self._library.get_function(sums.name, pointers=2, integers=1)
        #: Type of rows and results.
        self.dtype = torch.bfloat16 if arithmetic.element == 2 else torch.float32

    @property
    def max_segment_rows(self) -> int:
        """Maximum rows of a segment for which :meth:`multiply_segments` is fast."""
        return self.unpack_min_rows - 1

    def __call__(self, weight: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        """Compute ``rows @ weight.T + bias``: ``[T, depth]`` → ``[T, columns]``.

        ``weight`` is uint8 ``[columns / C, bytes]``, ``bias`` float32 ``[columns]``.
        """
        parts = len(weight)
        blocks = weight.shape[1] // (self.columns * self.form.nbytes)
        rows = rows.contiguous()
        count = rows.shape[0]
        result = rows.new_empty(count, parts * self.columns)
        sums = self._sum_groups(rows)
        if count < self.unpack_min_rows:
            tensors = [each.data_ptr() for each in (weight, rows, sums, bias, result)]
            self._multiply(*tensors, parts, blocks, count, self._threads)
            return result
        rows, room = pad_row_stride(rows), self._scratch_bytes(count)
        scratch = weight.new_empty(self._threads, room)
        tensors = [each.data_ptr() for each in (weight, rows, sums, bias, result, scratch)]
        row_bytes = rows.stride(0) * rows.element_size()
        self._multiply_unpacked(*tensors, parts, blocks, row_bytes, count, room, self._threads)
        return result

    def multiply_segments(self, weights: WeightTable, rows: Tensor, segments: Segments) -> Tensor:
        """Multiply each segment of rows ``[T, depth]`` by its weight: ``[P, columns]``."""
        rows = rows.contiguous()
        parts, nbytes = weights.shape
        blocks = nbytes // (self.columns * self.form.nbytes)
        result = rows.new_empty(segments.pairs, parts * self.columns)
        sums = self._sum_groups(rows)
        tensors = (weights.addresses, segments.weights, segments.counts, rows, sums, result)
        pointers = [each.data_ptr() for each in tensors]
        numbers = len(segments.weights), not segments.shares_rows
        self._multiply_segments(*pointers, parts, blocks, *numbers, self._threads)
        return result

    def _sum_groups(self, rows: Tensor) -> Tensor:
        """Compute the sums of the rows' groups if the format needs them."""
        if not self._needs_sums:
            return rows
        sums = rows.new_empty(rows.numel() // self.form.group, dtype=torch.float32)
        self._sum(rows.data_ptr(), sums.data_ptr(), len(sums))
        return sums


class BlockProduct:
    """``product(weight, rows, sums, bias, result, parts, blocks, count, begin, end, thread)``.

    Multiplies ``count`` rows by ``parts`` ``begin … end - 1`` of a weight ``blocks`` deep.
    """

    def __init__(self, module: ir.Module, form: BlockFormat, arithmetic: Arithmetic) -> None:
        self._form, self._arithmetic = form, arithmetic
        self._columns = arithmetic.vectors * arithmetic.lanes
        self.function, self._builder = begin_function(module, "product", pointers=5, numbers=6)
        self.reader = self._create_reader()
        self._emit()

    @property
    def _row_element(self) -> int:
        """Bytes of an element of rows."""
        return self._arithmetic.element

    @property
    def _tiles(self) -> list[int]:
        """Rows multiplied at once."""
        return [size for size in _TILES if size <= self._arithmetic.tile]

    def _create_reader(self) -> PackedBlockReader:
        return PackedBlockReader(self._builder, self._form, self._arithmetic)

    def _emit(self) -> None:
        builder, element = self._builder, I64(self._arithmetic.element)
        weight, rows, sums, bias, result, parts, blocks, count, begin, end, _ = self.function.args
        part_bytes = builder.mul(blocks, I64(self._columns * self._form.nbytes))
        depth = builder.mul(blocks, I64(self._form.block))
        row_bytes = builder.mul(depth, I64(self._row_element))
        groups = builder.udiv(depth, I64(self._form.group))
        sum_bytes = builder.mul(groups, I64(self.reader.row_number_bytes))
        result_bytes = builder.mul(builder.mul(parts, I64(self._columns)), element)

        floats = ir.VectorType(FLOAT, self._arithmetic.lanes)
        tiles = self._tiles

        def emit_rows(given: ir.Value, index: ir.Value, size: int, nbytes: ir.Value) -> Values:
            numbers = (builder.add(index, I64(number)) for number in range(size))
            return [emit_element_pointer(builder, given, each, nbytes) for each in numbers]

        def emit_part(part: ir.Value, _: Values) -> Values:
            column = builder.mul(part, I64(self._columns))
            weights = emit_element_pointer(builder, weight, part, part_bytes)
            below = emit_offset(builder, result, builder.mul(column, element))
            added = emit_element_pointer(builder, bias, column, 4)

            def emit_tile(first: ir.Value, size: int) -> None:
                addresses = emit_result_pointers(builder, [added], self._arithmetic, 4)
                begun = [builder.load(address, typ=floats, align=4) for address in addresses] * size
                given = emit_rows(rows, first, size, row_bytes)
                beside = emit_rows(sums, first, size, sum_bytes) if self.reader.needs_sums else []
                totals = self._emit_groups(weights, given, beside, blocks, begun)
                taken = emit_rows(below, first, size, result_bytes)
                found = emit_result_pointers(
                    builder, taken, self._arithmetic, self._arithmetic.element
                )
                for total, address in zip(totals, found, strict=True):
                    self._arithmetic.store_sum(builder, total, address)

            emit_few_tiles(builder, count, tiles, emit_tile)
            return ()

        emit_loop(builder, begin, end, 1, emit_part)
        builder.ret_void()

    def emit_segments(self, module: ir.Module) -> ir.Function:
        """Emit ``segments(addresses, weights, counts, rows, sums, result, …)``.

        The first arguments are as in :class:`WeightTable` and :class:`Segments`. The others are
        ``parts, blocks, count, advances, begin, end, thread``. The function multiplies ``count``
        segments by parts ``begin … end - 1`` of their weights, so that threads share the work on
        each segment. ``advances`` is 0 if segments share rows, otherwise 1.
        """
        segments, builder = begin_function(module, "segments", pointers=6, numbers=7)
        addresses, weights, counts, rows, sums, result, *numbers = segments.args
        parts, blocks, count, advances, begin, end, thread = numbers
        depth = builder.mul(blocks, I64(self._form.block))
        row_bytes = builder.mul(depth, I64(self._row_element))
        groups = builder.udiv(depth, I64(self._form.group))
        sum_bytes = builder.mul(groups, I64(self.reader.row_number_bytes))
        result_bytes = builder.mul(parts, I64(self._columns * self._arithmetic.element))

        def load_number(base: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
            return builder.load(emit_element_pointer(builder, base, index, 8), typ=kind)

        def emit_segment(index: ir.Value, carried: Values) -> Values:
            (first,) = carried
            number = builder.mul(load_number(weights, index, I64), I64(2))
            weight, bias = (
                load_number(addresses, builder.add(number, I64(at)), POINTER) for at in (0, 1)
            )
            size, read = load_number(counts, index, I64), builder.mul(first, advances)
            given = emit_element_pointer(builder, rows, read, row_bytes)
            beside = emit_element_pointer(builder, sums, read, sum_bytes)
            target = emit_element_pointer(builder, result, first, result_bytes)
            pointers = weight, given, beside, bias, target
            builder.call(self.function, [*pointers, parts, blocks, size, begin, end, thread])
            return (builder.add(first, size),)

        emit_loop(builder, I64(0), count, 1, emit_segment, (I64(0),))
        builder.ret_void()
        return segments

    def _emit_groups(
        self, weights: ir.Value, rows: Values, sums: Values, blocks: ir.Value, totals: Values
    ) -> Values:
        """Add the products of ``rows`` with all groups of a part to ``totals``."""
        builder, form, reader = self._builder, self._form, self.reader

        def emit_group(
            at: ir.Value, codes: ir.Value, read_numbers: ReadNumbers, totals: Values
        ) -> Values:
            size = form.group * self._row_element
            given = [emit_element_pointer(builder, row, at, size) for row in rows]
            for line in range(0, self._columns * form.group_bytes, _LINE_BYTES):
                emit_prefetch(builder, emit_offset(builder, codes, I64(_PREFETCH_BYTES + line)))
            dots = self._emit_dots(codes, given, reader.initial_dots(sums, at, len(rows)))
            return reader.add_group(totals, dots, read_numbers(), sums, at)

        return reader.emit_groups(weights, blocks, I64(0), blocks, emit_group, totals)

    def _emit_dots(self, codes: ir.Value, rows: Values, dots: Values) -> Values:
        """Add the products of a group's ``codes`` and ``rows`` to ``dots``."""
        builder, arithmetic = self._builder, self._arithmetic

        def emit_pair(run: ir.Value, index: int, weights: list[Values], dots: Values) -> Values:
            before = iter(dots)
            offset = I64(2 * index * arithmetic.element)
            below = (
                emit_element_pointer(builder, row, run, RUN_CODES * arithmetic.element)
                for row in rows
            )
            addresses = (emit_offset(builder, row, offset) for row in below)
            found = [arithmetic.load_pair(builder, address) for address in addresses]
            return [
                arithmetic.add_product(builder, next(before), one, column)
                for one in found
                for column in weights
            ]

        return self.reader.emit_pairs(codes, emit_pair, dots)


def _emit_sums(module: ir.Module, element: int, group: int, factor: int) -> ir.Function:
    """``sums(rows, sums, count)``: ``factor`` times sums of each ``group`` values of the rows."""
    sums, builder = begin_function(module, "sums", pointers=2, numbers=1)
    rows, found, count = sums.args
    half = group // 2
    floats, whole = ir.VectorType(FLOAT, half), ir.VectorType(I32, half)
    kind = ir.FunctionType(FLOAT, [FLOAT, floats])
    reduce = declare_function(module, f"llvm.vector.reduce.fadd.v{half}f32", kind)

    def emit_sum(index: ir.Value, _: Values) -> Values:
        values = emit_element_pointer(builder, rows, index, group * element)
        if element == 2:  # bf16 is the upper half of float32
            pairs = builder.load(values, typ=whole, align=2)
            upper = builder.and_(pairs, ir.Constant(whole, [0xFFFF0000] * half))
            parts = [builder.shl(pairs, ir.Constant(whole, [16] * half)), upper]
            first, second = (builder.bitcast(part, floats) for part in parts)
        else:
            addresses = (values, emit_offset(builder, values, I64(half * element)))
            first, second = (builder.load(address, typ=floats, align=4) for address in addresses)
        both = builder.fadd(first, second)
        total = builder.call(reduce, [FLOAT(-0.0), both], fastmath=("reassoc",))
        if factor != 1:
            total = builder.fmul(total, FLOAT(float(factor)))
        builder.store(total, emit_element_pointer(builder, found, index, 4), align=4)
        return ()

    emit_loop(builder, I64(0), count, 1, emit_sum)
    builder.ret_void()
    return sums
