"""Projections of all experts of a layer on a CPU, in one call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.cpu_kernels.segments import Segments, WeightTable
from molink.stage.linear.base import Projection
from molink.stage.linear.compiled import BlockLinear


@dataclass(frozen=True, slots=True)
class BlockExperts:
    """A projection of each expert; their weights stay where they are.

    ``table`` has the addresses of the ``projections``' weights.
    """

    projections: tuple[BlockLinear, ...]
    table: WeightTable

    @classmethod
    def from_projections(cls, projections: Sequence[Projection]) -> "BlockExperts | None":
        """Combine projections with quantized weights of one format and shape; else ``None``."""
        found = tuple(one for one in projections if isinstance(one, BlockLinear))
        kinds = {(id(one.product), one.weight.shape, one.dtype) for one in found}
        if len(found) < len(projections) or len(kinds) != 1:
            return None
        if any(one.column_order is not None for one in found):
            return None
        addresses = [(one.weight.data_ptr(), one.bias.data_ptr()) for one in found]
        parts, nbytes = found[0].weight.shape
        return cls(found, WeightTable(torch.tensor(addresses), (parts, nbytes)))

    def __call__(self, rows: Tensor, segments: Segments) -> Tensor:
        """Multiply each segment of rows ``[T, in]`` by its expert's weight, ``[P, out]``."""
        first = self.projections[0]
        given = rows.to(first.product.dtype)
        return first.product.multiply_segments(self.table, given, segments).to(first.dtype)

    @property
    def max_segment_rows(self) -> int:
        """Rows of a segment up to which a call is faster than one for each expert."""
        return self.projections[0].product.max_segment_rows
