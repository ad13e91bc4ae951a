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
from molink.stage.state_pool import RowRounds, StatePool, StateRows


@dataclass(frozen=True, slots=True)
class StateContext:
    """The states of a forward's requests, and the rows of each."""

    pool: StatePool
    rows: StateRows

    def keep_inputs(self, index: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Store the inputs of drafts, and append those of the rows that are repeated.

        ``index`` is the layer's index in the state pool; ``inputs`` are tensors ``[T, …]`` with its
        ``input_size`` columns together, the results ``[T + R, …]``.
        """
        kept, rows = self.pool.draft_inputs[index], self.rows
        sizes = [each.shape[1] for each in inputs]
        if len(rows.repeated_places):
            repeated = torch.split(kept.index_select(0, rows.repeated_places), sizes, dim=1)
            inputs = tuple(
                torch.cat((own, again.to(own.dtype)))
                for own, again in zip(inputs, repeated, strict=True)
            )
        if len(rows.draft_rows):
            drafts = [each.index_select(0, rows.draft_rows).float() for each in inputs]
            kept.index_copy_(0, rows.draft_places, torch.cat(drafts, dim=1))
        return inputs

    def apply_rows(
        self,
        kept: Tensor,
        parts: Sequence[Tensor],
        result: Tensor,
        update: Callable[..., Tensor],
        run: Callable[..., Tensor],
    ) -> Tensor:
        """Apply rows to ``kept``, all slots of a layer; write what is read to ``result`` (``[T +
        R, …]``), and return it.

        ``parts`` are tensors ``[T + R, …]``. ``update`` takes states ``[B, …]``, which it changes
        in place, and the parts of one row for each. ``run`` takes one state and the parts of
        consecutive rows.
        """
        rows = self.rows
        _run_rounds(kept, rows.certain, parts, result, update, keeps=True)
        for first, count, slot in rows.chunks:
            chunk = (part[first : first + count] for part in parts)
            result[first : first + count] = run(kept[slot], *chunk)
        _run_rounds(kept, rows.drafts, parts, result, update, keeps=False)
        return result


def _run_rounds(
    kept: Tensor,
    rows: RowRounds,
    parts: Sequence[Tensor],
    result: Tensor,
    update: Callable[..., Tensor],
    *,
    keeps: bool,
) -> None:
    """Apply rows one after another, to copies of the states unless it ``keeps`` them."""
    if not rows.rounds:
        return
    if rows.sole_slot is None:
        used = kept.index_select(0, rows.slots)
    else:
        used = kept[rows.sole_slot : rows.sole_slot + 1]
        used = used if keeps else used.clone()
    for indices in rows.rounds:
        chosen = (part.index_select(0, indices) for part in parts)
        result.index_copy_(0, indices, update(used[: len(indices)], *chosen))
    if keeps and rows.sole_slot is None:
        kept.index_copy_(0, rows.slots, used)


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
