"""Attention of images' rows to their whole image (Gemma 3), combined with a causal backend."""

from collections.abc import Sequence

import torch

from molink.stage.attention.base import (
    AllocateTables,
    AttentionBackend,
    LayerAttention,
    StaticAttention,
)
from molink.stage.batch import SequenceRows


class WholeImageAttention:
    """Uses ``causal`` for steps without rows of images, ``masked`` for steps with some.

    The latter are few steps of a prompt, so no kernel supports their mask.
    """

    def __init__(self, causal: AttentionBackend, masked: AttentionBackend) -> None:
        self._causal, self._masked = causal, masked

    @property
    def reads_pages(self) -> bool:
        """See :class:`~molink.stage.attention.base.AttentionBackend`."""
        return self._causal.reads_pages

    @property
    def reads_unwritten(self) -> bool:
        """See :class:`~molink.stage.attention.base.AttentionBackend`."""
        return self._causal.reads_unwritten or self._masked.reads_unwritten

    @property
    def spans_context(self) -> bool:
        """See :class:`~molink.stage.attention.base.AttentionBackend`."""
        return self._causal.spans_context

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        """See :class:`~molink.stage.attention.base.AttentionBackend`."""
        sees = any(
            span.start < sequence.end and sequence.start < span.end
            for sequence in sequences
            for span in sequence.images
        )
        backend = self._masked if sees else self._causal
        return backend.prepare_layers(sequences, block_size, dtype, device)

    def prepare_static(
        self,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate_tables: AllocateTables,
    ) -> StaticAttention:
        """Prepare the causal backend, since decode steps have no rows of images."""
        return self._causal.prepare_static(rows, blocks, block_size, dtype, allocate_tables)
