"""The gated MLP of a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from torch import Tensor
from torch.nn.functional import gelu, silu

from molink.checkpoint.traits import SWIGLU_ALPHA, Activation
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
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows ``[T, hidden]`` → new rows ``[T, hidden]`` that belong to the caller."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        ...


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
        """See :class:`Mlp`."""
        if not self.scales_down:
            return self.down(self.gate(self.gate_up(rows)))
        gated = self.gate(self.gate_up(rows).float())
        factors = gated.abs().amax(-1, keepdim=True).div_(_MAX_FLOAT16_INPUT).clamp_min_(1.0)
        return self.down(gated.div_(factors).to(rows.dtype)).float().mul_(factors)

    @property
    def nbytes(self) -> int:
        """See :class:`Mlp`."""
        return self.gate_up.nbytes + self.down.nbytes
