"""Attention as ``gather`` has it, but by plain products and a softmax instead of a fused kernel.

For devices on which torch's fused ones are wrong. It keeps all scores of a call in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from molink.stage.attention.base import AttentionShape, LayerAttention, StaticAttention
from molink.stage.attention.gather import GatherAttention
from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class _PlainLayers:
    inner: LayerAttention

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner(layer, heads, pool, sinks)


@dataclass(frozen=True, slots=True)
class _StaticPlain:
    inner: StaticAttention

    def load_tables(self, sequences: Sequence[SequenceRows]) -> None:
        self.inner.load_tables(sequences)

    def derive_masks(self) -> None:
        self.inner.derive_masks()

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner(layer, heads, pool, sinks)


class PlainAttention:
    """The ``plain`` backend."""

    __slots__ = ("_gather",)

    def __init__(self, shape: AttentionShape) -> None:
        self._gather = GatherAttention(shape)

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        """See :class:`~molink.stage.attention.base.AttentionBackend`."""
        return _PlainLayers(self._gather.prepare_layers(sequences, block_size, dtype, device))

    def prepare_static(
        self, rows: int, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> StaticAttention:
        """See :class:`~molink.stage.attention.base.AttentionBackend`."""
        return _StaticPlain(self._gather.prepare_static(rows, blocks, block_size, dtype, device))
