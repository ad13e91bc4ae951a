"""The MLP of a layer, alone or parallel to experts (:mod:`molink.stage.decoder.expert_mlp`)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from molink.checkpoint.traits import SWIGLU_ALPHA, Activation
from molink.stage.linear import AdapterRows, Projection, apply_projection

#: Maximum float16 input of ``down``, so that sums of a thousand terms don't overflow.
MAX_FLOAT16_INPUT = 64.0
#: Computes ``act(gate) * up`` of rows ``[T, 2n]``, with gate before up, or interleaved for some
#: activations. Without gates, computes ``act(up)`` of rows ``[T, n]``.
GateFunction = Callable[[Tensor], Tensor]
#: A gate for float16 rows that computes in float32 and divides each row by a factor so that no
#: magnitude exceeds ``MAX_FLOAT16_INPUT``. Returns the rows and the factors (float32 ``[T, 1]``, at
#: least 1).
BoundedGate = Callable[[Tensor], tuple[Tensor, Tensor]]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


def create_gate(activation: Activation, limit: float = 0.0) -> GateFunction:
    """Create a gate of torch operators; ``limit`` is the number that bounds ``clamped_swiglu``."""
    if activation == "clamped_swiglu":
        return partial(_clamped_swiglu, limit=limit)
    if activation == "relu2":
        return lambda rows: relu(rows).square_()
    activate = _ACTIVATIONS[activation]

    def gate(rows: Tensor) -> Tensor:
        active, up = rows.chunk(2, dim=-1)
        return activate(active).mul_(up)

    return gate


def apply_bounded(gate: GateFunction, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Apply ``gate`` to rows ``[T, 2n]`` as a :data:`BoundedGate` of torch operators."""
    return _bound_rows(gate(rows.float()), rows.dtype)


def _bound_rows(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bound float32 rows in place as a :data:`BoundedGate` does; return them and the factors."""
    factors = wide.abs().amax(-1, keepdim=True).div_(MAX_FLOAT16_INPUT).clamp_min_(1.0)
    return wide.div_(factors).to(dtype), factors


def _clamped_swiglu(rows: Tensor, limit: float) -> Tensor:
    """Compute in place, since the rows have no other user."""
    active, up = rows[..., 0::2].clamp_(max=limit), rows[..., 1::2].clamp_(-limit, limit)
    return (active * SWIGLU_ALPHA).sigmoid_().mul_(active).mul_(up.add_(1))


class Mlp(Protocol):
    """A layer's MLP."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture it."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Map rows ``[T, hidden]`` to new rows ``[T, hidden]``."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """``down(act(gate) * up)``; gate and up are one projection.

    With ``bounded_gate``, float16 rows return as float32: products of models trained in bf16 may
    overflow float16, so each row is scaled down before ``down`` and back up afterwards.
    Incompatible with a bias in ``down``.
    """

    capturable: ClassVar[bool] = True

    gate_up: Projection
    down: Projection
    gate: GateFunction
    bounded_gate: BoundedGate | None = None

    def __call__(self, rows: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        both = apply_projection(self.gate_up, rows, adapters)
        if self.bounded_gate is None:
            return apply_projection(self.down, self.gate(both), adapters)
        gated, factors = self.bounded_gate(both)
        return apply_projection(self.down, gated, adapters) * factors

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


def run_mlp(mlp: Mlp, rows: Tensor, adapters: AdapterRows | None) -> Tensor:
    """Run rows ``[T, hidden]`` through an MLP; some rows may have adapters.

    Experts have no adapters.
    """
    return mlp(rows, adapters) if isinstance(mlp, GatedMlp) else mlp(rows)


@dataclass(frozen=True, slots=True)
class LatentExpertMlp:
    """Routed experts that work on latents (Nemotron 3 Super); ``output`` maps latents to rows."""

    routed: Mlp
    output: Projection

    def __call__(self, rows: Tensor) -> Tensor:
        latents = self.routed(rows)
        if latents.dtype is rows.dtype:
            return self.output(latents)
        # With float16 rows, the latents are float32, and so are the results.
        bounded, factors = _bound_rows(latents, rows.dtype)
        return self.output(bounded) * factors

    @property
    def capturable(self) -> bool:
        return self.routed.capturable

    @property
    def nbytes(self) -> int:
        return self.routed.nbytes + self.output.nbytes


@dataclass(frozen=True, slots=True)
class SharedExpertMlp:
    """Routed experts plus a ``shared`` one, weighted by the sigmoid of its ``gate``, if any."""

    routed: Mlp
    shared: Mlp
    gate: Projection | None

    def __call__(self, rows: Tensor) -> Tensor:
        return self.run_shared(rows).add_(self.routed(rows))

    def run_shared(self, rows: Tensor) -> Tensor:
        """Run rows ``[T, hidden]`` through the shared expert alone."""
        result = self.shared(rows)
        return result if self.gate is None else result.mul_(self.gate(rows).sigmoid_())

    @property
    def capturable(self) -> bool:
        return self.routed.capturable and self.shared.capturable

    @property
    def nbytes(self) -> int:
        return self.routed.nbytes + self.shared.nbytes + (self.gate.nbytes if self.gate else 0)
