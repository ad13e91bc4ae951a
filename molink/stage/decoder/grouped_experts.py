"""Experts on a GPU: all are multiplied at once, and the host waits for nothing."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from molink.stage.decoder.mlp import BoundedGate, GateFunction
from molink.stage.decoder.router import ExpertRouter
from molink.stage.gpu_kernels.expert_product import add_experts, sort_by_expert
from molink.stage.linear import ExpertLinear


@dataclass(frozen=True, slots=True)
class GroupedExpertMlp:
    """As :class:`~molink.stage.decoder.mlp.ExpertMlp`, with experts' projections stacked.

    ``gate`` and ``bounded_gate`` are those of :class:`~molink.stage.decoder.mlp.GatedMlp`.
    """

    capturable: ClassVar[bool] = True

    router: ExpertRouter
    gate_up: ExpertLinear
    down: ExpertLinear
    gate: GateFunction
    bounded_gate: BoundedGate | None

    def __call__(self, rows: Tensor) -> Tensor:
        weights, experts = self.router.choose_on_gpu(rows)
        rows, weights = self.router.scale_rows(rows, weights)
        top_k = experts.shape[1]
        tiles = sort_by_expert(experts, self.gate_up.num_experts, rows)
        factors = None
        if self.bounded_gate is None:
            gated = self.gate(self.gate_up(rows, tiles, top_k))
        else:
            gated, factors = self.bounded_gate(self.gate_up(rows, tiles, top_k))
        return add_experts(self.down(gated, tiles, 1), weights, factors)

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + self.gate_up.nbytes + self.down.nbytes
