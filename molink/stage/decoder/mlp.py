"""The gated MLP of a layer.

The MLP of a layer with experts: each row goes through the few that its router prefers.

Rows are sorted by expert, so that each expert in use multiplies all its rows at once; those that
no row chose are not touched. Sums are taken in a fixed order, never by atomic additions, so a row's
result doesn't depend on which rows are computed with it, up to rounding in the projections.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from molink.checkpoint.traits import SWIGLU_ALPHA, Activation
from molink.stage.device_copy import download_tensors, upload_tensor
from molink.stage.linear import Projection

#: What ``down`` may be given in float16: a thousand weights of about 1 don't add up to infinity.
_MAX_FLOAT16_INPUT = 64.0
#: ``act(gate) * up`` of rows ``[T, 2n]``: gate, then up, or as the activation has them.
GateFunction = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


def create_gate(activation: Activation, limit: float = 0.0) -> GateFunction:
    """A gate by torch's operators, on every device; ``limit`` is for ``clamped_swiglu``."""
    if activation == "clamped_swiglu":
        return partial(_clamped_swiglu, limit=limit)
    activate = _ACTIVATIONS[activation]

    def gate(rows: Tensor) -> Tensor:
        active, up = rows.chunk(2, dim=-1)
        return activate(active).mul_(up)

    return gate


def _clamped_swiglu(rows: Tensor, limit: float) -> Tensor:
    """In place, as far as it goes: nobody else has the rows."""
    active, up = rows[..., 0::2].clamp_(max=limit), rows[..., 1::2].clamp_(-limit, limit)
    return (active * SWIGLU_ALPHA).sigmoid_().mul_(active).mul_(up.add_(1))


class Mlp(Protocol):
    """What a layer does with each row on its own."""

    @property
    def capturable(self) -> bool:
        """Whether it does the same work whatever the rows are, as a CUDA graph has to."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows ``[T, hidden]`` → new rows ``[T, hidden]`` that belong to the caller."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """``down(act(gate) * up)``; gate and up are one projection.

    Where it is ``scales_down``, rows of float16 come out in float32: products of a model that was
    trained in bf16 need not fit float16, so each row is brought down to what does before ``down``,
    and what comes out is brought up again. Not with a bias in ``down``.
    """

    capturable: ClassVar[bool] = True

    gate_up: Projection
    down: Projection
    gate: GateFunction
    scales_down: bool = False

    def __call__(self, rows: Tensor) -> Tensor:
        if not self.scales_down:
            return self.down(self.gate(self.gate_up(rows)))
        gated = self.gate(self.gate_up(rows).float())
        factors = gated.abs().amax(-1, keepdim=True).div_(_MAX_FLOAT16_INPUT).clamp_min_(1.0)
        return self.down(gated.div_(factors).to(rows.dtype)).float().mul_(factors)

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


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
        return self.router.nbytes + sum(expert.nbytes for expert in self.experts)


@dataclass(frozen=True, slots=True)
class SharedExpertMlp:
    """Experts that are ``routed``, and a ``shared`` one, weighted by the sigmoid of a gate."""

    capturable: ClassVar[bool] = False

    routed: ExpertMlp
    shared: Mlp
    gate: Projection

    def __call__(self, rows: Tensor) -> Tensor:
        result = self.shared(rows).mul_(self.gate(rows).sigmoid_())
        return result.add_(self.routed(rows))

    @property
    def nbytes(self) -> int:
        return self.routed.nbytes + self.shared.nbytes + self.gate.nbytes
