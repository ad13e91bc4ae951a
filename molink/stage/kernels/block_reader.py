"""The numbers and codes of a weight in blocks, as code for a CPU reads them.

In which order they lie in memory, :mod:`molink.stage.kernels.block_matmul` tells.
"""

from collections.abc import Callable
from functools import cache

from llvmlite import ir

from molink.gguf.block_formats import HALF_BITS, BlockFormat
from molink.stage.kernels.arithmetic import Arithmetic, DotBf16
from molink.stage.kernels.code_decoder import (
    I8,
    I16,
    Bf16Decoder,
    CodeDecoder,
    Float32Decoder,
    LoadWord,
)
from molink.stage.kernels.emit import (
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

_HALF_BYTES, _F32 = 2, 4
#: Codes of a group that are read without a loop: a longer one only fills the cache.
RUN_CODES = 32

#: Emits the reading of a group's numbers: not before its codes, since it takes registers.
ReadNumbers = Callable[[], Values]
#: ``carried = body(group, codes, numbers, carried)``.
GroupBody = Callable[[ir.Value, ir.Value, ReadNumbers, Values], Values]
#: ``carried = body(run, index, weights, carried)``.
PairBody = Callable[[ir.Value, int, list[Values], Values], Values]


class PackedBlockReader:
    """Of the columns that lie side by side: a *part* of the weight, some registers wide."""

    def __init__(self, builder: ir.IRBuilder, form: BlockFormat, arithmetic: Arithmetic) -> None:
        self._builder, self._form = builder, form
        self._lanes, self._vectors = arithmetic.lanes, arithmetic.vectors
        self._columns = self._vectors * self._lanes
        self._floats = ir.VectorType(FLOAT, self._lanes)
        bf16 = isinstance(arithmetic, DotBf16)
        self._decoder: CodeDecoder = (
            Bf16Decoder(form) if bf16 else Float32Decoder(form, self._lanes)
        )
        #: By how much more the weights of :meth:`pairs` are than ``code - offset``.
        self.excess = self._decoder.excess
        # Both would want sums of rows, the one multiplied by the excess.
        assert not (self.excess and (form.has_minimum or form.has_shifts))
        #: Whether the sums of the rows' groups are needed.
        self.needs_sums = form.has_minimum or form.has_shifts or bool(self.excess)

    def emit_groups(
        self,
        part: ir.Value,
        blocks: ir.Value,
        begin: ir.Value,
        end: ir.Value,
        body: GroupBody,
        carried: Values = (),
    ) -> Values:
        """``body`` for each group of the blocks ``begin … end - 1`` of a ``part`` of ``blocks``.

        It gets a group's number in the part, where its codes are, and what reads its numbers: as
        float32 the scales of all columns, then what is added or shifts codes if there is any.
        """
        builder, form = self._builder, self._form
        block_bytes = self._columns * form.block_number_bytes
        records = emit_offset(builder, part, builder.mul(blocks, I64(block_bytes)))

        def emit_block(block: ir.Value, carried: Values) -> Values:
            above: Values = []
            if form.has_nested_scales:
                above = self._read_numbers(
                    emit_element_pointer(builder, part, block, block_bytes), self._read_half
                )
            first = builder.mul(block, I64(form.groups_per_block))

            def emit_group(index: ir.Value, carried: Values) -> Values:
                group = builder.add(first, index)
                record = emit_element_pointer(
                    builder, records, group, self._columns * form.group_bytes
                )

                def read_numbers() -> Values:
                    if not form.has_nested_scales:
                        return self._read_numbers(record, self._read_half)
                    own = self._read_numbers(record, self._read_byte)
                    return [builder.fmul(*each) for each in zip(above, own, strict=True)]

                codes = emit_offset(builder, record, I64(self._columns * form.number_bytes))
                return body(group, codes, read_numbers, carried)

            if form.groups_per_block == 1:
                return emit_group(I64(0), carried)
            return emit_loop(builder, I64(0), I64(form.groups_per_block), 1, emit_group, carried)[1]

        return emit_loop(builder, begin, end, 1, emit_block, carried)[1]

    def end_pointer(self, part: ir.Value, blocks: ir.Value, last: ir.Value) -> ir.Value:
        """Where in a ``part`` of ``blocks`` the groups of its first ``last`` blocks end."""
        above = self._builder.mul(blocks, I64(self._columns * self._form.block_number_bytes))
        own = I64(self._columns * self._form.groups_per_block * self._form.group_bytes)
        return emit_offset(
            self._builder, part, self._builder.add(above, self._builder.mul(last, own))
        )

    def emit_pairs(self, codes: ir.Value, body: PairBody, carried: Values = ()) -> Values:
        """``body`` for each pair of neighbours in the depth of a group, in runs of 32 codes.

        It gets the number of the run, that of the pair in it, and the weights of each vector, as an
        arithmetic multiplies by them.
        """
        builder, form = self._builder, self._form
        runs = max(1, form.group // RUN_CODES)
        words_bytes = self._columns * form.words_per_group * form.word_bytes // runs

        def emit_run(run: ir.Value, carried: Values) -> Values:
            here = emit_element_pointer(builder, codes, run, words_bytes)
            words = [self._load_words(here, vector) for vector in range(self._vectors)]
            for index in range(form.group // runs // 2):
                weights = [self._decoder.emit_pair(builder, each, index) for each in words]
                carried = body(run, index, weights, carried)
            return carried

        if runs == 1:
            return emit_run(I64(0), carried)
        return emit_loop(builder, I64(0), I64(runs), 1, emit_run, carried)[1]

    def add_group(
        self, totals: Values, dots: Values, numbers: Values, sums: Values, group: ir.Value
    ) -> Values:
        """``totals + (dots + sums · shifts) · scales``, ``totals + dots · scales + sums · added``.

        ``totals`` and ``dots`` are those of the first row's vectors, then the second's, and so on.
        ``numbers`` are those of the ``group``; where the rows' ``sums`` are, as in
        :meth:`initial_dots`.
        """
        vectors = self._vectors
        scales, others = numbers[:vectors], numbers[vectors:]

        def add_others(before: Values) -> Values:
            beside = self._broadcast_sums(sums, group)
            return [
                self._emit_fma(beside[index // vectors], others[index % vectors], value)
                for index, value in enumerate(before)
            ]

        if self._form.has_shifts:
            dots = add_others(dots)
        found = [
            self._emit_fma(dot, scales[index % vectors], total)
            for index, (total, dot) in enumerate(zip(totals, dots, strict=True))
        ]
        return add_others(found) if self._form.has_minimum else found

    def initial_dots(self, sums: Values, group: ir.Value, rows: int) -> Values:
        """With what products of ``rows`` and a group's codes begin, so that none has the excess.

        ``sums`` are where the rows' sums of groups are, each of which is what takes it away.
        """
        if self.excess:
            return [
                each for each in self._broadcast_sums(sums, group) for _ in range(self._vectors)
            ]
        return [ir.Constant(self._floats, [0.0] * self._lanes)] * (rows * self._vectors)

    def _broadcast_sums(self, sums: Values, group: ir.Value) -> Values:
        """Of each row's ``sums`` the one of a ``group``, in all lanes."""
        places = (emit_element_pointer(self._builder, row, group, _F32) for row in sums)
        found = (self._builder.load(place, typ=FLOAT, align=_F32) for place in places)
        return [emit_broadcast(self._builder, value, self._lanes) for value in found]

    def _load_words(self, codes: ir.Value, vector: int) -> LoadWord:
        """The words of a group's ``codes``, of the columns of a vector; each is loaded once."""
        form = self._form
        kind = ir.VectorType(ir.IntType(8 * form.word_bytes), self._lanes)

        @cache
        def load(number: int) -> ir.Value:
            offset = (number * self._columns + vector * self._lanes) * form.word_bytes
            place = emit_offset(self._builder, codes, I64(offset))
            return self._builder.load(place, typ=kind, align=form.word_bytes)

        return load

    def _emit_fma(self, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
        kind = ir.FunctionType(self._floats, [self._floats] * 3)
        name = f"llvm.fma.v{self._lanes}f32"
        return self._builder.call(
            declare_function(self._builder.module, name, kind), [one, other, total]
        )

    def _read_numbers(self, here: ir.Value, load: Callable[[ir.Value, int], ir.Value]) -> Values:
        """Scales of all vectors' columns, then the other numbers of theirs, if there are any."""
        return [
            load(here, at * self._lanes)
            for at in range(self._vectors * self._form.numbers_per_group)
        ]

    def _read_half(self, here: ir.Value, index: int) -> ir.Value:
        builder, lanes = self._builder, self._lanes
        place = emit_offset(builder, here, I64(_HALF_BYTES * index))
        if self._form.number_dtype == "f16":
            halves = builder.load(place, typ=ir.VectorType(ir.HalfType(), lanes), align=_HALF_BYTES)
            return builder.fpext(halves, self._floats)
        upper = builder.load(place, typ=ir.VectorType(I16, lanes), align=_HALF_BYTES)
        whole = ir.VectorType(I32, lanes)
        bits = builder.shl(builder.zext(upper, whole), ir.Constant(whole, [HALF_BITS] * lanes))
        return builder.bitcast(bits, self._floats)

    def _read_byte(self, here: ir.Value, index: int) -> ir.Value:
        builder = self._builder
        place = emit_offset(builder, here, I64(index))
        loaded = builder.load(place, typ=ir.VectorType(I8, self._lanes), align=1)
        widen = builder.zext if self._form.has_minimum else builder.sext
        return builder.sitofp(widen(loaded, ir.VectorType(I32, self._lanes)), self._floats)
