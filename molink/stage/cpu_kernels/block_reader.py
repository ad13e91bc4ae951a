"""Reads numbers and codes of quantized weights.

Memory order is described in :mod:`molink.stage.cpu_kernels.block_matmul`.
"""

from collections.abc import Callable
from functools import cache

from llvmlite import ir

from molink.facts.dtypes import DTYPE_SIZES
from molink.gguf.block_formats import HALF_BITS, RUN_CODES, BlockFormat
from molink.stage.cpu_kernels.arithmetic import Arithmetic, DotBf16
from molink.stage.cpu_kernels.block_decoders import (
    Bf16Decoder,
    CodeDecoder,
    Float32Decoder,
    LoadWord,
)
from molink.stage.cpu_kernels.emit import (
    BYTE,
    FLOAT,
    I32,
    I64,
    Values,
    declare_function,
    emit_broadcast,
    emit_element_pointer,
    emit_loop,
    emit_offset,
)
from molink.stage.cpu_kernels.repack import MANTISSA_BITS
from molink.stage.cpu_kernels.row_quantizer import NUMBER_BYTES

_I16 = ir.IntType(16)
_F32 = 4

#: Reads a group's numbers; called after its codes are processed, to save registers.
ReadNumbers = Callable[[], Values]
#: ``carried = body(group, codes, numbers, carried)``.
GroupBody = Callable[[ir.Value, ir.Value, ReadNumbers, Values], Values]
#: ``carried = body(run, words, carried)``.
RunBody = Callable[[ir.Value, list[LoadWord], Values], Values]
#: ``carried = body(run, index, weights, carried)``.
PairBody = Callable[[ir.Value, int, list[Values], Values], Values]


class PackedBlockReader:
    """Reads a *part* of a weight: interleaved columns that fill a few registers."""

    def __init__(
        self,
        builder: ir.IRBuilder,
        form: BlockFormat,
        arithmetic: Arithmetic,
        row_scales: bool = False,
        excess: int | None = None,
    ) -> None:
        """With ``row_scales`` rows are quantized; ``excess`` is that of the caller's weights."""
        self._builder, self._form, self._row_scales = builder, form, row_scales
        self._lanes, self._vectors = arithmetic.lanes, arithmetic.vectors
        self._columns = self._vectors * self._lanes
        self._floats = ir.VectorType(FLOAT, self._lanes)
        bf16 = isinstance(arithmetic, DotBf16)
        self._decoder: CodeDecoder = (
            Bf16Decoder(form) if bf16 else Float32Decoder(form, self._lanes)
        )
        #: Difference between decoded weights and ``code - offset``.
        self.excess = self._decoder.excess if excess is None else excess
        # Both would need sums of rows, one of them multiplied by the excess.
        assert not (self.excess and form.has_minimum)
        #: Whether sums of the rows' groups are needed.
        self.needs_sums = row_scales or form.has_minimum or form.has_shifts or bool(self.excess)
        #: Bytes of the numbers per group of a row.
        self.row_number_bytes = NUMBER_BYTES if row_scales else _F32
        #: Factor by which sums are multiplied.
        self.sum_factor = -self.excess if self.subtracts_excess else 1

    @property
    def subtracts_excess(self) -> bool:
        """Whether sums only correct the excess, which shifts already include."""
        return bool(self.excess) and not self._form.has_shifts

    def emit_groups(
        self,
        part: ir.Value,
        blocks: ir.Value,
        begin: ir.Value,
        end: ir.Value,
        body: GroupBody,
        carried: Values = (),
    ) -> Values:
        """Call ``body`` for each group of blocks ``begin … end - 1`` of a ``part``.

        It gets the group's index, its codes, and a reader of its numbers: float32 scales of all
        columns, then minima or shifts, if any.
        """
        builder, form = self._builder, self._form
        block_bytes = self._columns * form.block_number_bytes
        records = emit_offset(builder, part, builder.mul(blocks, I64(block_bytes)))

        def emit_block(block: ir.Value, carried: Values) -> Values:
            above: Values = []
            if form.has_nested_scales:
                above = self._read_numbers(
                    emit_element_pointer(builder, part, block, block_bytes), self._read_number
                )
            first = builder.mul(block, I64(form.groups_per_block))

            def emit_group(index: ir.Value, carried: Values) -> Values:
                group = builder.add(first, index)
                record = emit_element_pointer(
                    builder, records, group, self._columns * form.group_bytes
                )

                def read_numbers() -> Values:
                    if not form.has_nested_scales:
                        return self._read_numbers(record, self._read_number)
                    own = self._read_numbers(record, self._read_byte)
                    return [builder.fmul(*each) for each in zip(above, own, strict=True)]

                codes = emit_offset(builder, record, I64(self._columns * form.number_bytes))
                return body(group, codes, read_numbers, carried)

            if form.groups_per_block == 1:
                return emit_group(I64(0), carried)
            return emit_loop(builder, I64(0), I64(form.groups_per_block), 1, emit_group, carried)[1]

        return emit_loop(builder, begin, end, 1, emit_block, carried)[1]

    def end_pointer(self, part: ir.Value, blocks: ir.Value, last: ir.Value) -> ir.Value:
        """Return a pointer to the end of the groups of a part's first ``last`` blocks."""
        above = self._builder.mul(blocks, I64(self._columns * self._form.block_number_bytes))
        own = I64(self._columns * self._form.groups_per_block * self._form.group_bytes)
        return emit_offset(
            self._builder, part, self._builder.add(above, self._builder.mul(last, own))
        )

    def emit_runs(self, codes: ir.Value, body: RunBody, carried: Values = ()) -> Values:
        """Call ``body`` for each run of 32 codes of a group, with the words of each vector."""
        builder, form = self._builder, self._form
        runs = max(1, form.group // RUN_CODES)
        words_bytes = self._columns * form.words_per_group * form.word_bytes // runs

        def emit_run(run: ir.Value, carried: Values) -> Values:
            base = emit_element_pointer(builder, codes, run, words_bytes)
            words = [self._load_words(base, vector) for vector in range(self._vectors)]
            return body(run, words, carried)

        if runs == 1:
            return emit_run(I64(0), carried)
        return emit_loop(builder, I64(0), I64(runs), 1, emit_run, carried)[1]

    def emit_pairs(self, codes: ir.Value, body: PairBody, carried: Values = ()) -> Values:
        """Call ``body`` for each pair of a group.

        It gets the run, the pair's index in it, and the weights of each vector.
        """

        def emit_run(run: ir.Value, words: list[LoadWord], carried: Values) -> Values:
            for index in range(min(self._form.group, RUN_CODES) // 2):
                weights = [self._decoder.emit_pair(self._builder, each, index) for each in words]
                carried = body(run, index, weights, carried)
            return carried

        return self.emit_runs(codes, emit_run, carried)

    def add_group(
        self, totals: Values, dots: Values, numbers: Values, sums: Values, group: ir.Value
    ) -> Values:
        """Compute ``totals + (dots + sums · shifts) · scales``, or ``totals + dots · scales + sums
        · minima``.

        ``totals`` and ``dots`` are by row, then by vector. Dots of quantized rows are multiplied by
        their scales, too.
        """
        vectors = self._vectors
        scales, others = numbers[:vectors], numbers[vectors:]
        if self._form.has_shifts and self.excess:
            excess = ir.Constant(self._floats, [float(self.excess)] * self._lanes)
            others = [self._builder.fsub(each, excess) for each in others]

        def add_others(before: Values) -> Values:
            beside = self._broadcast_sums(sums, group)
            return [
                self._emit_fma(beside[index // vectors], others[index % vectors], value)
                for index, value in enumerate(before)
            ]

        if self._form.has_shifts:
            dots = add_others(dots)
        factors = [scales[index % vectors] for index in range(len(dots))]
        if self._row_scales:
            dots = [self._builder.fmul(*each) for each in zip(dots, factors, strict=True)]
            given = self._broadcast_numbers(sums, group, 0)
            factors = [given[index // vectors] for index in range(len(dots))]
        found = [self._emit_fma(*each) for each in zip(dots, factors, totals, strict=True)]
        return add_others(found) if self._form.has_minimum else found

    def initial_dots(self, sums: Values, group: ir.Value, rows: int) -> Values:
        """Initial dot products of ``rows`` that cancel the excess of a group."""
        if self.subtracts_excess:
            return [
                each for each in self._broadcast_sums(sums, group) for _ in range(self._vectors)
            ]
        return [ir.Constant(self._floats, [0.0] * self._lanes)] * (rows * self._vectors)

    def _broadcast_sums(self, sums: Values, group: ir.Value) -> Values:
        """Broadcast each row's sum of a ``group``."""
        return self._broadcast_numbers(sums, group, _F32 if self._row_scales else 0)

    def _broadcast_numbers(self, rows: Values, group: ir.Value, offset: int) -> Values:
        """Broadcast a number of each row's ``group``; quantized rows have a scale before a sum."""
        places = (
            emit_element_pointer(self._builder, row, group, self.row_number_bytes) for row in rows
        )
        found = (
            self._builder.load(emit_offset(self._builder, address, I64(offset)), typ=FLOAT, align=4)
            for address in places
        )
        return [emit_broadcast(self._builder, value, self._lanes) for value in found]

    def _load_words(self, codes: ir.Value, vector: int) -> LoadWord:
        """Load the words of a group's ``codes`` lazily, for the columns of a vector."""
        form = self._form
        kind = ir.VectorType(ir.IntType(8 * form.word_bytes), self._lanes)

        @cache
        def load(number: int) -> ir.Value:
            offset = (number * self._columns + vector * self._lanes) * form.word_bytes
            address = emit_offset(self._builder, codes, I64(offset))
            return self._builder.load(address, typ=kind, align=form.word_bytes)

        return load

    def _emit_fma(self, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
        kind = ir.FunctionType(self._floats, [self._floats] * 3)
        name = f"llvm.fma.v{self._lanes}f32"
        return self._builder.call(
            declare_function(self._builder.module, name, kind), [one, other, total]
        )

    def _read_numbers(self, base: ir.Value, load: Callable[[ir.Value, int], ir.Value]) -> Values:
        """Read scales of all columns, then the other numbers, if any."""
        return [
            load(base, at * self._lanes)
            for at in range(self._vectors * self._form.numbers_per_group)
        ]

    def _read_number(self, base: ir.Value, index: int) -> ir.Value:
        builder, lanes = self._builder, self._lanes
        size = DTYPE_SIZES[self._form.number_dtype]
        address = emit_offset(builder, base, I64(size * index))
        if self._form.number_dtype == "f32":
            return builder.load(address, typ=self._floats, align=size)
        if self._form.number_dtype == "f16":
            halves = builder.load(address, typ=ir.VectorType(ir.HalfType(), lanes), align=size)
            return builder.fpext(halves, self._floats)
        upper = builder.load(address, typ=ir.VectorType(_I16, lanes), align=size)
        whole = ir.VectorType(I32, lanes)
        bits = builder.shl(builder.zext(upper, whole), ir.Constant(whole, [HALF_BITS] * lanes))
        return builder.bitcast(bits, self._floats)

    def _read_byte(self, base: ir.Value, index: int) -> ir.Value:
        builder = self._builder
        address = emit_offset(builder, base, I64(index))
        loaded = builder.load(address, typ=ir.VectorType(BYTE, self._lanes), align=1)
        whole = ir.VectorType(I32, self._lanes)
        if self._form.step_kind == "e8m0":
            shift = ir.Constant(whole, [MANTISSA_BITS] * self._lanes)
            return builder.bitcast(builder.shl(builder.zext(loaded, whole), shift), self._floats)
        widen = builder.zext if self._form.has_minimum else builder.sext
        return builder.sitofp(widen(loaded, whole), self._floats)
