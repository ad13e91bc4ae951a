"""Attention of a few rows to a sequence's pages, where they are: nothing is gathered first.

A *pass* is some neighbouring rows of one sequence; a part of the work is one key-value head of one
pass, with all query heads that share it. Positions are taken in strips. For each strip the keys are
turned, in registers, into columns that :func:`~molink.stage.kernels.dots.emit_dots` multiplies by;
then the same is done for values::

    scores  [queries, positions]  = Q · Kᵀ       float32
    weights [queries, positions]  = softmax      bf16, where the scores were
    result  [queries, head_dim]   = weights · V  float32, rounded to bf16 at the end
"""

import math

import torch
from llvmlite import ir
from torch import Tensor

from molink.stage.kernels.arithmetic import DotBf16
from molink.stage.kernels.compiler import CompiledLibrary
from molink.stage.kernels.dots import PAIR_BYTES, emit_dots, emit_places, emit_tiles
from molink.stage.kernels.emit import (
    FLOAT,
    I32,
    I64,
    Values,
    begin_function,
    emit_loop,
    emit_nth,
    emit_offset,
    emit_spread,
)
from molink.stage.kernels.openmp import OpenMp, emit_shares
from molink.stage.kernels.shape import BF16, CHUNK, F32, HALF, LANES, STRIP, AttendShape, Scratch
from molink.stage.kernels.vectors import (
    FLOATS,
    INTEGERS,
    emit_call,
    emit_constant,
    emit_power_of_two,
    emit_reduced,
    emit_transposed,
)

#: Integers that describe a pass: its first row, how many there are, the position of the first, and
#: where the sequence's pages begin in the table.
PASS_WORDS = 4
_WORD = 8
#: Below all scores.
_MINIMUM = -3.0e38


class Attend:
    """Compiled attention for one shape, on threads of ``openmp`` if there is one."""

    __slots__ = ("_attend", "_library", "_threads", "shape")

    def __init__(self, shape: AttendShape, openmp: OpenMp | None = None, threads: int = 1) -> None:
        """Compile it.

        Raises:
            RuntimeError: LLVM can't, for this CPU.
        """
        self.shape, self._threads = shape, threads
        module = ir.Module("attend")
        whole = emit_shares(module, _HeadPart(module, shape).function, openmp)
        self._library = CompiledLibrary(module)
        self._attend = self._library.function(whole.name, pointers=8, integers=7)

    def __call__(
        self,
        heads: Tensor,
        keys: Tensor,
        values: Tensor,
        passes: Tensor,
        tables: Tensor,
        scratch: Tensor,
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of ``heads`` ``[T, (groups + 2) * kv_heads, head_dim]``, bf16: q, k, v.

        ``keys`` and ``values`` are pages ``[blocks, block_size, kv_heads, head_dim]`` (strided),
        ``passes`` int64 ``[n, PASS_WORDS]``, ``tables`` int64 (flat), ``scratch`` uint8
        ``[threads, bytes]``; a ``window`` of 0 is none. ``sinks`` are float32, one for each query
        head, where the shape has some. Returns ``[T, groups * kv_heads * head_dim]``.
        """
        shape = self.shape
        assert shape.sinks == (sinks is not None)
        heads = heads.contiguous()
        block, position, head, _ = keys.stride()
        result = heads.new_empty(len(heads), shape.groups * shape.kv_heads * shape.head_dim)
        self._attend(
            heads.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            result.data_ptr(),
            passes.data_ptr(),
            tables.data_ptr(),
            scratch.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            len(passes) * shape.kv_heads,
            scratch.shape[1],
            window,
            head * BF16,
            block * BF16,
            position * BF16,
            self._threads,
        )
        return result

    def scratch(self, positions: int) -> Tensor:
        """Memory for rows that attend to at most so many positions."""
        return torch.empty(self._threads, self.shape.scratch_bytes(positions), dtype=torch.uint8)


class _HeadPart:
    """Emits what one thread does: some of the parts, one after the other."""

    def __init__(self, module: ir.Module, shape: AttendShape) -> None:
        self.function, builder = begin_function(module, "part", pointers=8, numbers=9)
        heads, keys, values, result, passes, tables, scratch, sinks, *numbers = self.function.args
        _, scratch_bytes, window, head_bytes, block_bytes, position_bytes, *task = numbers
        begin, end, thread = task
        self._shape, self._scratch = shape, Scratch.of(shape)
        self._arithmetic = DotBf16()
        self._tile = max(1, self._arithmetic.tile // shape.groups)
        self._builder = builder
        self._heads, self._result, self._sinks = heads, result, sinks
        self._passes, self._tables, self._window = passes, tables, window
        self._pages = {"keys": keys, "values": values}
        self._head_bytes, self._block_bytes = head_bytes, block_bytes
        self._position_bytes = position_bytes
        self._columns = emit_offset(builder, scratch, builder.mul(thread, scratch_bytes))
        self._sums = self._at(self._columns, self._scratch.sums)
        self._totals = self._at(self._columns, self._scratch.totals)
        self._scores = self._at(self._columns, self._scratch.scores)
        emit_loop(builder, begin, end, 1, self._part)
        builder.ret_void()

    def _part(self, part: ir.Value, _: Values) -> Values:
        builder, shape = self._builder, self._shape
        number = builder.udiv(part, I64(shape.kv_heads))
        self._head = builder.urem(part, I64(shape.kv_heads))
        described = self._nth(self._passes, number, PASS_WORDS * _WORD)
        words = [
            builder.load(self._at(described, word * _WORD), typ=I64) for word in range(PASS_WORDS)
        ]
        self._row, self._count, self._start, self._table = words
        self._last = builder.add(self._start, builder.sub(self._count, I64(1)))
        first = self._first_seen(self._start)
        self._base = builder.and_(first, I64(-HALF))
        strips = builder.add(builder.udiv(builder.sub(self._last, self._base), I64(STRIP)), I64(1))
        self._score_bytes = builder.mul(strips, I64(STRIP * F32))
        queries = builder.mul(self._count, I64(shape.groups))
        emit_loop(builder, I64(0), strips, 1, self._score)
        emit_loop(builder, I64(0), queries, 1, self._weigh)
        emit_loop(builder, I64(0), strips, 1, self._sum)
        emit_loop(builder, I64(0), queries, 1, self._finish)
        return ()

    def _score(self, strip: ir.Value, _: Values) -> Values:
        """The products of all queries with a strip of keys."""
        builder, shape = self._builder, self._shape
        for half, page in enumerate(self._halves(strip, "keys")):
            self._turn_keys(page, half)

        def emit_tile(row: ir.Value, size: int) -> None:
            queries = [self._query(row, *each) for each in self._members(size)]
            zeros = [emit_constant(0.0)] * (2 * len(queries))
            totals = emit_dots(
                builder, self._arithmetic, self._columns, queries, I64(shape.head_dim // 2), zeros
            )
            at = builder.mul(strip, I64(STRIP * F32))
            scores = [
                emit_offset(builder, self._score_row(row, *each), at)
                for each in self._members(size)
            ]
            places = emit_places(builder, scores, self._arithmetic, F32)
            for total, place in zip(totals, places, strict=True):
                builder.store(total, place, align=4)

        emit_tiles(builder, self._count, self._tile, emit_tile)
        return ()

    def _weigh(self, query: ir.Value, _: Values) -> Values:
        """Softmax without its division: ``exp(scale * (score - greatest))`` of what a row sees."""
        builder = self._builder
        row = builder.udiv(query, I64(self._shape.groups))
        scores = emit_offset(builder, self._scores, builder.mul(query, self._score_bytes))
        vectors = builder.udiv(self._score_bytes, I64(LANES * F32))
        position = builder.add(self._start, row)
        first, last = (
            emit_spread(builder, builder.trunc(builder.sub(each, self._base), I32), LANES)
            for each in (self._first_seen(position), position)
        )

        def emit_greatest(vector: ir.Value, carried: Values) -> Values:
            given = self._seen(scores, vector, first, last)
            return (emit_call(builder, "llvm.maxnum.v16f32", carried[0], given),)

        begun = emit_constant(_MINIMUM)
        _, (found,) = emit_loop(builder, I64(0), vectors, 1, emit_greatest, (begun,))
        greatest = emit_spread(builder, emit_reduced(builder, "fmax", found), LANES)
        factor = emit_constant(self._shape.scale * math.log2(math.e))

        def emit_weight(vector: ir.Value, carried: Values) -> Values:
            given = builder.fsub(self._seen(scores, vector, first, last), greatest)
            weight = emit_power_of_two(builder, builder.fmul(given, factor))
            self._arithmetic.store(builder, weight, self._nth(scores, vector, LANES * BF16))
            return (builder.fadd(carried[0], weight),)

        zero = emit_constant(0.0)
        _, (found,) = emit_loop(builder, I64(0), vectors, 1, emit_weight, (zero,))
        total = emit_reduced(builder, "fadd", found)
        if self._shape.sinks:
            total = builder.fadd(total, self._sink(query, builder.fmul(greatest, factor)))
        total = builder.fdiv(FLOAT(1.0), total)
        builder.store(total, self._nth(self._sums, query, F32), align=4)
        width = self._shape.head_dim
        for column in range(0, width, LANES):
            builder.store(zero, self._at(self._total(query), column * F32), align=4)
        return ()

    def _sink(self, query: ir.Value, greatest: ir.Value) -> ir.Value:
        """The weight of a query's own sink, beside a ``greatest`` exponent of two."""
        builder, groups = self._builder, I64(self._shape.groups)
        head = builder.add(builder.mul(self._head, groups), builder.urem(query, groups))
        sink = builder.load(self._nth(self._sinks, head, F32), typ=FLOAT, align=4)
        exponent = builder.fmul(emit_spread(builder, sink, LANES), emit_constant(math.log2(math.e)))
        weight = emit_power_of_two(builder, builder.fsub(exponent, greatest))
        return builder.extract_element(weight, I32(0))

    def _seen(
        self, scores: ir.Value, vector: ir.Value, first: ir.Value, last: ir.Value
    ) -> ir.Value:
        """A vector of scores; those outside of ``first … last`` are as small as can be."""
        builder = self._builder
        given = builder.load(self._nth(scores, vector, LANES * F32), typ=FLOATS, align=4)
        begin = builder.trunc(builder.mul(vector, I64(LANES)), I32)
        lanes = ir.Constant(INTEGERS, list(range(LANES)))
        numbers = builder.add(emit_spread(builder, begin, LANES), lanes)
        inside = builder.and_(
            builder.icmp_signed(">=", numbers, first), builder.icmp_signed("<=", numbers, last)
        )
        return builder.select(inside, given, emit_constant(_MINIMUM))

    def _sum(self, strip: ir.Value, _: Values) -> Values:
        """The values of a strip, by their weights, to what the strips before it gave."""
        builder = self._builder
        for half, page in enumerate(self._halves(strip, "values")):
            self._pair_values(page, half)

        def emit_chunk(chunk: ir.Value, _: Values) -> Values:
            columns = self._nth(self._columns, chunk, STRIP * CHUNK * BF16)

            def emit_tile(row: ir.Value, size: int) -> None:
                at = builder.mul(strip, I64(STRIP * BF16))
                weights, totals = [], []
                for each in self._members(size):
                    weights.append(emit_offset(builder, self._score_row(row, *each), at))
                    total = self._total(self._query_number(row, *each))
                    totals.append(self._nth(total, chunk, CHUNK * F32))
                places = emit_places(builder, totals, self._arithmetic, F32)
                begun = [builder.load(place, typ=FLOATS, align=4) for place in places]
                sums = emit_dots(
                    builder, self._arithmetic, columns, weights, I64(STRIP // 2), begun
                )
                for each, place in zip(sums, places, strict=True):
                    builder.store(each, place, align=4)

            emit_tiles(builder, self._count, self._tile, emit_tile)
            return ()

        emit_loop(builder, I64(0), I64(self._shape.head_dim // CHUNK), 1, emit_chunk)
        return ()

    def _finish(self, query: ir.Value, _: Values) -> Values:
        """Divide by the sum of the weights, and write down."""
        builder, shape = self._builder, self._shape
        row, member = (act(query, I64(shape.groups)) for act in (builder.udiv, builder.urem))
        place = self._nth(self._sums, query, F32)
        share = emit_spread(builder, builder.load(place, typ=FLOAT, align=4), LANES)
        result = self._of_heads(self._result, row, member, shape.groups * shape.kv_heads)
        for column in range(0, shape.head_dim, LANES):
            total = builder.load(self._at(self._total(query), column * F32), typ=FLOATS, align=4)
            scaled = builder.fmul(total, share)
            self._arithmetic.store(builder, scaled, self._at(result, column * BF16))
        return ()

    def _turn_keys(self, page: ir.Value, half: int) -> None:
        """16 positions of 16 pairs each become 16 pairs of 16 positions each, and so on."""
        builder = self._builder
        for first in range(0, self._shape.head_dim // 2, LANES):
            rows = []
            for position in range(HALF):
                key = emit_offset(builder, page, builder.mul(I64(position), self._position_bytes))
                place = self._at(key, first * PAIR_BYTES)
                rows.append(builder.load(place, typ=INTEGERS, align=2))
            for pair, vector in enumerate(emit_transposed(builder, rows), first):
                place = self._at(self._columns, (2 * pair + half) * LANES * PAIR_BYTES)
                builder.store(vector, place, align=64)

    def _pair_values(self, page: ir.Value, half: int) -> None:
        """Each column's values of neighbouring positions come to lie beside each other."""
        builder = self._builder
        numbers = ir.VectorType(ir.IntType(16), CHUNK)
        for pair in range(HALF // 2):
            both = [
                emit_offset(builder, page, builder.mul(I64(2 * pair + each), self._position_bytes))
                for each in range(2)
            ]
            for chunk in range(self._shape.head_dim // CHUNK):
                rows = [
                    builder.load(self._at(row, chunk * CHUNK * BF16), typ=numbers, align=2)
                    for row in both
                ]
                for part in range(2):
                    columns = range(part * LANES, (part + 1) * LANES)
                    order = [at for column in columns for at in (column, CHUNK + column)]
                    mask = ir.Constant(ir.VectorType(I32, CHUNK), order)
                    at = ((chunk * STRIP // 2 + half * HALF // 2 + pair) * 2 + part) * LANES
                    place = self._at(self._columns, at * PAIR_BYTES)
                    builder.store(builder.shuffle_vector(*rows, mask), place, align=64)

    def _halves(self, strip: ir.Value, what: str) -> list[ir.Value]:
        """Pointers to a strip's positions; beyond the last one stands its own half again."""
        builder, size = self._builder, I64(self._shape.block_size)
        begin = builder.add(self._base, builder.mul(strip, I64(STRIP)))
        last = builder.and_(self._last, I64(-HALF))
        base = emit_offset(builder, self._pages[what], builder.mul(self._head, self._head_bytes))
        pages = []
        for half in range(STRIP // HALF):
            wanted = builder.add(begin, I64(half * HALF))
            beyond = builder.icmp_signed(">", wanted, last)
            position = builder.select(beyond, last, wanted)
            entry = builder.add(self._table, builder.udiv(position, size))
            block = builder.load(self._nth(self._tables, entry, _WORD), typ=I64)
            page = emit_offset(builder, base, builder.mul(block, self._block_bytes))
            inside = builder.mul(builder.urem(position, size), self._position_bytes)
            pages.append(emit_offset(builder, page, inside))
        return pages

    def _first_seen(self, position: ir.Value) -> ir.Value:
        """What a row at ``position`` sees first."""
        builder = self._builder
        first = builder.add(builder.sub(position, self._window), I64(1))
        hidden = builder.and_(
            builder.icmp_signed(">", self._window, I64(0)),
            builder.icmp_signed(">", first, I64(0)),
        )
        return builder.select(hidden, first, I64(0))

    def _members(self, size: int) -> list[tuple[int, int]]:
        """The queries of ``size`` rows: row, and number among those that share a head."""
        return [(row, group) for row in range(size) for group in range(self._shape.groups)]

    def _query(self, row: ir.Value, nth: int, group: int) -> ir.Value:
        shape = self._shape
        rows = self._builder.add(row, I64(nth))
        return self._of_heads(self._heads, rows, I64(group), (shape.groups + 2) * shape.kv_heads)

    def _of_heads(self, base: ir.Value, row: ir.Value, member: ir.Value, heads: int) -> ir.Value:
        """A query's place in ``[T, heads, head_dim]``, by its row of the pass."""
        builder, shape = self._builder, self._shape
        head = builder.add(builder.mul(self._head, I64(shape.groups)), member)
        row = builder.mul(builder.add(self._row, row), I64(heads))
        return self._nth(base, builder.add(row, head), shape.head_dim * BF16)

    def _query_number(self, row: ir.Value, nth: int, group: int) -> ir.Value:
        builder = self._builder
        first = builder.mul(builder.add(row, I64(nth)), I64(self._shape.groups))
        return builder.add(first, I64(group))

    def _score_row(self, row: ir.Value, nth: int, group: int) -> ir.Value:
        number = self._query_number(row, nth, group)
        return emit_offset(
            self._builder, self._scores, self._builder.mul(number, self._score_bytes)
        )

    def _total(self, query: ir.Value) -> ir.Value:
        return self._nth(self._totals, query, self._shape.head_dim * F32)

    def _at(self, pointer: ir.Value, nbytes: int) -> ir.Value:
        return emit_offset(self._builder, pointer, I64(nbytes))

    def _nth(self, pointer: ir.Value, index: ir.Value, nbytes: int) -> ir.Value:
        return emit_nth(self._builder, pointer, index, nbytes)
