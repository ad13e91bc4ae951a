"""Projections of all experts of a layer on a GPU, stacked."""

from dataclasses import dataclass

from torch import Tensor

from molink.stage.gpu_kernels.block_planes import BlockPlanes
from molink.stage.gpu_kernels.expert_product import ExpertTiles, multiply_experts
from molink.stage.linear.base import total_bytes


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """A projection of each expert.

    ``weight`` is ``[experts * out, in]``, in the rows' type or in planes; ``bias`` is ``[experts *
    out]``.
    """

    weight: Tensor | BlockPlanes
    bias: Tensor | None
    num_experts: int

    def __call__(self, rows: Tensor, tiles: ExpertTiles, shared: int) -> Tensor:
        """Multiply rows ``[pairs / shared, in]`` by their experts' weights, ``[pairs, out]``."""
        return multiply_experts(self.weight, rows, self.bias, tiles, self.num_experts, shared)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + total_bytes(self.bias)
