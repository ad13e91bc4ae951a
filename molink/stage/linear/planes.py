"""Projections with low-bit weights on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.gpu_kernels.block_planes import BlockPlanes
from molink.stage.gpu_kernels.block_product import dequantize_rows, multiply_blocks
from molink.stage.linear.base import total_bytes


@dataclass(frozen=True, slots=True)
class PlanesLinear:
    """A projection with a low-bit weight; see :mod:`molink.stage.gpu_kernels.block_planes`."""

    planes: BlockPlanes
    bias: Tensor | None
    #: Type of rows and results.
    dtype: torch.dtype
    #: Permutation of input columns, if the weight's columns are reordered.
    column_order: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        given = rows if self.column_order is None else rows[:, self.column_order]
        return multiply_blocks(self.planes, given, self.bias)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Look up rows ``[tokens, hidden]`` of an embedding."""
        return dequantize_rows(self.planes, 0, len(tokens), self.dtype, tokens)

    def is_finite(self, first: int, last: int) -> bool:
        """Check that all numbers of rows ``first … last - 1`` are finite."""
        return self.planes.is_finite(first, last)

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes + total_bytes(self.bias, self.column_order)
