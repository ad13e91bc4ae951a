"""Attention as ``gather`` has it, but by plain products and a softmax instead of a fused kernel.

For devices on which torch's fused ones are wrong. It keeps all scores of a call in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from molink.stage.attention.base import AttentionShape, FixedAttention, LayerAttention
from molink.stage.attention.gather import GatherAttention
from molink.stage.batch import SequenceRows
from molink.stage.pool import KVPool


@dataclass(frozen=True, slots=True)
class _PlainLayers:
    inner: LayerAttention

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner(layer, heads, pool, sinks)


@dataclass(frozen=True, slots=True)
class _FixedPlain:
    inner: FixedAttention

    def load(self, sequences: Sequence[SequenceRows]) -> None:
        self.inner.load(sequences)

    def derive(self) -> None:
        self.inner.derive()

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

    def prepare(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        """See :class:`~molink.stage.attention.base.Attention`."""
        return _PlainLayers(self._gather.prepare(sequences, block_size, dtype, device))

    def fix(
        self, rows: int, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> FixedAttention:
        """See :class:`~molink.stage.attention.base.Attention`."""
        return _FixedPlain(self._gather.fix(rows, blocks, block_size, dtype, device))
