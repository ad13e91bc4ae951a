"""Experts that a router chooses, where they aren't multiplied by a GPU's kernels.

Rows are sorted by expert, so that each chosen expert multiplies all its rows at once. Sums have a
fixed order, never atomic additions, so a row's result doesn't depend on other rows in the batch, up
to rounding in the projections.
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
    """Experts with quantized weights of one format, which a CPU multiplies all at once."""

    gate_up: BlockExperts
    down: BlockExperts
    gate: GateFunction

    @classmethod
    def from_experts(cls, experts: Sequence[Mlp]) -> "BlockExpertGroup | None":
        """Combine experts, if they are such ones."""
        found = [one for one in experts if isinstance(one, GatedMlp) and one.bounded_gate is None]
        if len(found) < len(experts):
            return None
        gate_up = BlockExperts.from_projections([one.gate_up for one in found])
        down = BlockExperts.from_projections([one.down for one in found])
        return None if gate_up is None or down is None else cls(gate_up, down, found[0].gate)

    def run_segments(self, rows: Tensor, segments: Segments) -> Tensor:
        """Run each segment of rows ``[T, hidden]`` through its expert; returns ``[P, hidden]``."""
        gated = self.gate(self.gate_up(rows, segments))
        return self.down(gated, replace(segments, shares_rows=False))

    @property
    def max_segment_rows(self) -> int:
        """See :class:`~molink.stage.linear.BlockExperts`."""
        return min(self.gate_up.max_segment_rows, self.down.max_segment_rows)


@dataclass(slots=True)
class ExpertList:
    """Experts that run one after the other, or all at once where a CPU can."""

    experts: list[Mlp]
    _blocks: BlockExpertGroup | None = field(init=False)

    def __post_init__(self) -> None:
        self._blocks = BlockExpertGroup.from_experts(self.experts)

    @property
    def count(self) -> int:
        return len(self.experts)

    @property
    def runs_at_once(self) -> bool:
        """Whether a call multiplies by the weights of several experts."""
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
        """Run ``rows[sources]``, sorted by expert, of which the first ``counts[0]`` are expert 0's.

        ``rows`` ``[T, hidden]`` and ``sources`` (int64 ``[P]``) are on the device; returns ``[P,
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
        """Replace an expert by the only one of ``group``."""
        assert isinstance(group, ExpertList), "experts of a device have one form"
        self.replace_expert(slot, *group.experts)

    def replace_expert(self, slot: int, expert: Mlp) -> None:
        """Replace an expert."""
        self.experts[slot] = expert
        self._blocks = BlockExpertGroup.from_experts(self.experts)

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)


def add_weighted(products: Tensor, weights: Tensor) -> Tensor:
    """Add ``products [T * top_k, n]`` of each row, times ``weights [T, top_k]``, in place."""
    return products.view(*weights.shape, -1).mul_(weights.unsqueeze(-1)).sum(1)


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """Experts that a router chooses and weighs.

    Of the formats and devices that :mod:`molink.stage.decoder.grouped_experts` lacks.
    """

    #: Each forward reads the chosen experts back from the device.
    capturable: ClassVar[bool] = False

    router: ExpertRouter
    group: ExpertList

    def __call__(self, rows: Tensor) -> Tensor:
        weights, experts = self.router.choose(rows)
        rows, weights = self.router.scale_rows(rows, weights.to(rows.dtype))
        # The only wait for the device: the host runs the chosen experts.
        (chosen,) = download_tensors([experts])
        if len(rows) == 1:
            return add_weighted(self.group.run_row(rows, chosen[0]), weights)
        return self._run_experts(rows, weights, chosen.flatten())

    def _run_experts(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """``weights`` are ``[T, top_k]``, ``experts`` ``[T * top_k]`` on the host."""
        order = experts.argsort()  # (row, expert) pairs sorted by expert
        counts = experts.bincount(minlength=self.group.count).tolist()
        both = upload_tensor(torch.cat((order // weights.shape[1], order.argsort())), rows.device)
        sources, places = both.chunk(2)
        return add_weighted(self.group.multiply(rows, sources, counts)[places], weights)

    @property
    def nbytes(self) -> int:
        return self.router.nbytes + self.group.nbytes
