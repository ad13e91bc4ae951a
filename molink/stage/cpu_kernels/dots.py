"""Emits products of rows and columns, as many as there are registers for sums."""

from collections.abc import Callable, Sequence

from llvmlite import ir

from molink.stage.cpu_kernels.arithmetic import Arithmetic
from molink.stage.cpu_kernels.emit import (
    I32,
    I64,
    POINTER,
    VOID,
    Values,
    declare_function,
    emit_loop,
    emit_offset,
)

PAIR_BYTES = 4
#: Prefetch distance in weights.
_PREFETCH_BYTES = 2048


def emit_few_tiles(
    builder: ir.IRBuilder,
    count: ir.Value,
    sizes: Sequence[int],
    emit: Callable[[ir.Value, int], None],
) -> None:
    """Emit ``emit(first, size)`` for ``count`` rows in tiles of ``sizes``, largest first.

    The last size is 1. Fewer sizes compile faster.
    """
    first: ir.Value = I64(0)
    for size in sizes:

        def emit_whole(index: ir.Value, _: Values, size: int = size) -> Values:
            emit(index, size)
            return ()

        first, _ = emit_loop(builder, first, count, size, emit_whole)


def emit_tiles(
    builder: ir.IRBuilder, count: ir.Value, tile: int, emit: Callable[[ir.Value, int], None]
) -> None:
    """Emit ``emit(first, size)`` for ``count`` rows in tiles of ``tile``, then the rest."""

    def emit_whole(first: ir.Value, _: Values) -> Values:
        emit(first, tile)
        return ()

    first, _ = emit_loop(builder, I64(0), count, tile, emit_whole)
    after = builder.append_basic_block()
    rest = builder.switch(builder.sub(count, first), after)
    for size in range(1, tile):
        case = builder.append_basic_block()
        rest.add_case(I64(size), case)
        builder.position_at_end(case)
        emit(first, size)
        builder.branch(after)
    builder.position_at_end(after)


def emit_dots(
    builder: ir.IRBuilder,
    arithmetic: Arithmetic,
    weights: ir.Value,
    rows: Values,
    pairs: ir.Value,
    totals: Values,
) -> Values:
    """Add products of ``rows`` (pointers) with a block of ``weights`` to ``totals``.

    The block is ``[pairs, vectors, lanes, 2]``; ``totals`` are by row, then by vector.
    """
    vector_bytes = arithmetic.lanes * PAIR_BYTES
    asks = arithmetic.prefetch_min_rows is not None and len(rows) >= arithmetic.prefetch_min_rows

    def emit_pair(pair: ir.Value, totals: Values) -> Values:
        columns_at = emit_offset(
            builder, weights, builder.mul(pair, I64(arithmetic.vectors * vector_bytes))
        )
        columns = []
        for vector in range(arithmetic.vectors):
            columns.append(arithmetic.load_weights(builder, columns_at, vector))
            if asks:
                ahead = vector * vector_bytes + _PREFETCH_BYTES
                emit_prefetch(builder, emit_offset(builder, columns_at, I64(ahead)))
        offset = builder.mul(pair, I64(arithmetic.pair_bytes))
        given = [arithmetic.load_pair(builder, emit_offset(builder, row, offset)) for row in rows]
        sums = iter(totals)
        return [
            arithmetic.add_product(builder, next(sums), one, column)
            for one in given
            for column in columns
        ]

    return emit_loop(builder, I64(0), pairs, 1, emit_pair, totals)[1]


def emit_result_pointers(
    builder: ir.IRBuilder, rows: Sequence[ir.Value], arithmetic: Arithmetic, element: int
) -> list[ir.Value]:
    """Emit pointers to the rows' vectors, in the order of :func:`emit_dots`' totals."""
    nbytes = arithmetic.lanes * element
    return [
        emit_offset(builder, row, I64(vector * nbytes))
        for row in rows
        for vector in range(arithmetic.vectors)
    ]


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at ``place``."""
    kind = ir.FunctionType(VOID, [POINTER, I32, I32, I32])
    read, keep, data = I32(0), I32(3), I32(1)
    builder.call(
        declare_function(builder.module, "llvm.prefetch.p0", kind), [address, read, keep, data]
    )
