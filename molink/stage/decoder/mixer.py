"""A layer's mixer: the part in which rows depend on earlier rows, through attention or a state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from molink.errors import InvariantError
from molink.stage.attention.base import ChoosingAttention, LayerAttention
from molink.stage.linear import AdapterRows
from molink.stage.mixed_kv_pool import AnyKVPool
from molink.stage.state_pool import StatePool, StateRows


@dataclass(frozen=True, slots=True)
class StateContext:
    """The states of a forward's requests, and the rows of each."""

    pool: StatePool
    rows: StateRows

    def apply_rows(
        self,
        index: int,
        parts: Sequence[Tensor],
        update: Callable[..., Tensor],
        run: Callable[..., Tensor],
    ) -> Tensor:
        """Apply rows to the memories of layer ``index`` in the pool; return the values read.

        ``parts`` are tensors ``[T, heads, …]``; the third has the values and the result's shape.
        ``update`` takes memories ``[B, heads, …]``, which it changes in place, and the parts of one
        row for each. ``run`` takes one memory and the parts of consecutive rows.
        """
        memories, rows = self.pool.memories[index], self.rows
        result = torch.empty_like(parts[2])
        if len(rows.single_rows):
            chosen = (part.index_select(0, rows.single_rows) for part in parts)
            if rows.sole_slot is None:
                used = memories.index_select(0, rows.single_slots)
                result.index_copy_(0, rows.single_rows, update(used, *chosen))
                memories.index_copy_(0, rows.single_slots, used)
            else:
                used = memories[rows.sole_slot : rows.sole_slot + 1]
                result.index_copy_(0, rows.single_rows, update(used, *chosen))
        for first, count, slot in rows.chunks:
            chunk = (part[first : first + count] for part in parts)
            result[first : first + count] = run(memories[slot], *chunk)
        return result


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs that all layers of a forward share.

    ``slots`` (int64 ``[T]``) are the rows' KV slots; ``angles`` are their rotations ``[T, 1, 2,
    rotary_dim]`` for each of the model's ropes, followed by the queries' factors ``[T, 1, 1]``, if
    any. ``states`` belongs to recurrent layers; ``adapters`` maps adapters to their rows.
    """

    pool: AnyKVPool
    slots: Tensor
    angles: tuple[Tensor, ...]
    attention: LayerAttention
    states: StateContext | None = None
    adapters: AdapterRows | None = None

    def require_choosing(self) -> ChoosingAttention:
        """Return the backend, which must support attention to selected positions.

        Raises: InvariantError: it does not.
        """
        if not isinstance(self.attention, ChoosingAttention):
            raise InvariantError("an attention backend can't attend to chosen positions")
        return self.attention

    def require_states(self) -> StateContext:
        """Return the states of recurrent layers.

        Raises: InvariantError: the forward has none.
        """
        if self.states is None:
            raise InvariantError("a recurrent layer got no states")
        return self.states


class Mixer(Protocol):
    """The part of a layer before its MLP."""

    def __call__(self, normed: Tensor, context: ForwardContext) -> Tensor:
        """Return the mixer's output, which is added to the residual.

        ``normed`` are the rows ``[T, hidden]`` after the layer's first norm.
        """

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture it."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""

    def with_index(self, index: int) -> "Mixer":
        """Return the same weights for layer ``index`` of the KV pool or of the state pool."""


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    """A mixer with a state per request, in layer ``index`` of the state pool."""

    #: Not capturable: each step gathers states by slot numbers from the host.
    capturable: ClassVar[bool] = False

    index: int

    def with_index(self, index: int) -> Self:
        """See :class:`Mixer`."""
        return replace(self, index=index)
