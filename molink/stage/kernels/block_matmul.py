"""Rows times a weight that stays in few bits, unpacked in registers.

The weight ``[columns, depth]`` lies in the order in which the product reads it. Of ``C`` columns::

    of each block of a kind K:  scale [C], added [C]?
    of each group:              scale [C], added [C] or shift [C]?, words of codes [words, C]

where the numbers of a group are whole ones of a byte in kinds ``K``, else of 16 bits as those of a
block. So memory is read in
one stream, or two, with steps of one size each, which a CPU's prefetcher follows: with the numbers
of each block before its groups, kinds ``K`` came from memory at half the rate.
(see :mod:`molink.gguf.formats` and :mod:`molink.stage.kernels.codes`). Codes are whole numbers that
bf16 holds exactly; their products with a row are added up in float32 over a group, then multiplied
by its scale. What is added to each weight of a group, or by which its codes are shifted, is
multiplied by the sum of the row's values, which takes away a decoder's excess too.

As in :mod:`molink.stage.kernels.matmul` what a row gives doesn't depend on the rows beside it, nor
on how columns are spread over threads.
"""

from collections.abc import Callable
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from molink.gguf.formats import HALF, BlockFormat
from molink.stage.kernels.arithmetic import Arithmetic, DotBf16
from molink.stage.kernels.codes import I8, I16, Bf16Decoder, WideningDecoder, Words
from molink.stage.kernels.compiler import CompiledLibrary
from molink.stage.kernels.dots import emit_few_tiles, emit_places
from molink.stage.kernels.emit import (
    FLOAT,
    I32,
    I64,
    Values,
    begin_function,
    declare,
    emit_loop,
    emit_nth,
    emit_offset,
    emit_spread,
)
from molink.stage.kernels.openmp import OpenMp, emit_shares

_HALF_BYTES = 2
#: Codes of a group that are multiplied without a loop: a longer one only fills the cache.
_RUN = 32
#: Rows that are multiplied at once. Beside their sums there have to be registers for decoding.
_TILES = (6, 4, 2, 1)


class BlockMatMul:
    """A compiled product, for all weights of one format."""

    __slots__ = ("_library", "_multiply", "_sum", "_summed", "_threads", "columns", "dtype", "form")

    def __init__(
        self,
        form: BlockFormat,
        arithmetic: Arithmetic,
        openmp: OpenMp | None = None,
        threads: int = 1,
        features: str | None = None,
    ) -> None:
        """Compile it, to run on ``threads`` threads of ``openmp`` if there is one.

        Raises:
            RuntimeError: LLVM can't, for this CPU or for ``features`` of it.
        """
        self.form, self._threads = form, threads
        #: How many columns lie side by side.
        self.columns = arithmetic.vectors * arithmetic.lanes
        module = ir.Module("block_matmul")
        product = _Product(module, form, arithmetic)
        multiply = emit_shares(module, product.function, openmp)
        self._summed = product.summed
        sums = _emit_sums(module, arithmetic.element, form.group)
        self._library = CompiledLibrary(module, features)
        self._multiply = self._library.function(multiply.name, pointers=5, integers=4)
        self._sum = self._library.function(sums.name, pointers=2, integers=1)
        #: The type of rows and results.
        self.dtype = torch.bfloat16 if arithmetic.element == 2 else torch.float32

    def __call__(self, weight: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        """``rows @ weight.T + bias``: ``[T, depth]`` → ``[T, columns]``.

        ``weight`` is uint8 ``[columns / C, bytes]``, ``bias`` float32 ``[columns]``.
        """
        parts = len(weight)
        blocks = weight.shape[1] // (self.columns * self.form.nbytes)
        rows = rows.contiguous()
        count = rows.shape[0]
        result = rows.new_empty(count, parts * self.columns)
        sums = bias
        if self._summed:
            sums = bias.new_empty(rows.numel() // self.form.group)
            self._sum(rows.data_ptr(), sums.data_ptr(), len(sums))
        self._multiply(
            weight.data_ptr(),
            rows.data_ptr(),
            sums.data_ptr(),
            bias.data_ptr(),
            result.data_ptr(),
            parts,
            blocks,
            count,
            self._threads,
        )
        return result


class _Product:
    """``product(weight, rows, sums, bias, result, parts, blocks, count, begin, end, thread)``.

    Of the weight's ``parts`` it multiplies ``begin … end - 1``, ``blocks`` deep, by ``count`` rows.
    """

    def __init__(self, module: ir.Module, form: BlockFormat, arithmetic: Arithmetic) -> None:
        self._form, self._arithmetic = form, arithmetic
        lanes, self._columns = arithmetic.lanes, arithmetic.vectors * arithmetic.lanes
        bf16 = isinstance(arithmetic, DotBf16)
        self._decoder = Bf16Decoder(form) if bf16 else WideningDecoder(form, lanes)
        #: Whether the sums of the rows' groups are needed.
        self.summed = form.adds or form.shifts or bool(self._decoder.excess)
        self._floats = ir.VectorType(FLOAT, lanes)
        self.function, self._builder = begin_function(module, "product", pointers=5, numbers=6)
        self._emit()

    def _emit(self) -> None:
        builder, element = self._builder, I64(self._arithmetic.element)
        weight, rows, sums, bias, result, parts, blocks, count, begin, end, _ = self.function.args
        part_bytes = builder.mul(blocks, I64(self._columns * self._form.nbytes))
        depth = builder.mul(blocks, I64(self._form.block))
        row_bytes = builder.mul(depth, element)
        sum_bytes = builder.mul(builder.udiv(depth, I64(self._form.group)), I64(4))
        result_bytes = builder.mul(builder.mul(parts, I64(self._columns)), element)

        tiles = [size for size in _TILES if size <= self._arithmetic.tile]

        def emit_rows(given: ir.Value, index: ir.Value, size: int, nbytes: ir.Value) -> Values:
            numbers = (builder.add(index, I64(number)) for number in range(size))
            return [emit_nth(builder, given, each, nbytes) for each in numbers]

        def emit_part(part: ir.Value, _: Values) -> Values:
            column = builder.mul(part, I64(self._columns))
            weights = emit_nth(builder, weight, part, part_bytes)
            below = emit_offset(builder, result, builder.mul(column, element))
            added = emit_nth(builder, bias, column, 4)

            def emit_tile(first: ir.Value, size: int) -> None:
                places = emit_places(builder, [added], self._arithmetic, 4)
                begun = [builder.load(place, typ=self._floats, align=4) for place in places] * size
                given = emit_rows(rows, first, size, row_bytes)
                beside = emit_rows(sums, first, size, sum_bytes) if self.summed else []
                totals = self._emit_blocks(weights, given, beside, blocks, begun)
                taken = emit_rows(below, first, size, result_bytes)
                found = emit_places(builder, taken, self._arithmetic, self._arithmetic.element)
                for total, place in zip(totals, found, strict=True):
                    self._arithmetic.store(builder, total, place)

            emit_few_tiles(builder, count, tiles, emit_tile)
            return ()

        emit_loop(builder, begin, end, 1, emit_part)
        builder.ret_void()

    def _emit_blocks(
        self, weights: ir.Value, rows: Values, sums: Values, blocks: ir.Value, totals: Values
    ) -> Values:
        """``totals`` and the products of ``rows`` with all blocks of a part.

        ``totals`` are those of the first row's vectors, then the second's, and so on.
        """
        form, builder = self._form, self._builder

        block_bytes = self._columns * form.block_bytes
        records = emit_offset(builder, weights, builder.mul(blocks, I64(block_bytes)))

        def emit_block(block: ir.Value, totals: Values) -> Values:
            here = emit_nth(builder, weights, block, block_bytes)
            numbers = self._load_numbers(here, self._load_half) if form.nested else []
            first = builder.mul(block, I64(form.groups))

            def emit_group(group: ir.Value, totals: Values) -> Values:
                at = builder.add(first, group)
                record = emit_nth(builder, records, at, self._columns * form.group_bytes)
                load = self._load_byte if form.nested else self._load_half
                own = self._load_numbers(record, load)
                if form.nested:
                    own = [builder.fmul(*each) for each in zip(numbers, own, strict=True)]
                beside = [self._spread(emit_nth(builder, each, at, 4)) for each in sums]
                dots = self._emit_dots(record, rows, at, beside)
                return self._gather(totals, dots, own, beside)

            if form.groups == 1:
                return emit_group(I64(0), totals)
            return emit_loop(builder, I64(0), I64(form.groups), 1, emit_group, totals)[1]

        return emit_loop(builder, I64(0), blocks, 1, emit_block, totals)[1]

    def _emit_dots(self, record: ir.Value, rows: Values, at: ir.Value, beside: Values) -> Values:
        """The products of ``rows`` with the codes of a group, number ``at`` of their depth.

        ``beside`` are the sums of the rows' values there, if they are needed.
        """
        form, builder, arithmetic = self._form, self._builder, self._arithmetic
        codes = emit_offset(builder, record, I64(self._columns * form.number_bytes))
        begun = [emit_nth(builder, row, at, form.group * arithmetic.element) for row in rows]
        zeros = ir.Constant(self._floats, [0.0] * arithmetic.lanes)
        sums: Values = [zeros] * (len(rows) * arithmetic.vectors)
        if self._decoder.excess:
            less = ir.Constant(self._floats, [-float(self._decoder.excess)] * arithmetic.lanes)
            taken = [builder.fmul(each, less) for each in beside]
            sums = [each for each in taken for _ in range(arithmetic.vectors)]
        runs = max(1, form.group // _RUN)
        words_bytes = self._columns * form.words * form.word // runs

        def emit_run(run: ir.Value, sums: Values) -> Values:
            here = emit_nth(builder, codes, run, words_bytes)
            words = [self._words_of(here, vector) for vector in range(arithmetic.vectors)]
            below = [emit_nth(builder, row, run, _RUN * arithmetic.element) for row in begun]
            for index in range(form.group // runs // 2):
                columns = [self._decoder.pair(builder, each, index) for each in words]
                offset = I64(2 * index * arithmetic.element)
                given = [
                    arithmetic.load_pair(builder, emit_offset(builder, row, offset))
                    for row in below
                ]
                before = iter(sums)
                sums = [
                    arithmetic.add_product(builder, next(before), one, column)
                    for one in given
                    for column in columns
                ]
            return sums

        if runs == 1:
            return emit_run(I64(0), sums)
        return emit_loop(builder, I64(0), I64(runs), 1, emit_run, sums)[1]

    def _words_of(self, codes: ir.Value, vector: int) -> Words:
        """The words of a group's ``codes``, of the columns of a vector; each is loaded once."""
        form, lanes = self._form, self._arithmetic.lanes
        kind = ir.VectorType(ir.IntType(8 * form.word), lanes)

        @cache
        def load(number: int) -> ir.Value:
            offset = (number * self._columns + vector * lanes) * form.word
            place = emit_offset(self._builder, codes, I64(offset))
            return self._builder.load(place, typ=kind, align=form.word)

        return load

    def _gather(self, totals: Values, dots: Values, numbers: Values, sums: Values) -> Values:
        """``totals + (dots + sums · shifts) · scales``, ``totals + dots · scales + sums · added``.

        ``numbers`` are scales, then the others.
        """
        vectors = self._arithmetic.vectors
        scales, others = numbers[:vectors], numbers[vectors:]

        def add_others(before: Values) -> Values:
            return [
                self._fma(sums[index // vectors], others[index % vectors], value)
                for index, value in enumerate(before)
            ]

        if self._form.shifts:
            dots = add_others(dots)
        found = [
            self._fma(dot, scales[index % vectors], total)
            for index, (total, dot) in enumerate(zip(totals, dots, strict=True))
        ]
        return add_others(found) if self._form.adds else found

    def _spread(self, place: ir.Value) -> ir.Value:
        value = self._builder.load(place, typ=FLOAT, align=4)
        return emit_spread(self._builder, value, self._arithmetic.lanes)

    def _fma(self, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
        kind = ir.FunctionType(self._floats, [self._floats] * 3)
        name = f"llvm.fma.v{self._arithmetic.lanes}f32"
        return self._builder.call(declare(self._builder.module, name, kind), [one, other, total])

    def _load_numbers(self, here: ir.Value, load: Callable[[ir.Value, int], ir.Value]) -> Values:
        """Scales of all vectors' columns, then the other numbers of theirs, if there are any."""
        count = self._arithmetic.vectors * self._form.each
        return [load(here, number * self._arithmetic.lanes) for number in range(count)]

    def _load_half(self, here: ir.Value, index: int) -> ir.Value:
        builder, lanes = self._builder, self._arithmetic.lanes
        place = emit_offset(builder, here, I64(_HALF_BYTES * index))
        if self._form.numbers == "f16":
            halves = builder.load(place, typ=ir.VectorType(ir.HalfType(), lanes), align=_HALF_BYTES)
            return builder.fpext(halves, self._floats)
        upper = builder.load(place, typ=ir.VectorType(I16, lanes), align=_HALF_BYTES)
        whole = ir.VectorType(I32, lanes)
        bits = builder.shl(builder.zext(upper, whole), ir.Constant(whole, [HALF] * lanes))
        return builder.bitcast(bits, self._floats)

    def _load_byte(self, here: ir.Value, index: int) -> ir.Value:
        builder, lanes = self._builder, self._arithmetic.lanes
        place = emit_offset(builder, here, I64(index))
        loaded = builder.load(place, typ=ir.VectorType(I8, lanes), align=1)
        widen = builder.zext if self._form.adds else builder.sext
        return builder.sitofp(widen(loaded, ir.VectorType(I32, lanes)), self._floats)


def _emit_sums(module: ir.Module, element: int, group: int) -> ir.Function:
    """``sums(rows, sums, count)``: of each ``group`` values of the rows, ``count`` times."""
    sums, builder = begin_function(module, "sums", pointers=2, numbers=1)
    rows, found, count = sums.args
    half = group // 2
    floats, whole = ir.VectorType(FLOAT, half), ir.VectorType(I32, half)
    kind = ir.FunctionType(FLOAT, [FLOAT, floats])
    reduce = declare(module, f"llvm.vector.reduce.fadd.v{half}f32", kind)

    def emit_sum(index: ir.Value, _: Values) -> Values:
        here = emit_nth(builder, rows, index, group * element)
        if element == 2:  # a bf16 is the upper half of a float32
            pairs = builder.load(here, typ=whole, align=2)
            upper = builder.and_(pairs, ir.Constant(whole, [0xFFFF0000] * half))
            parts = [builder.shl(pairs, ir.Constant(whole, [16] * half)), upper]
            first, second = (builder.bitcast(part, floats) for part in parts)
        else:
            places = (here, emit_offset(builder, here, I64(half * element)))
            first, second = (builder.load(place, typ=floats, align=4) for place in places)
        both = builder.fadd(first, second)
        total = builder.call(reduce, [FLOAT(-0.0), both], fastmath=("reassoc",))
        builder.store(total, emit_nth(builder, found, index, 4), align=4)
        return ()

    emit_loop(builder, I64(0), count, 1, emit_sum)
    builder.ret_void()
    return sums
