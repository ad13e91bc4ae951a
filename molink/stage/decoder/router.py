"""Chooses the experts of rows and their weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from molink.checkpoint.experts import Routing
from molink.stage.decoder.norm import Norm
from molink.stage.gpu_kernels.expert_product import choose_experts
from molink.stage.linear import Projection


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """A projection to experts' logits, and the rules to choose experts by them.

    ``correction`` is float32 ``[experts]``. If ``is_wide``, the projection computes in float32. An
    ``entry`` maps rows to the experts' inputs. The router may have its own ``norm``, and
    ``expert_scales`` (float32 ``[experts]``) that multiply the weights.
    """

    projection: Projection
    routing: Routing
    correction: Tensor | None = None
    is_wide: bool = False
    entry: Projection | None = None
    norm: Norm | None = None
    expert_scales: Tensor | None = None

    def compute_logits(self, rows: Tensor) -> Tensor:
        """Return logits ``[T, experts]`` of rows ``[T, hidden]``."""
        rows = rows if self.norm is None else self.norm(rows)
        return self.projection(rows.float() if self.is_wide else rows)

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (float32) and experts (int64) of rows, both ``[T, top_k]``."""
        return self._scale_weights(*self._choose(rows))

    def _choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        routing, logits = self.routing, self.compute_logits(rows)
        if routing.scoring == "sparsemixer":
            return _choose_in_turn(logits.float(), routing)
        if routing.scoring == "sigmoid":
            scores = logits.float().sigmoid()
        else:
            scores = logits.softmax(dim=-1, dtype=torch.float32)
        rated = scores if self.correction is None else scores + self.correction
        if routing.groups > 1:
            rated = _keep_best_groups(rated, routing)
        weights, experts = rated.topk(routing.top_k, dim=-1)
        if rated is not scores:
            weights = scores.gather(-1, experts)
        if routing.renormalize:
            sums = weights.sum(-1, keepdim=True)
            weights = weights / (sums.clamp_min_(routing.min_sum) if routing.min_sum else sums)
        return (weights if routing.scale == 1.0 else weights * routing.scale), experts

    def scale_rows(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts' input rows, and the factors of their outputs ``[T, top_k]``."""
        rows = rows if self.entry is None else self.entry(rows)
        if not self.routing.scales_input:
            return rows, weights
        return rows * weights.to(rows.dtype), torch.ones_like(weights)

    def choose_on_gpu(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Choose as :meth:`choose`, in one kernel if it supports the scoring; experts are int32."""
        if self.routing.scoring == "sparsemixer":
            weights, experts = self.choose(rows)
            return weights, experts.int()
        chosen = choose_experts(self.compute_logits(rows), self.routing, self.correction)
        return self._scale_weights(*chosen)

    def _scale_weights(self, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        if self.expert_scales is None:
            return weights, experts
        return weights * self.expert_scales[experts.long()], experts

    @property
    def nbytes(self) -> int:
        parts = (self.projection, self.entry, self.norm, self.correction, self.expert_scales)
        return sum(part.nbytes for part in parts if part is not None)


def _choose_in_turn(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose experts one after the other by ``logits`` ``[T, experts]``; see :class:`.Routing`."""
    left, weights, experts = logits, [], []
    for _ in range(routing.top_k):
        best, expert = left.max(dim=-1, keepdim=True)
        distance = (best - logits) / logits.abs().maximum(best)
        near = left.masked_fill(distance > 2 * routing.jitter, -torch.inf)
        weights.append(near.softmax(dim=-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(experts, dim=-1)


def _keep_best_groups(rated: Tensor, routing: Routing) -> Tensor:
    """Set scores ``[T, experts]`` outside the best groups to minus infinity."""
    grouped = rated.view(len(rated), routing.groups, -1)
    sums = grouped.topk(routing.group_voters, dim=-1).values.sum(-1)
    best = sums.topk(routing.top_groups, dim=-1).indices
    left_out = torch.ones_like(sums, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
