"""Matrix product with 16-bit weights: memory-bound with few rows, compute-bound with many.

The weight ``[columns, depth]`` is stored in *blocks* of columns in read order: one sequential
stream, which prefetchers follow best. A block has, for each pair of neighbours in depth, that pair
of all columns; float16 weights are not paired::

    bf16:     [columns / C, depth / 2, C, 2]        C = Arithmetic.vectors * Arithmetic.lanes
    float16:  [columns / C, depth, C]

Each result is one sum over depth in order, so a row's result doesn't depend on other rows or on
threads.
"""

import torch
from llvmlite import ir
from torch import Tensor, unflatten

from molink.stage.cpu_kernels.arithmetic import Arithmetic
from molink.stage.cpu_kernels.compiler import CompiledLibrary
from molink.stage.cpu_kernels.dots import PAIR_BYTES, emit_dots, emit_result_pointers, emit_tiles
from molink.stage.cpu_kernels.emit import (
    FLOAT,
    I64,
    Values,
    begin_function,
    emit_element_pointer,
    emit_loop,
    emit_offset,
)
from molink.stage.cpu_kernels.openmp import OpenMp, emit_parallel_for


class MatMul:
    """A compiled product for weights that :meth:`supports_weight` accepts."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        openmp: OpenMp | None = None,
        threads: int = 1,
        features: str | None = None,
    ) -> None:
        """Compile for ``threads`` threads of ``openmp`` if given.

        Raises:
            RuntimeError: LLVM can't compile for this CPU or ``features``.
        """
        self._columns = arithmetic.vectors * arithmetic.lanes
        self._threads = threads
        module = ir.Module("matmul")
        # The number of blocks is the first integer argument.
        multiply = emit_parallel_for(module, _emit_product(module, arithmetic), openmp)
        self._library = CompiledLibrary(module, features)
        self._multiply = self._library.get_function(multiply.name, pointers=4, integers=5)
        #: Type of rows and results.
        self.dtype = torch.bfloat16 if arithmetic.element == 2 else torch.float32
        self.weight_dtype = arithmetic.weight_dtype

    def supports_weight(self, weight: Tensor) -> bool:
        """Whether the product supports a weight ``[columns, depth]``."""
        columns, depth = weight.shape
        return columns % self._columns == 0 and depth % 2 == 0

    def pack_weight(self, weight: Tensor) -> Tensor:
        """Pack a weight ``[columns, depth]`` into blocks."""
        columns = len(weight)
        whole = weight.to(self.weight_dtype)
        # Moving pairs as single integers is eight times as fast.
        units = whole.view(torch.int32) if self.weight_dtype is torch.bfloat16 else whole
        blocks = units.view(columns // self._columns, self._columns, -1).transpose(1, 2)
        packed = blocks.contiguous().view(self.weight_dtype)
        return unflatten(packed, 2, (self._columns, -1)) if units is not whole else packed

    def gather_columns(self, weight: Tensor, columns: Tensor) -> Tensor:
        """Unpack columns ``[T]`` of a packed weight to ``[T, depth]``."""
        found = weight[columns // self._columns, :, columns % self._columns]
        return found.flatten(1).to(self.dtype)

    def __call__(self, weight: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        """Compute ``rows @ weight.T + bias``: ``[T, depth]`` → ``[T, columns]``.

        ``weight`` is packed by :meth:`pack_weight`, ``bias`` float32 ``[columns]``.
        """
        blocks = len(weight)
        rows = pad_row_stride(rows)
        count, depth = rows.shape
        result = rows.new_empty(count, blocks * self._columns)
        self._multiply(
            weight.data_ptr(),
            rows.data_ptr(),
            bias.data_ptr(),
            result.data_ptr(),
            blocks,
            depth // 2,
            rows.stride(0) * rows.element_size(),
            count,
            self._threads,
        )
        return result


def _emit_product(module: ir.Module, arithmetic: Arithmetic) -> ir.Function:
    """``product(weight, rows, bias, result, blocks, pairs, row_bytes, count, begin, end, thread)``.

    Multiplies ``count`` rows, ``row_bytes`` apart, by blocks ``begin … end - 1`` of a weight
    ``pairs`` deep.
    """
    product, builder = begin_function(module, "product", pointers=4, numbers=7)
    weight, rows, bias, result, blocks, pairs, row_bytes, count, begin, end, _ = product.args
    columns, element = I64(arithmetic.vectors * arithmetic.lanes), I64(arithmetic.element)
    block_bytes = builder.mul(pairs, builder.mul(columns, I64(PAIR_BYTES)))
    result_bytes = builder.mul(blocks, builder.mul(columns, element))

    def emit_rows(first: ir.Value, index: ir.Value, size: int, nbytes: ir.Value) -> list[ir.Value]:
        """Emit pointers to ``size`` rows from ``index`` on."""
        numbers = (builder.add(index, I64(number)) for number in range(size))
        return [emit_element_pointer(builder, first, each, nbytes) for each in numbers]

    def emit_block(block: ir.Value, _: Values) -> Values:
        column = builder.mul(block, columns)
        weights = emit_element_pointer(builder, weight, block, block_bytes)
        below = emit_offset(builder, result, builder.mul(column, element))
        added = emit_element_pointer(builder, bias, column, 4)
        vector = ir.VectorType(FLOAT, arithmetic.lanes)

        def emit_tile(first: ir.Value, size: int) -> None:
            places = emit_result_pointers(builder, [added], arithmetic, 4)
            begun = [builder.load(address, typ=vector, align=4) for address in places] * size
            given = emit_rows(rows, first, size, row_bytes)
            totals = emit_dots(builder, arithmetic, weights, given, pairs, begun)
            taken = emit_rows(below, first, size, result_bytes)
            places = emit_result_pointers(builder, taken, arithmetic, arithmetic.element)
            for total, address in zip(totals, places, strict=True):
                arithmetic.store_sum(builder, total, address)

        emit_tiles(builder, count, arithmetic.tile, emit_tile)
        return ()

    emit_loop(builder, begin, end, 1, emit_block)
    builder.ret_void()
    return product


#: Rows this many bytes apart share L1 cache sets.
_CACHE_SET_STRIDE = 4096
#: Rows that fit the L1 cache besides weights.
_MAX_CACHED_ROWS = 8
_CACHE_LINE_BYTES = 64


def pad_row_stride(rows: Tensor) -> Tensor:
    """Pad the stride of contiguous ``rows`` that would otherwise evict each other from the cache.

    With 4096 bf16 per row, 12 rows at once take a tenth longer without padding.
    """
    width, size = rows.shape[1], rows.element_size()
    if len(rows) <= _MAX_CACHED_ROWS or size > 2 or width * size % _CACHE_SET_STRIDE:
        return rows.contiguous()
    apart = rows.new_empty(len(rows), width + _CACHE_LINE_BYTES // size)[:, :width]
    return apart.copy_(rows)
