"""Projections with kernels compiled for this CPU."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.stage.cpu_kernels.repack import (
    BlockCodes,
    has_finite_numbers,
    pack_blocks,
    unpack_rows,
)
from molink.stage.linear.base import Projection, total_bytes

if TYPE_CHECKING:
    from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul
    from molink.stage.cpu_kernels.block_matmul import BlockMatMul
    from molink.stage.cpu_kernels.matmul import MatMul

#: Weights are packed in multiples of this many rows.
PART_ROWS = 128


@dataclass(frozen=True, slots=True)
class CompiledLinear:
    """A projection with a packed 16-bit weight; see :mod:`molink.stage.cpu_kernels.matmul`.

    ``bias`` is float32, zeros if there is none.
    """

    product: "MatMul"
    weight: Tensor
    bias: Tensor

    @classmethod
    def create_empty(
        cls,
        product: "MatMul",
        shape: tuple[int, int],
        weight_dtype: torch.dtype,
        bias: Tensor | None,
    ) -> "CompiledLinear | None":
        """Create an empty projection to fill part by part; ``None`` if parts don't fit blocks."""
        some = torch.zeros(PART_ROWS, shape[1], dtype=weight_dtype)
        if not product.supports_weight(some) or shape[0] % PART_ROWS:
            return None
        packed = product.pack_weight(some)
        weight = packed.new_empty(shape[0] // PART_ROWS * len(packed), *packed.shape[1:])
        return cls(product, weight, torch.zeros(shape[0]) if bias is None else bias.float())

    def put_rows(self, first: int, part: Tensor) -> None:
        """Store rows from ``first`` on; both numbers are multiples of :data:`PART_ROWS`."""
        packed = self.product.pack_weight(part)
        start = first * len(packed) // len(part)
        self.weight[start : start + len(packed)] = packed

    @classmethod
    def pack_weight(
        cls, product: "MatMul", weight: Tensor, bias: Tensor | None
    ) -> "CompiledLinear":
        """Pack ``weight`` ``[out, in]``."""
        added = torch.zeros(len(weight)) if bias is None else bias.float()
        return cls(product, product.pack_weight(weight), added)

    def __call__(self, rows: Tensor) -> Tensor:
        return self.product(self.weight, rows, self.bias)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Look up rows ``[tokens, hidden]`` of an embedding."""
        return self.product.gather_columns(self.weight, tokens)

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """A projection with a quantized weight; see :mod:`molink.stage.cpu_kernels.block_matmul`.

    ``weight`` is uint8 ``[out / C, bytes]``; ``bias`` float32, zeros if there is none.
    """

    product: "BlockMatMul | IntegerBlockMatMul"
    weight: Tensor
    bias: Tensor
    #: Type of rows and results; the product may compute in another one.
    dtype: torch.dtype
    #: Permutation of input columns, if the weight's columns are reordered.
    column_order: Tensor | None = None

    @classmethod
    def pack_blocks(
        cls,
        product: "BlockMatMul | IntegerBlockMatMul",
        rows: int,
        parts: Iterable[BlockCodes],
        bias: Tensor | None,
        dtype: torch.dtype,
        order: Tensor | None = None,
    ) -> "BlockLinear":
        """Pack ``parts`` with ``rows`` rows in total, stacked by rows.

        Each part's rows are a multiple of :data:`~molink.gguf.block_formats.ROW_MULTIPLE`.
        """
        columns = product.columns
        weight = torch.empty(0, dtype=torch.uint8)
        first = 0
        for part in parts:
            made = pack_blocks(product.form, part, columns)
            if not first:
                weight = made.new_empty(rows // columns, *made.shape[1:])
            weight[first : first + len(made)] = made
            first += len(made)
        added = torch.zeros(rows) if bias is None else bias.float()
        return cls(product, weight, added, dtype, order)

    def __call__(self, rows: Tensor) -> Tensor:
        given = rows if self.column_order is None else rows[:, self.column_order]
        found = self.product(self.weight, given.to(self.product.dtype), self.bias)
        return found.to(self.dtype)

    def look_up(self, tokens: Tensor) -> Tensor:
        found = unpack_rows(self.product.form, self.weight, self.product.columns, tokens)
        return found.to(self.dtype)

    def is_finite(self, first: int, last: int) -> bool:
        """Check that all numbers of rows ``first … last - 1`` are finite."""
        columns = self.product.columns
        part = self.weight[first // columns : last // columns]
        return has_finite_numbers(self.product.form, part, columns)

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.bias, self.column_order)


@dataclass(frozen=True, slots=True)
class ConcatenatedLinear:
    """Several projections of the same rows with concatenated outputs, for mixed weight types."""

    parts: tuple[Projection, ...]

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.cat([part(rows) for part in self.parts], 1)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
