"""The gated MLP of a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from torch import Tensor
from torch.nn.functional import gelu, silu

from molink.model.traits import Activation
from molink.stage.linear import Projection

#: Elementwise; may work in place, on what is a part of something larger.
Activate = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[Activation, Activate] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


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
    activate: Activate

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`Mlp`."""
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return self.down(self.activate(gate).mul_(up))

    @property
    def nbytes(self) -> int:
        """See :class:`Mlp`."""
        return self.gate_up.nbytes + self.down.nbytes
