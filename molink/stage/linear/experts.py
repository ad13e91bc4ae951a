"""Stacked projections of all experts of a layer on a GPU."""

from dataclasses import dataclass

from torch import Tensor

from molink.stage.gpu_kernels.block_planes import BlockPlanes
from molink.stage.gpu_kernels.expert_product import ExpertTiles, multiply_experts
from molink.stage.linear.base import total_bytes


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One projection per expert.

    ``weight`` is ``[experts * out, in]``, in the rows' type or in bit planes; ``bias`` is
    ``[experts * out]``.
    """

    weight: Tensor | BlockPlanes
    bias: Tensor | None
    num_experts: int

    def __call__(self, rows: Tensor, tiles: ExpertTiles, shared: int) -> Tensor:
        """Multiply rows ``[pairs / shared, in]`` by their experts' weights, to ``[pairs, out]``."""
        return multiply_experts(self.weight, rows, self.bias, tiles, self.num_experts, shared)

    def put_expert(self, slot: int, other: "ExpertLinear") -> None:
        """Overwrite the expert at ``slot`` with the only one of ``other``."""
        if isinstance(self.weight, BlockPlanes):
            assert isinstance(other.weight, BlockPlanes)
            self.weight.copy_rows(slot * other.weight.layout.shape[0], other.weight)
        else:
            assert isinstance(other.weight, Tensor)
            self.weight.view(self.num_experts, *other.weight.shape)[slot] = other.weight
        if self.bias is not None and other.bias is not None:
            self.bias.view(self.num_experts, -1)[slot] = other.bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + total_bytes(self.bias)
