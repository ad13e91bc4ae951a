"""What mixes a layer's rows: attention, or a recurrent state."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from molink.stage.attention.base import LayerAttention
from molink.stage.kv_pool import KVPool
from molink.stage.state_pool import StatePool, StateRows


@dataclass(frozen=True, slots=True)
class StateContext:
    """The states of a forward's requests, and which rows have which."""

    pool: StatePool
    rows: StateRows


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs that all layers of a forward share.

    ``slots`` (int64 ``[T]``) are the rows' KV slots; ``angles`` are their rotations ``[T, 1, 2,
    rotary_dim]`` for each of the model's ropes. ``states`` are those of recurrent layers.
    """

    pool: KVPool
    slots: Tensor
    angles: tuple[Tensor, ...]
    attention: LayerAttention
    states: StateContext | None = None


class Mixer(Protocol):
    """The part of a layer before its MLP."""

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """Return what is added to the rows; ``normed`` (``[T, hidden]``) are these after their
        norm."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture it."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

    def with_index(self, index: int) -> "Mixer":
        """The same weights as layer ``index`` of the KV pool, or of the pool of states."""
