"""Runs one projection of all experts of a layer in a single call on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.cpu_kernels.segments import Segments, WeightTable
from molink.stage.linear.base import Projection
from molink.stage.linear.compiled import BlockLinear


@dataclass(frozen=True, slots=True)
class BlockExperts:
    """The same projection of all experts of a layer.

    ``table`` has the addresses of the weights of ``projections``; weights are not copied.
    """

    projections: tuple[BlockLinear, ...]
    table: WeightTable

    @classmethod
    def from_projections(cls, projections: Sequence[Projection]) -> "BlockExperts | None":
        """Combine projections; ``None`` unless they have one quantized format and shape."""
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
        """Multiply each segment of rows ``[T, in]`` by its expert's weight; return ``[P, out]``."""
        first = self.projections[0]
        given = rows.to(first.product.dtype)
        return first.product.multiply_segments(self.table, given, segments).to(first.dtype)

    @property
    def max_segment_rows(self) -> int:
        """Maximum rows of a segment for which one call is faster than a call per expert."""
        return self.projections[0].product.max_segment_rows
