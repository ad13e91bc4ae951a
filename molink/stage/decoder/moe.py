"""The MLP of a layer with experts: each row goes through the few that its router prefers.

Rows are sorted by expert, so that each expert in use multiplies all its rows at once; those that
no row chose are not touched. Sums are taken in a fixed order, never by atomic additions, so a row's
result doesn't depend on which rows are computed with it, up to rounding in the projections.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from molink.stage.decoder.mlp import Mlp
from molink.stage.device_copy import download_tensors, upload_tensor
from molink.stage.linear import Projection


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """A router and its experts; the ``top_k`` best have a say, weighted by their probability.

    With ``renormalize`` the weights of a row sum to 1.
    """

    #: Which experts run is read back from the device in each forward.
    capturable: ClassVar[bool] = False

    router: Projection
    experts: tuple[Mlp, ...]
    top_k: int
    renormalize: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`~molink.stage.decoder.mlp.Mlp`."""
        weights, experts = self._route_rows(rows)
        # All that a GPU is waited for: which experts are run is up to the host.
        (chosen,) = download_tensors([experts])
        if len(rows) == 1:
            results = [self.experts[expert](rows) for expert in chosen[0].tolist()]
            return torch.cat(results).mul_(weights.view(-1, 1)).sum(0, keepdim=True)
        return self._run_experts(rows, weights, chosen.flatten())

    def _route_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (in the rows' type) and indices of each row's experts, both ``[T, chosen]``."""
        rated = self.router(rows).softmax(dim=-1, dtype=torch.float32)
        weights, experts = rated.topk(self.top_k, dim=-1)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(rows.dtype), experts

    def _run_experts(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """``experts`` ``[T * chosen]`` are on the host."""
        order = experts.argsort()  # pairs of a row and an expert, by expert
        counts = experts.bincount(minlength=len(self.experts)).tolist()
        both = upload_tensor(torch.cat((order // self.top_k, order.argsort())), rows.device)
        sources, places = both.chunk(2)
        results: list[Tensor] = []
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                results.append(expert(rows[sources[first : first + count]]))
                first += count
        shaped = torch.cat(results)[places].view(len(rows), self.top_k, -1)
        return shaped.mul_(weights.unsqueeze(-1)).sum(1)

    @property
    def nbytes(self) -> int:
        """See :class:`~molink.stage.decoder.mlp.Mlp`."""
        return self.router.nbytes + sum(expert.nbytes for expert in self.experts)


@dataclass(frozen=True, slots=True)
class SharedExpertMlp:
    """Experts that are ``routed``, and a ``shared`` one, weighted by the sigmoid of a gate."""

    capturable: ClassVar[bool] = False

    routed: ExpertMlp
    shared: Mlp
    gate: Projection

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`~molink.stage.decoder.mlp.Mlp`."""
        result = self.shared(rows).mul_(self.gate(rows).sigmoid_())
        return result.add_(self.routed(rows))

    @property
    def nbytes(self) -> int:
        """See :class:`~molink.stage.decoder.mlp.Mlp`."""
        return self.routed.nbytes + self.shared.nbytes + self.gate.nbytes
