"""Experts that a router chooses, for devices and formats without grouped GPU kernels.

Rows are sorted by expert, so that each chosen expert processes all its rows at once. Sums have a
fixed order without atomic additions. Apart from rounding in the projections, a row's result
therefore doesn't depend on other rows of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from molink.stage.cpu_kernels.segments import Segments
from molink.stage.decoder.mlp import GatedMlp, GateFunction, Mlp
from molink.stage.decoder.router import ExpertRouter
from molink.stage.device_copy import download_tensors, upload_tensor
from molink.stage.linear import BlockExperts


@dataclass(frozen=True, slots=True)
class BlockExpertGroup:
    """Experts with quantized weights of one format; a CPU runs all of them in one call."""

    gate_up: BlockExperts
    down: BlockExperts
    gate: GateFunction

    @classmethod
    def from_experts(cls, experts: Sequence[Mlp]) -> "BlockExpertGroup | None":
        """Combine experts; return ``None`` if they are not of one quantized format."""
        found = [one for one in experts if isinstance(one, GatedMlp) and one.bounded_gate is None]
        if len(found) < len(experts):
            return None
        gate_up = BlockExperts.from_projections([one.gate_up for one in found])
        down = BlockExperts.from_projections([one.down for one in found])
        return None if gate_up is None or down is None else cls(gate_up, down, found[0].gate)

    def run_segments(self, rows: Tensor, segments: Segments) -> Tensor:
        """Run each segment of rows ``[T, hidden]`` through its expert; return ``[P, hidden]``."""
        gated = self.gate(self.gate_up(rows, segments))
        return self.down(gated, replace(segments, shares_rows=False))

    @property
    def max_segment_rows(self) -> int:
        """See :class:`~molink.stage.linear.BlockExperts`."""
        return min(self.gate_up.max_segment_rows, self.down.max_segment_rows)


@dataclass(slots=True)
class ExpertList:
    """Experts that run one after another, or in one call if a CPU kernel supports their format."""

    experts: list[Mlp]
    _blocks: BlockExpertGroup | None = field(init=False)

    def __post_init__(self) -> None:
        self._blocks = BlockExpertGroup.from_experts(self.experts)

    @property
    def count(self) -> int:
        return len(self.experts)

    @property
    def runs_at_once(self) -> bool:
        """Whether one call runs several experts."""
        return self._blocks is not None

    def run_row(self, row: Tensor, chosen: Tensor) -> Tensor:
        """Run a row ``[1, hidden]`` through ``chosen`` experts (int64 ``[k]``, on the host).

        Returns ``[k, hidden]``.
        """
        if self._blocks is None:
            return torch.cat([self.experts[expert](row) for expert in chosen.tolist()])
        segments = Segments(chosen, torch.ones_like(chosen), len(chosen), shares_rows=True)
        return self._blocks.run_segments(row, segments)

    def multiply(self, rows: Tensor, sources: Tensor, counts: Sequence[int]) -> Tensor:
        """Run ``rows[sources]``, sorted by expert; the first ``counts[0]`` belong to expert 0.

        ``rows`` ``[T, hidden]`` and ``sources`` (int64 ``[P]``) are on the device. Returns ``[P,
        hidden]``.
        """
        if self._blocks is not None and max(counts) <= self._blocks.max_segment_rows:
            chosen = [(expert, count) for expert, count in enumerate(counts) if count]
            numbers, sizes = torch.tensor(chosen).t().contiguous()
            segments = Segments(numbers, sizes, len(sources))
            return self._blocks.run_segments(rows[sources], segments)
        results: list[Tensor] = []
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                results.append(expert(rows[sources[first : first + count]]))
                first += count
        return torch.cat(results)

    def put_expert(self, slot: int, group: object) -> None:
        """Replace the expert at ``slot`` by the only one of ``group``."""
        assert isinstance(group, ExpertList), "experts of a device have one form"
        self.replace_expert(slot, *group.experts)

    def replace_expert(self, slot: int, expert: Mlp) -> None:
        """Replace the expert at ``slot``."""
        self.experts[slot] = expert
        self._blocks = BlockExpertGroup.from_experts(self.experts)

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)


def add_weighted(products: Tensor, weights: Tensor) -> Tensor:
    """Sum each row's ``products [T * top_k, n]`` times ``weights [T, top_k]``, in place."""
    return products.view(*weights.shape, -1).mul_(weights.unsqueeze(-1)).sum(1)


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Experts that a router chooses and weights.

    For formats and devices that :mod:`molink.stage.decoder.grouped_experts` does not support.
    """

    #: Each forward reads the chosen experts back from the device.
    capturable: ClassVar[bool] = False

    router: ExpertRouter
    group: ExpertList

    def __call__(self, rows: Tensor) -> Tensor:
        weights, experts = self.router.choose(rows)
        rows, weights = self.router.scale_rows(rows, weights.to(rows.dtype))
        # The only wait for the device: the host must know the chosen experts to launch them.
        (chosen,) = download_tensors([experts])
        if len(rows) == 1:
            return add_weighted(self.group.run_row(rows, chosen[0]), weights)
        return self._run_experts(rows, weights, chosen.flatten())

    def _run_experts(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Run experts; ``weights`` is ``[T, top_k]``, ``experts`` ``[T * top_k]`` on the host."""
        order = experts.argsort()  # (row, expert) pairs sorted by expert
        counts = experts.bincount(minlength=self.group.count).tolist()
        both = upload_tensor(torch.cat((order // weights.shape[1], order.argsort())), rows.device)
        sources, places = both.chunk(2)
        return add_weighted(self.group.multiply(rows, sources, counts)[places], weights)

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + self.group.nbytes
