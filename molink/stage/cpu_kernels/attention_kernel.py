"""Attention of a few rows to a sequence's pages in place, without gathering.

A *pass* is a few consecutive rows of one sequence. A unit of work is one KV head of a pass, with
all query heads that share it. Positions are processed in *spans*, and a span's keys in *strips*. A
strip of keys is transposed in registers into columns for
:func:`~molink.stage.cpu_kernels.dots.emit_dots`; so are a span's values::

    scores  [queries, span]      = Q · Kᵀ       float32
    weights [queries, span]      = softmax      type of the rows, in place of the scores
    result  [queries, head_dim] += weights · V  float32, rounded at the end

Keys and values in 8 bits become the rows' type on their way into columns.
"""

from typing import NamedTuple

import torch
from llvmlite import ir
from torch import Tensor

from molink.stage.cpu_kernels.arithmetic import Arithmetic
from molink.stage.cpu_kernels.compiler import CompiledLibrary
from molink.stage.cpu_kernels.dots import (
    PAIR_BYTES,
    emit_dots,
    emit_few_tiles,
    emit_prefetch,
    emit_result_pointers,
)
from molink.stage.cpu_kernels.emit import (
    BYTE,
    FLOAT,
    I32,
    I64,
    INTEGERS,
    BFloat,
    Values,
    begin_function,
    emit_broadcast,
    emit_element_pointer,
    emit_loop,
    emit_maximum,
    emit_minimum,
    emit_offset,
    emit_transpose,
)
from molink.stage.cpu_kernels.kernel_shape import (
    BF16,
    F32,
    HALF_PAGE,
    LANES,
    AttentionKernelShape,
    ScratchLayout,
)
from molink.stage.cpu_kernels.openmp import OpenMp, emit_parallel_for
from molink.stage.cpu_kernels.softmax import QueryState, SoftmaxEmitter

#: Integers per pass: first row, number of rows, position of the first row, start of its page table.
PASS_WORDS = 4
_WORD, _VECTOR_BYTES = 8, 64


class AttentionKernel:
    """Compiled attention for one shape, on the threads of ``openmp`` if given."""

    def __init__(
        self,
        shape: AttentionKernelShape,
        arithmetic: Arithmetic,
        openmp: OpenMp | None = None,
        threads: int = 1,
        features: str | None = None,
    ) -> None:
        """Compile for rows of ``arithmetic``'s type, and keys and values of that type or int8.

        Raises:
            RuntimeError: LLVM can't compile for this CPU.
        """
        self.shape, self.threads, self._element = shape, threads, arithmetic.element
        module = ir.Module("attend")
        part = _AttentionEmitter(module, shape, arithmetic)
        self._scratch_bytes = part.scratch.nbytes
        whole = emit_parallel_for(module, part.function, openmp)
        self._library = CompiledLibrary(module, features)
        self._attend = self._library.get_function(whole.name, pointers=8, integers=7)

    @property
    def dtype(self) -> torch.dtype:
        """Type of rows and results."""
        return torch.bfloat16 if self._element == BF16 else torch.float32

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
        """Attend with ``heads`` ``[T, (groups + 2) * kv_heads, head_dim]``: q, k, v.

        ``keys`` and ``values`` are strided pages ``[blocks, block_size, kv_heads, head_dim]``; the
        scales of int8 pages follow the codes of a head's page. ``passes`` are int64 ``[n,
        PASS_WORDS]``, ``tables`` flat int64, and ``scratch`` is from :meth:`allocate_scratch`; a
        ``window`` of 0 means none. ``sinks`` are float32, one per query head. Returns ``[T, groups
        * kv_heads * head_dim]``.
        """
        shape, element = self.shape, keys.itemsize
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
            head * element,
            block * element,
            position * element,
            self.threads,
        )
        return result

    def allocate_scratch(self) -> Tensor:
        """Allocate the threads' memory for a call."""
        return torch.empty(self.threads, self._scratch_bytes, dtype=torch.uint8)


class _HalfPage(NamedTuple):
    """Pointers to the row of its first position and, for int8, to that row's scale."""

    rows: ir.Value
    scales: ir.Value


class _AttentionEmitter:
    """Emits one thread's work: a range of units, one after the other."""

    def __init__(
        self, module: ir.Module, shape: AttentionKernelShape, arithmetic: Arithmetic
    ) -> None:
        self.function, builder = begin_function(module, "part", pointers=8, numbers=9)
        heads, keys, values, result, passes, tables, scratch, sinks, *numbers = self.function.args
        _, scratch_bytes, window, head_bytes, block_bytes, position_bytes, *task = numbers
        begin, end, thread = task
        self._shape, self._arithmetic, self._builder = shape, arithmetic, builder
        self._softmax = SoftmaxEmitter(builder, shape, arithmetic)
        #: Positions per strip, and columns of values multiplied at once.
        self._strip = arithmetic.lanes * arithmetic.vectors
        self.scratch = ScratchLayout.from_shape(shape, self._strip, arithmetic.element)
        self._head = shape.head_dim * arithmetic.element
        #: Bytes of an element of keys and values.
        self._stored = 1 if shape.quantized else arithmetic.element
        self._floats = ir.VectorType(FLOAT, arithmetic.lanes)
        sizes = {arithmetic.tile, min(shape.groups, arithmetic.tile), 4, 2, 1}
        self._tiles = sorted(sizes, reverse=True)
        self._heads, self._result, self._sinks = heads, result, sinks
        self._passes, self._tables, self._window = passes, tables, window
        self._pages = {"keys": keys, "values": values}
        self._head_bytes, self._block_bytes = head_bytes, block_bytes
        self._position_bytes = position_bytes
        self._memory = emit_offset(builder, scratch, builder.mul(thread, scratch_bytes))
        emit_loop(builder, begin, end, 1, self._emit_part)
        builder.ret_void()

    def _emit_part(self, part: ir.Value, _: Values) -> Values:
        builder, shape = self._builder, self._shape
        number = builder.udiv(part, I64(shape.kv_heads))
        self._kv_head = builder.urem(part, I64(shape.kv_heads))
        described = emit_element_pointer(builder, self._passes, number, PASS_WORDS * _WORD)
        self._row, count, self._start, self._table = (
            builder.load(emit_offset(builder, described, I64(word * _WORD)), typ=I64)
            for word in range(PASS_WORDS)
        )
        self._queries = builder.mul(count, I64(shape.groups))
        self._last = builder.add(self._start, builder.sub(count, I64(1)))
        self._first = self._first_visible(self._start)
        # First position that all rows see.
        self._common = self._first_visible(self._last)
        emit_loop(builder, I64(0), self._queries, 1, self._load_query)
        size = I64(self.scratch.span)
        begin, last = (builder.udiv(each, size) for each in (self._first, self._last))
        emit_loop(builder, begin, builder.add(last, I64(1)), 1, self._emit_span)
        emit_loop(builder, I64(0), self._queries, 1, self._store_result)
        return ()

    def _load_query(self, query: ir.Value, _: Values) -> Values:
        """Copy a query next to the other queries of the pass."""
        builder, shape = self._builder, self._shape
        source = self._head_pointer(self._heads, query, (shape.groups + 2) * shape.kv_heads)
        for at in range(0, self._head, _VECTOR_BYTES):
            vector = builder.load(emit_offset(builder, source, I64(at)), typ=INTEGERS, align=2)
            address = self._scratch_pointer(self.scratch.queries + at, query, self._head)
            builder.store(vector, address, align=4)
        self._softmax.init_query(self._query_state(query))
        return ()

    def _emit_span(self, number: ir.Value, _: Values) -> Values:
        """Process the part of a span that at least one query sees."""
        builder, size = self._builder, I64(self.scratch.span)
        begin = builder.mul(number, size)
        end = emit_minimum(builder, builder.add(self._last, I64(1)), builder.add(begin, size))
        first = builder.and_(self._first, I64(-self._strip))
        self._base = emit_maximum(builder, begin, first)
        strip, positions = I64(self._strip), builder.sub(end, self._base)
        strips = builder.udiv(builder.add(positions, I64(self._strip - 1)), strip)
        emit_loop(builder, I64(0), strips, 1, self._emit_scores)
        positions = builder.mul(strips, strip)
        behind = builder.add(self._base, builder.sub(positions, I64(1)))
        all_seen = builder.and_(
            builder.icmp_signed("<=", self._common, self._base),
            builder.icmp_signed("<=", behind, self._start),
        )
        vectors = builder.udiv(positions, I64(LANES))
        with builder.if_else(all_seen) as (then, otherwise):
            with then:
                self._emit_weights(vectors, False)
            with otherwise:
                self._emit_weights(vectors, True)
        emit_loop(builder, I64(0), strips, 1, self._pack_values)
        self._add_values(builder.udiv(positions, I64(PAIR_BYTES // self._arithmetic.element)))
        return ()

    def _emit_scores(self, strip: ir.Value, _: Values) -> Values:
        """Multiply all queries by a strip of keys."""
        builder, arithmetic = self._builder, self._arithmetic
        for half, page in enumerate(self._half_pointers(strip, "keys")):
            self._transpose_keys(page, half * HALF_PAGE)
        self._prefetch_pages(self._half_pointers(strip, "values"))

        def emit_tile(first: ir.Value, size: int) -> None:
            rows = [builder.add(first, I64(each)) for each in range(size)]
            queries = [self._scratch_pointer(self.scratch.queries, row, self._head) for row in rows]
            zeros = [ir.Constant(self._floats, [0.0] * arithmetic.lanes)] * arithmetic.vectors
            pairs = I64(self._head // PAIR_BYTES)
            totals = emit_dots(builder, arithmetic, self._memory, queries, pairs, size * zeros)
            at = builder.mul(strip, I64(self._strip * F32))
            scores = [emit_offset(builder, self._query_state(row).scores, at) for row in rows]
            places = emit_result_pointers(builder, scores, arithmetic, F32)
            for total, address in zip(totals, places, strict=True):
                builder.store(total, address, align=4)

        emit_few_tiles(builder, self._queries, self._tiles, emit_tile)
        return ()

    def _emit_weights(self, vectors: ir.Value, hides: bool) -> None:
        """Turn scores of a span into weights; ``hides`` masks some."""
        builder = self._builder

        def emit_query(query: ir.Value, _: Values) -> Values:
            seen = None
            if hides:
                row = builder.udiv(query, I64(self._shape.groups))
                position = builder.add(self._start, row)
                first, last = (
                    builder.trunc(builder.sub(each, self._base), I32)
                    for each in (self._first_visible(position), position)
                )
                seen = first, last
            self._softmax.apply_weights(self._query_state(query), vectors, seen)
            return ()

        emit_loop(builder, I64(0), self._queries, 1, emit_query)

    def _add_values(self, pairs: ir.Value) -> None:
        """Add a span's weighted values to the totals."""
        builder, arithmetic = self._builder, self._arithmetic
        chunk_bytes = self.scratch.span * self._strip * arithmetic.element

        def emit_chunk(chunk: ir.Value, _: Values) -> Values:
            columns = self._scratch_pointer(self.scratch.values, chunk, chunk_bytes)

            def emit_tile(first: ir.Value, size: int) -> None:
                rows = [builder.add(first, I64(each)) for each in range(size)]
                weights = [self._query_state(row).scores for row in rows]
                totals = [
                    emit_element_pointer(
                        builder, self._query_state(row).totals, chunk, self._strip * F32
                    )
                    for row in rows
                ]
                places = emit_result_pointers(builder, totals, arithmetic, F32)
                begun = [builder.load(address, typ=self._floats, align=4) for address in places]
                sums = emit_dots(builder, arithmetic, columns, weights, pairs, begun)
                for each, address in zip(sums, places, strict=True):
                    builder.store(each, address, align=4)

            emit_few_tiles(builder, self._queries, self._tiles, emit_tile)
            return ()

        emit_loop(builder, I64(0), I64(self._shape.head_dim // self._strip), 1, emit_chunk)

    def _store_result(self, query: ir.Value, _: Values) -> Values:
        """Divide by the sum of weights, and store."""
        builder, shape = self._builder, self._shape
        sink = None
        if shape.sinks:
            address = emit_element_pointer(builder, self._sinks, self._head_index(query), F32)
            sink = builder.load(address, typ=FLOAT, align=4)
        result = self._head_pointer(self._result, query, shape.groups * shape.kv_heads)
        self._softmax.store_result(self._query_state(query), sink, result)
        return ()

    def _transpose_keys(self, page: _HalfPage, begin: int) -> None:
        """Transpose tiles of ``lanes`` positions × ``lanes`` pairs."""
        builder, lanes = self._builder, self._arithmetic.lanes
        beside = PAIR_BYTES // self._arithmetic.element
        kind = ir.VectorType(I32, lanes)
        for start in range(0, HALF_PAGE, lanes):
            for first in range(0, self._head // PAIR_BYTES, lanes):
                rows = []
                for position in range(start, start + lanes):
                    row = self._load_row(page, position, first * beside, lanes * beside)
                    rows.append(builder.bitcast(row, kind))
                for pair, vector in enumerate(emit_transpose(builder, rows), first):
                    at = (pair * self._strip + begin + start) * PAIR_BYTES
                    builder.store(vector, emit_offset(builder, self._memory, I64(at)), align=4)

    def _pack_values(self, strip: ir.Value, _: Values) -> Values:
        """Pack a strip's values by column; bf16 in pairs of positions."""
        builder, arithmetic = self._builder, self._arithmetic
        beside = PAIR_BYTES // arithmetic.element
        row_bytes = self._strip * PAIR_BYTES
        chunk_bytes = self.scratch.span * row_bytes // beside
        first = builder.mul(strip, I64(self._strip // beside * row_bytes))
        target = emit_offset(builder, self._memory, builder.add(first, I64(self.scratch.values)))
        order = [at for column in range(self._strip) for at in (column, self._strip + column)]
        mask = ir.Constant(ir.VectorType(I32, 2 * self._strip), order)
        for half, page in enumerate(self._half_pointers(strip, "values")):
            for position in range(0, HALF_PAGE, beside):
                for chunk in range(self._shape.head_dim // self._strip):
                    rows = [
                        self._load_row(page, position + each, chunk * self._strip, self._strip)
                        for each in range(beside)
                    ]
                    laid = rows[0] if beside == 1 else builder.shuffle_vector(*rows, mask)
                    row = (half * HALF_PAGE + position) // beside
                    at = I64(chunk * chunk_bytes + row * row_bytes)
                    builder.store(laid, emit_offset(builder, target, at), align=4)
        self._prefetch_pages(self._half_pointers(strip, "keys", self.scratch.span))
        return ()

    def _load_row(self, page: _HalfPage, position: int, first: int, count: int) -> ir.Value:
        """Load ``count`` elements of a position from ``first`` on, as integers of rows' size."""
        builder, element = self._builder, self._arithmetic.element
        row = emit_element_pointer(builder, page.rows, I64(position), self._position_bytes)
        address = emit_offset(builder, row, I64(first * self._stored))
        kind = ir.VectorType(ir.IntType(8 * element), count)
        if not self._shape.quantized:
            return builder.load(address, typ=kind, align=2)
        codes = builder.load(address, typ=ir.VectorType(BYTE, count), align=1)
        at = emit_offset(builder, page.scales, I64(position * BF16))
        bits = builder.zext(builder.load(at, typ=ir.IntType(16), align=2), I32)
        scale = builder.bitcast(builder.shl(bits, I32(16)), FLOAT)
        wide = builder.fmul(
            builder.sitofp(codes, ir.VectorType(FLOAT, count)),
            emit_broadcast(builder, scale, count),
        )
        if element == BF16:
            wide = builder.fptrunc(wide, ir.VectorType(BFloat(), count))
        return builder.bitcast(wide, kind)

    def _prefetch_pages(self, pages: list[_HalfPage]) -> None:
        """Prefetch the pages after this span."""
        builder = self._builder
        for page in pages:

            def emit_position(position: ir.Value, _: Values, page: _HalfPage = page) -> Values:
                row = emit_element_pointer(builder, page.rows, position, self._position_bytes)
                for at in range(0, self._shape.head_dim * self._stored, _VECTOR_BYTES):
                    emit_prefetch(builder, emit_offset(builder, row, I64(at)))
                return ()

            emit_loop(builder, I64(0), I64(HALF_PAGE), 1, emit_position)

    def _half_pointers(self, strip: ir.Value, what: str, ahead: int = 0) -> list[_HalfPage]:
        """Point to the halves of a strip's positions, or to those of the strip ``ahead``.

        Positions beyond the visible ones are clamped.
        """
        builder, size = self._builder, I64(self._shape.block_size)
        base = builder.add(self._base, I64(ahead))
        begin = builder.add(base, builder.mul(strip, I64(self._strip)))
        first, last = (builder.and_(each, I64(-HALF_PAGE)) for each in (self._first, self._last))
        base = emit_element_pointer(builder, self._pages[what], self._kv_head, self._head_bytes)
        pages = []
        for half in range(self._strip // HALF_PAGE):
            wanted = builder.add(begin, I64(half * HALF_PAGE))
            position = emit_minimum(builder, emit_maximum(builder, wanted, first), last)
            entry = builder.add(self._table, builder.udiv(position, size))
            block = builder.load(emit_element_pointer(builder, self._tables, entry, _WORD), typ=I64)
            page = emit_element_pointer(builder, base, block, self._block_bytes)
            inside = builder.urem(position, size)
            rows = emit_element_pointer(builder, page, inside, self._position_bytes)
            behind = emit_element_pointer(builder, page, size, self._position_bytes)
            pages.append(_HalfPage(rows, emit_element_pointer(builder, behind, inside, BF16)))
        return pages

    def _first_visible(self, position: ir.Value) -> ir.Value:
        """Compute the first position that a row at ``position`` sees."""
        builder = self._builder
        if self._shape.chunked:
            # Without a window, the division must not be by 0.
            size = emit_maximum(builder, self._window, I64(1))
            first = builder.sub(position, builder.urem(position, size))
        else:
            first = builder.add(builder.sub(position, self._window), I64(1))
            first = emit_maximum(builder, first, I64(0))
        return builder.select(builder.icmp_signed(">", self._window, I64(0)), first, I64(0))

    def _query_state(self, query: ir.Value) -> QueryState:
        """Return pointers to a query's state."""
        scratch, width = self.scratch, self._shape.head_dim * F32
        return QueryState(
            self._scratch_pointer(scratch.scores, query, scratch.span * F32),
            self._scratch_pointer(scratch.maxima, query, F32),
            self._scratch_pointer(scratch.sums, query, F32),
            self._scratch_pointer(scratch.totals, query, width),
        )

    def _head_pointer(self, base: ir.Value, query: ir.Value, heads: int) -> ir.Value:
        """Return a pointer to a query's head in ``[T, heads, head_dim]``."""
        builder = self._builder
        row = builder.add(self._row, builder.udiv(query, I64(self._shape.groups)))
        number = builder.add(builder.mul(row, I64(heads)), self._head_index(query))
        return emit_element_pointer(builder, base, number, self._head)

    def _head_index(self, query: ir.Value) -> ir.Value:
        builder, groups = self._builder, I64(self._shape.groups)
        return builder.add(builder.mul(self._kv_head, groups), builder.urem(query, groups))

    def _scratch_pointer(self, at: int, number: ir.Value, nbytes: int) -> ir.Value:
        """Return a pointer to item ``number`` of the thread's scratch from ``at`` on."""
        begin = emit_offset(self._builder, self._memory, I64(at))
        return emit_element_pointer(self._builder, begin, number, nbytes)
