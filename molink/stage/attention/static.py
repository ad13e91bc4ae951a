"""Decode steps of one shape over gathered blocks: the same memory at every step, as graphs need."""

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from molink.stage.attention.base import AttentionShape
from molink.stage.attention.spans import Span, effective_windows
from molink.stage.attention.work_groups import DecodeBucket
from molink.stage.batch import SequenceRows
from molink.stage.device_copy import upload_into
from molink.stage.kv_pool import KVPool


def static_width(window: int, blocks: int, block_size: int) -> int:
    """How many blocks a row reads at most in layers with ``window``, 0 being none."""
    return min(blocks, -(-(window - 1) // block_size) + 1) if window else blocks


class _StaticTable:
    """Blocks and mask of the layers of one window."""

    __slots__ = ("_block_size", "_numbers", "_positions", "_rows", "_width", "_window", "bucket")

    def __init__(
        self,
        window: int,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._window, self._rows, self._block_size = window, rows, block_size
        self._width = width = static_width(window, blocks, block_size)
        self._numbers = torch.zeros(rows * (width + 2), dtype=torch.int64, device=device)
        self._positions = torch.arange(width * block_size, device=device)
        mask = torch.zeros(rows, 1, 1, width * block_size, dtype=dtype, device=device)
        ids = self._numbers[: rows * width]
        self.bucket = DecodeBucket(slice(0, rows), rows, ids, None, slice(0, 0), mask)

    def load_tables(self, sequences: Sequence[SequenceRows]) -> None:
        ids, begins, ends = array("q"), array("q"), array("q")
        for row, sequence in enumerate(sequences):
            span = Span.from_sequence(row, sequence, self._window, self._block_size)
            ids.extend(span.blocks)
            # Padding repeats a block of the same request, as everywhere.
            ids.extend([span.blocks[0]] * (self._width - len(span.blocks)))
            begins.append(span.begin)
            ends.append(span.end)
        upload_into(self._numbers, torch.frombuffer(ids + begins + ends, dtype=torch.int64))

    def derive_masks(self) -> None:
        first, last = self._numbers[self._rows * self._width :].view(2, -1, 1, 1, 1)
        hidden = (self._positions >= last) | (self._positions < first)
        assert self.bucket.mask is not None
        self.bucket.mask.zero_().masked_fill_(hidden, -math.inf)


class StaticGather:
    """See :class:`~molink.stage.attention.base.StaticAttention`."""

    __slots__ = ("_layers", "_shape", "_tables")

    def __init__(
        self,
        shape: AttentionShape,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = shape
        windows = effective_windows(shape.windows, blocks * block_size)
        self._tables = {
            window: _StaticTable(window, rows, blocks, block_size, dtype, device)
            for window in dict.fromkeys(windows)
        }
        self._layers = tuple(self._tables[window].bucket for window in windows)

    def load_tables(self, sequences: Sequence[SequenceRows]) -> None:
        """See :class:`~molink.stage.attention.base.StaticAttention`."""
        for table in self._tables.values():
            table.load_tables(sequences)

    def derive_masks(self) -> None:
        """See :class:`~molink.stage.attention.base.StaticAttention`."""
        for table in self._tables.values():
            table.derive_masks()

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        """See :class:`~molink.stage.attention.base.LayerAttention`."""
        return self._layers[layer].attend_rows(layer, heads, pool, self._shape, sinks)
