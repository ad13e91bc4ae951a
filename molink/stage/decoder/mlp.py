"""The gated MLP of a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from torch import Tensor
from torch.nn.functional import gelu, silu

from molink.checkpoint.traits import SWIGLU_ALPHA, Activation
from molink.stage.linear import Projection

#: ``act(gate) * up`` of rows ``[T, 2n]``: gate, then up, or as the activation has them.
Gate = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


def create_gate(activation: Activation, limit: float = 0.0) -> Gate:
    """A gate by torch's operators, on every device; ``limit`` is for ``clamped_swiglu``."""
    if activation == "clamped_swiglu":
        return partial(_clamped, limit=limit)
    activate = _ACTIVATIONS[activation]

    def gate(rows: Tensor) -> Tensor:
        active, up = rows.chunk(2, dim=-1)
        return activate(active).mul_(up)

    return gate


def _clamped(rows: Tensor, limit: float) -> Tensor:
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
    """``down(act(gate) * up)``; gate and up are one projection."""

    capturable: ClassVar[bool] = True

    gate_up: Projection
    down: Projection
    gate: Gate

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`Mlp`."""
        return self.down(self.gate(self.gate_up(rows)))

    @property
    def nbytes(self) -> int:
        """See :class:`Mlp`."""
        return self.gate_up.nbytes + self.down.nbytes
