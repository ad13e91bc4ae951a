"""Attention of layers with different heads, through one backend per kind of heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.errors import InvariantError
from molink.stage.attention.base import (
    AllocateTables,
    AttentionBackend,
    LayerAttention,
    StaticAttention,
)
from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class _MixedLayers:
    """Attention of one forward: dispatches each layer to its part, under its index there."""

    parts: tuple[LayerAttention, ...]
    places: tuple[tuple[int, int], ...]

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        part, index = self.places[layer]
        return self.parts[part](index, heads, pool, sinks)


class MixedAttention:
    """Backends ``parts``; ``places`` is as in :class:`~molink.stage.mixed_kv_pool.MixedKVPool`.

    Each layer gets its part of that pool.
    """

    def __init__(
        self, parts: Sequence[AttentionBackend], places: Sequence[tuple[int, int]]
    ) -> None:
        self._parts, self._places = tuple(parts), tuple(places)

    @property
    def reads_pages(self) -> bool:
        """See :class:`~molink.stage.attention.base.AttentionBackend`."""
        return all(part.reads_pages for part in self._parts)

    @property
    def reads_unwritten(self) -> bool:
        """See :class:`~molink.stage.attention.base.AttentionBackend`."""
        return any(part.reads_unwritten for part in self._parts)

    @property
    def spans_context(self) -> bool:
        """See :class:`~molink.stage.attention.base.AttentionBackend`."""
        return all(part.spans_context for part in self._parts)

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        prepared = (
            part.prepare_layers(sequences, block_size, dtype, device) for part in self._parts
        )
        return _MixedLayers(tuple(prepared), self._places)

    def prepare_static(
        self,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate_tables: AllocateTables,
    ) -> StaticAttention:
        """Return ``None``: layers with different heads are not captured."""
        raise InvariantError("layers whose heads differ have no static attention")
