"""Experts on a GPU: one launch multiplies all of them, and the host never waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from molink.stage.decoder.mlp import BoundedGate, GateFunction
from molink.stage.decoder.router import ExpertRouter
from molink.stage.device_copy import upload_tensor
from molink.stage.gpu_kernels.expert_product import add_experts, sort_by_expert
from molink.stage.linear import ExpertLinear


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Experts with stacked projections.

    ``gate`` and ``bounded_gate`` are those of :class:`~molink.stage.decoder.mlp.GatedMlp`.
    """

    gate_up: ExpertLinear
    down: ExpertLinear
    gate: GateFunction
    bounded_gate: BoundedGate | None

    @property
    def count(self) -> int:
        return self.gate_up.num_experts

    def run_pairs(self, rows: Tensor, experts: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run each row of ``[T, hidden]`` through its experts (int32 ``[T, k]``).

        Returns results ``[T * k, hidden]``, and the factors (``[T * k, 1]``) by which they must
        still be multiplied.
        """
        top_k = experts.shape[1]
        tiles = sort_by_expert(experts, self.gate_up.num_experts, rows)
        factors = None
        if self.bounded_gate is None:
            gated = self.gate(self.gate_up(rows, tiles, top_k))
        else:
            gated, factors = self.bounded_gate(self.gate_up(rows, tiles, top_k))
        return self.down(gated, tiles, 1), factors

    def multiply(self, rows: Tensor, sources: Tensor, counts: Sequence[int]) -> Tensor:
        """Run ``rows[sources]``, ``[P, hidden]``.

        See :meth:`molink.stage.decoder.expert_mlp.ExpertList.multiply`.
        """
        slots = torch.arange(len(counts), dtype=torch.int32)
        sorted_slots = slots.repeat_interleave(torch.tensor(counts)).unsqueeze(1)
        products, factors = self.run_pairs(rows[sources], upload_tensor(sorted_slots, rows.device))
        return products if factors is None else products * factors

    def put_expert(self, slot: int, group: object) -> None:
        """Replace the expert at ``slot`` by the only one of ``group``."""
        assert isinstance(group, GroupedExperts), "experts of a device have one form"
        self.gate_up.put_expert(slot, group.gate_up)
        self.down.put_expert(slot, group.down)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class GroupedExpertMlp:
    """Like :class:`~molink.stage.decoder.expert_mlp.ExpertMlp`, with all experts in one launch."""

    capturable: ClassVar[bool] = True

    router: ExpertRouter
    group: GroupedExperts

    def __call__(self, rows: Tensor) -> Tensor:
        weights, experts = self.router.choose_on_gpu(rows)
        rows, weights = self.router.scale_rows(rows, weights)
        products, factors = self.group.run_pairs(rows, experts)
        return add_experts(products, weights, factors)

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + self.group.nbytes
