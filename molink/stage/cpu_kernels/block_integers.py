"""Integer matrix product of quantized weights and rows in 8 bits.

Weights are stored as in :mod:`molink.stage.cpu_kernels.block_matmul`; rows are quantized by
:mod:`molink.stage.cpu_kernels.row_quantizer`, each row by itself. Sums of a group are exact, so a
row's result does not depend on other rows, threads or instructions.
"""

import sys

import torch
from llvmlite import ir
from torch import Tensor

from molink.gguf.block_formats import RUN_CODES, BlockFormat
from molink.stage.cpu_kernels.arithmetic import Arithmetic
from molink.stage.cpu_kernels.block_decoders import LoadWord
from molink.stage.cpu_kernels.block_matmul import BlockProduct
from molink.stage.cpu_kernels.block_reader import PackedBlockReader
from molink.stage.cpu_kernels.compiler import CompiledLibrary
from molink.stage.cpu_kernels.emit import I32, Values, emit_element_pointer
from molink.stage.cpu_kernels.integer_dots import (
    IntegerInstructions,
    codebook_step,
    emit_run,
    has_wide_codes,
    quad_order,
)
from molink.stage.cpu_kernels.openmp import OpenMp, emit_parallel_for
from molink.stage.cpu_kernels.row_quantizer import NUMBER_BYTES, RowQuantizer
from molink.stage.cpu_kernels.segments import Segments, WeightTable

#: Rows multiplied at once.
_TILES = [6, 4, 2, 1]
#: Elements of rows from which threads share their quantization.
_MANY_NUMBERS = 2**16


class IntegerBlockMatMul:
    """A compiled product for all weights of one format; used as
    :class:`~molink.stage.cpu_kernels.block_matmul.BlockMatMul`.
    """

    def __init__(
        self,
        form: BlockFormat,
        arithmetic: Arithmetic,
        instructions: IntegerInstructions,
        openmp: OpenMp | None = None,
        threads: int = 1,
        features: str | None = None,
    ) -> None:
        """Compile for rows of ``arithmetic``'s type.

        Raises:
            RuntimeError: LLVM can't compile for this CPU or ``features``.
        """
        self.form, self._threads = form, threads
        #: Columns stored side by side.
        self.columns = arithmetic.vectors * arithmetic.lanes
        #: Type of rows and results.
        self.dtype = torch.bfloat16 if arithmetic.element == 2 else torch.float32
        self._code_bytes = 2 if has_wide_codes(form) else 1
        self._block_bytes = self.columns * form.nbytes
        module = ir.Module("block_integers")
        product = _IntegerProduct(module, form, arithmetic, instructions)
        factor = None if form.has_minimum else product.reader.sum_factor
        quantizer = RowQuantizer(
            module, quad_order(form), arithmetic.element, self._code_bytes, factor
        )
        multiply = emit_parallel_for(module, product.function, openmp)
        segments = emit_parallel_for(module, product.emit_segments(module), openmp)
        shared = emit_parallel_for(module, quantizer.function, openmp)
        self._library = CompiledLibrary(module, features)
        load = self._library.get_function
        self._multiply = load(multiply.name, pointers=5, integers=4)
        self._multiply_segments = load(segments.name, pointers=6, integers=5)
        self._quantize = load(quantizer.function.name, pointers=3, integers=4)
        self._quantize_shared = load(shared.name, pointers=3, integers=2)

    @property
    def max_segment_rows(self) -> int:
        """As in :class:`~molink.stage.cpu_kernels.block_matmul.BlockMatMul`, but unlimited."""
        return sys.maxsize

    def __call__(self, weight: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        """Compute ``rows @ weight.T + bias``: ``[T, depth]`` → ``[T, columns]``.

        ``weight`` is uint8 ``[columns / C, bytes]``, ``bias`` float32 ``[columns]``.
        """
        parts, nbytes = weight.shape
        count = rows.shape[0]
        result = rows.new_empty(count, parts * self.columns)
        codes, numbers, _kept = self._quantize_rows(rows)
        pointers = weight.data_ptr(), codes, numbers, bias.data_ptr(), result.data_ptr()
        self._multiply(*pointers, parts, nbytes // self._block_bytes, count, self._threads)
        return result

    def multiply_segments(self, weights: WeightTable, rows: Tensor, segments: Segments) -> Tensor:
        """Multiply each segment of rows ``[T, depth]`` by its weight: ``[P, columns]``."""
        parts, nbytes = weights.shape
        result = rows.new_empty(segments.pairs, parts * self.columns)
        codes, numbers, _kept = self._quantize_rows(rows)
        tensors = weights.addresses, segments.weights, segments.counts
        pointers = [each.data_ptr() for each in tensors]
        blocks, count = nbytes // self._block_bytes, len(segments.weights)
        self._multiply_segments(
            *pointers, codes, numbers, result.data_ptr(),
            parts, blocks, count, not segments.shares_rows, self._threads,
        )  # fmt: skip
        return result

    def _quantize_rows(self, rows: Tensor) -> tuple[int, int, Tensor]:
        """Quantize rows; return the addresses of codes and numbers, and the memory of both."""
        rows = rows.contiguous()
        size = rows.numel()
        groups = size // self.form.group
        # Codes, then numbers: one allocation.
        memory = rows.new_empty(size * self._code_bytes + groups * NUMBER_BYTES, dtype=torch.uint8)
        codes = memory.data_ptr()
        numbers = codes + size * self._code_bytes
        if size < _MANY_NUMBERS:
            self._quantize(rows.data_ptr(), codes, numbers, groups, 0, groups, 0)
        else:
            self._quantize_shared(rows.data_ptr(), codes, numbers, groups, self._threads)
        return codes, numbers, memory


class _IntegerProduct(BlockProduct):
    """The base's product, with quantized rows and their groups' numbers as ``sums``."""

    def __init__(
        self,
        module: ir.Module,
        form: BlockFormat,
        arithmetic: Arithmetic,
        instructions: IntegerInstructions,
    ) -> None:
        self._instructions = instructions
        super().__init__(module, form, arithmetic)

    @property
    def _row_element(self) -> int:
        return 2 if has_wide_codes(self._form) else 1

    @property
    def _tiles(self) -> list[int]:
        return _TILES

    def _create_reader(self) -> PackedBlockReader:
        # Codes are multiplied without their offset.
        offset = self._form.offset
        return PackedBlockReader(self._builder, self._form, self._arithmetic, True, offset)

    def _emit_dots(self, codes: ir.Value, rows: Values, dots: Values) -> Values:
        builder, form, instructions = self._builder, self._form, self._instructions

        def emit_one(run: ir.Value, words: list[LoadWord], sums: Values) -> Values:
            step = RUN_CODES * self._row_element
            below = [emit_element_pointer(builder, row, run, step) for row in rows]
            return emit_run(builder, form, instructions, words, below, sums)

        whole = ir.VectorType(I32, instructions.lanes)
        zeros = [ir.Constant(whole, [0] * whole.count)] * len(dots)
        sums = self.reader.emit_runs(codes, emit_one, zeros)
        floats = [builder.sitofp(each, dots[0].type) for each in sums]
        step = codebook_step(form)
        if step != 1:
            factor = ir.Constant(dots[0].type, [step] * whole.count)
            floats = [builder.fmul(each, factor) for each in floats]
        if not self.reader.subtracts_excess:
            return floats
        return [builder.fadd(*each) for each in zip(floats, dots, strict=True)]
