"""Rows times a weight, at the rate of the memory for few rows and of the arithmetic for many.

The weight ``[columns, depth]`` lies in *blocks* of columns, as the product reads it: one stream
from the first byte to the last, which is what a CPU's prefetcher follows best. In a block, pairs of
neighbours in depth follow each other, and of each pair the columns::

    [columns / C, depth / 2, C, 2]        C = Arithmetic.vectors * Arithmetic.lanes

Each column of each row has one sum, over the depth in order: what a row gives doesn't depend on the
rows beside it, nor on how the blocks are spread over threads.
"""

import torch
from llvmlite import ir
from torch import Tensor

from molink.stage.kernels.arithmetic import Arithmetic
from molink.stage.kernels.compiler import Library
from molink.stage.kernels.emit import (
    FLOAT,
    I32,
    I64,
    POINTER,
    VOID,
    Values,
    declare,
    emit_loop,
    emit_offset,
)
from molink.stage.kernels.openmp import OpenMp, emit_shares

#: A tile of so many rows computes for so long that the CPU's prefetcher falls behind: weights are
#: asked for so many bytes ahead.
_PREFETCH_ROWS, _PREFETCH_BYTES = 9, 2048
_PAIR_BYTES = 4


class MatMul:
    """A compiled product, for weights of every shape that it :meth:`fits`."""

    __slots__ = ("_columns", "_library", "_multiply", "_threads", "dtype")

    def __init__(
        self,
        arithmetic: Arithmetic,
        openmp: OpenMp | None = None,
        threads: int = 1,
        features: str | None = None,
    ) -> None:
        """Compile it, to run on ``threads`` threads of ``openmp`` if there is one.

        Raises:
            RuntimeError: LLVM can't, for this CPU or for ``features`` of it (see :class:`Library`).
        """
        self._columns = arithmetic.vectors * arithmetic.lanes
        self._threads = threads
        module = ir.Module("matmul")
        multiply = emit_shares(module, _emit_product(module, arithmetic), openmp)
        self._library = Library(module, features)
        self._multiply = self._library.function(multiply.name, pointers=4, integers=4)
        #: The type of rows and results.
        self.dtype = torch.bfloat16 if arithmetic.element == 2 else torch.float32

    def fits(self, weight: Tensor) -> bool:
        """Whether it can multiply by a weight ``[columns, depth]``."""
        columns, depth = weight.shape
        return columns % self._columns == 0 and depth % 2 == 0

    def pack(self, weight: Tensor) -> Tensor:
        """A weight ``[columns, depth]`` in blocks: bf16 ``[columns / C, depth / 2, C, 2]``."""
        columns, depth = weight.shape
        blocks = weight.to(torch.bfloat16).view(columns // self._columns, -1, depth // 2, 2)
        return blocks.transpose(1, 2).contiguous()

    def __call__(self, weight: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        """``rows @ weight.T + bias``: ``[T, depth]`` → ``[T, columns]``.

        ``weight`` is as :meth:`pack` gives it, ``bias`` float32 ``[columns]``.
        """
        blocks, pairs, columns, _ = weight.shape
        rows = rows.contiguous()
        count = rows.shape[0]
        result = rows.new_empty(count, blocks * columns)
        self._multiply(
            weight.data_ptr(),
            rows.data_ptr(),
            bias.data_ptr(),
            result.data_ptr(),
            blocks,
            pairs,
            count,
            self._threads,
        )
        return result


def _emit_product(module: ir.Module, arithmetic: Arithmetic) -> ir.Function:
    """``product(weight, rows, bias, result, blocks, pairs, count, begin, end)``.

    Of the weight's ``blocks`` it multiplies ``begin … end - 1``, ``pairs`` deep, by ``count`` rows.
    """
    kind = ir.FunctionType(VOID, [POINTER] * 4 + [I64] * 5)
    product = ir.Function(module, kind, "product")
    weight, rows, bias, result, blocks, pairs, count, begin, end = product.args
    builder = ir.IRBuilder(product.append_basic_block())
    columns, element = I64(arithmetic.vectors * arithmetic.lanes), I64(arithmetic.element)
    block_bytes = builder.mul(pairs, builder.mul(columns, I64(_PAIR_BYTES)))
    row_bytes = builder.mul(pairs, builder.mul(element, I64(2)))
    result_bytes = builder.mul(blocks, builder.mul(columns, element))

    def emit_block(block: ir.Value, _: Values) -> Values:
        column = builder.mul(block, columns)
        tile = _Tile(
            arithmetic,
            builder,
            emit_offset(builder, weight, builder.mul(block, block_bytes)),
            emit_offset(builder, bias, builder.mul(column, I64(4))),
            pairs,
            row_bytes,
            result_bytes,
        )
        below = emit_offset(builder, result, builder.mul(column, element))

        def emit_tile(size: int, row: ir.Value) -> None:
            first = emit_offset(builder, rows, builder.mul(row, row_bytes))
            tile.emit(size, first, emit_offset(builder, below, builder.mul(row, result_bytes)))

        def emit_whole(row: ir.Value, _: Values) -> Values:
            emit_tile(arithmetic.tile, row)
            return ()

        row, _ = emit_loop(builder, I64(0), count, arithmetic.tile, emit_whole)
        after = builder.append_basic_block()
        rest = builder.switch(builder.sub(count, row), after)
        for size in range(1, arithmetic.tile):
            case = builder.append_basic_block()
            rest.add_case(I64(size), case)
            builder.position_at_end(case)
            emit_tile(size, row)
            builder.branch(after)
        builder.position_at_end(after)
        return ()

    emit_loop(builder, begin, end, 1, emit_block)
    builder.ret_void()
    return product


class _Tile:
    """A block of columns, by a few rows whose sums fit the CPU's registers."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        builder: ir.IRBuilder,
        weight: ir.Value,
        bias: ir.Value,
        pairs: ir.Value,
        row_bytes: ir.Value,
        result_bytes: ir.Value,
    ) -> None:
        self._arithmetic, self._builder = arithmetic, builder
        self._weight, self._bias, self._pairs = weight, bias, pairs
        self._row_bytes, self._result_bytes = row_bytes, result_bytes

    def emit(self, size: int, rows: ir.Value, result: ir.Value) -> None:
        """Multiply by ``size`` rows from ``rows`` on, into ``result``."""
        totals: Values = [
            self._load_bias(index) for index in range(self._arithmetic.vectors)
        ] * size
        every = [self._nth(rows, row, self._row_bytes) for row in range(size)]

        def emit_pair(pair: ir.Value, totals: Values) -> Values:
            return self._add_pair(pair, every, totals)

        _, totals = emit_loop(self._builder, I64(0), self._pairs, 1, emit_pair, totals)
        lane_bytes = self._arithmetic.lanes * self._arithmetic.element
        vectors = self._arithmetic.vectors
        for index, total in enumerate(totals):
            row = self._nth(result, index // vectors, self._result_bytes)
            place = emit_offset(self._builder, row, I64(index % vectors * lane_bytes))
            self._arithmetic.store(self._builder, total, place)

    def _add_pair(self, pair: ir.Value, rows: Values, totals: Values) -> Values:
        arithmetic, builder = self._arithmetic, self._builder
        vector_bytes = arithmetic.lanes * _PAIR_BYTES
        whole = I64(arithmetic.vectors * vector_bytes)
        here = emit_offset(builder, self._weight, builder.mul(pair, whole))
        weights = []
        for vector in range(arithmetic.vectors):
            place = emit_offset(builder, here, I64(vector * vector_bytes))
            weights.append(arithmetic.load_weights(builder, place))
            if len(rows) >= _PREFETCH_ROWS:
                self._prefetch(emit_offset(builder, place, I64(_PREFETCH_BYTES)))
        offset = builder.mul(pair, I64(2 * arithmetic.element))
        given = [arithmetic.load_pair(builder, emit_offset(builder, row, offset)) for row in rows]
        return [
            arithmetic.add_product(builder, totals[index * len(weights) + vector], one, weight)
            for index, one in enumerate(given)
            for vector, weight in enumerate(weights)
        ]

    def _load_bias(self, vector: int) -> ir.Value:
        lanes = self._arithmetic.lanes
        place = emit_offset(self._builder, self._bias, I64(vector * lanes * 4))
        return self._builder.load(place, typ=ir.VectorType(FLOAT, lanes), align=4)

    def _nth(self, first: ir.Value, index: int, nbytes: ir.Value) -> ir.Value:
        return emit_offset(self._builder, first, self._builder.mul(I64(index), nbytes))

    def _prefetch(self, place: ir.Value) -> None:
        kind = ir.FunctionType(VOID, [POINTER, I32, I32, I32])
        prefetch = declare(self._builder.module, "llvm.prefetch.p0", kind)
        read, keep, data = I32(0), I32(3), I32(1)
        self._builder.call(prefetch, [place, read, keep, data])
