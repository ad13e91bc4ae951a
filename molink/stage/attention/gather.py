"""Attention over blocks gathered into dense tensors: works on every device and dtype.

Decode rows run in buckets of similar length, padded to the longest. Query heads that share a KV
head are folded into the query length (a decode row is a query of length ``groups`` per KV head),
since SDPA's ``enable_gqa`` is six times slower on a CPU. A prefill chunk runs alone, against all
earlier positions and, causally, itself. Sliding-window layers read only blocks inside the window.

The ``static`` form uses fixed buffers for CUDA graphs. The ``plain`` backend replaces SDPA with
products and a softmax, for devices with wrong fused kernels; it materializes all scores of a call.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from molink.stage.attention.base import (
    AllocateTables,
    AttentionShape,
    LayerAttention,
    StaticAttention,
)
from molink.stage.attention.token_choice import TokenChoice
from molink.stage.attention.work_groups import (
    DecodeBucket,
    PrefillChunk,
    Span,
    WorkGroups,
    as_slice,
    block_ids,
    bucket_spans,
    effective_windows,
)
from molink.stage.batch import SequenceRows
from molink.stage.device_copy import upload_integers
from molink.stage.kv_pool import KVPool

#: Bytes of KV per decode bucket on a CPU, which should stay in cache.
_CPU_BUCKET_BYTES = 4 << 20
#: Maximum rows of a chunk for which folding groups is faster on a CPU.
_MAX_FOLDED_ROWS = 8
#: From this size on, the C library returns memory to the system, so that new pages fault.
_CPU_SCRATCH_BYTES = 16 << 20


class _GatherLayers:
    """Work groups of one forward, by layer."""

    def __init__(self, layers: tuple[WorkGroups, ...], shape: AttentionShape) -> None:
        self._layers, self._shape = layers, shape

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(layer, heads, pool, sinks, None)

    def attend_chosen(self, layer: int, heads: Tensor, pool: KVPool, choice: TokenChoice) -> Tensor:
        """Return rows ``[T, heads * head_dim]``; see :class:`.ChoosingAttention`."""
        return self._attend(layer, heads, pool, None, choice)

    def _attend(
        self,
        layer: int,
        heads: Tensor,
        pool: KVPool,
        sinks: Tensor | None,
        choice: TokenChoice | None,
    ) -> Tensor:
        shape, parts = self._shape, self._layers[layer]
        if len(parts) == 1:
            return parts[0].attend_rows(layer, heads, pool, shape, sinks, choice)
        attended = heads.new_empty(len(heads), shape.groups * shape.kv_heads * shape.head_dim)
        for part in parts:
            attended[part.rows] = part.attend_rows(layer, heads, pool, shape, sinks, choice)
        return attended


class GatherAttention:
    """The ``gather`` backend."""

    reads_pages, reads_unwritten, spans_context = False, True, False

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> _GatherLayers:
        longest = max(sequence.start + sequence.count for sequence in sequences)
        windows = effective_windows(self._shape.windows, longest)
        builder = _GroupBuilder(self._shape, block_size, dtype, device)
        parts = {window: builder.build_groups(sequences, window) for window in set(windows)}
        return _GatherLayers(tuple(parts[window] for window in windows), self._shape)

    def prepare_static(
        self,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate_tables: AllocateTables,
    ) -> "StaticGather":
        return StaticGather(self._shape, rows, blocks, block_size, dtype, allocate_tables)


class _GroupBuilder:
    """Builds the work groups of one forward."""

    def __init__(
        self, shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        #: Whether chunks need masks of their own.
        self._by_hand = bool(shape.softcap) or shape.sinks or shape.chooses
        #: Elements per position in the pool.
        self._position = shape.kv_kinds * shape.kv_heads * shape.head_dim
        self._block_size, self._dtype, self._device = block_size, dtype, device
        self._scratch: Tensor | None = None

    def build_groups(self, sequences: Sequence[SequenceRows], window: int) -> WorkGroups:
        """Build the groups of layers with ``window``."""
        decode: list[Span] = []
        parts: list[DecodeBucket | PrefillChunk] = []
        row = 0
        for sequence in sequences:
            first = first_position(self._shape, sequence, window)
            span = Span.from_sequence(row, sequence, first, self._block_size)
            if sequence.count == 1:
                decode.append(span)
            else:
                parts.append(self._prefill_chunk(span, sequence, window))
            row += sequence.count
        together = bucket_spans(decode, self._block_size, self._max_positions)
        parts += [self._decode_bucket(part) for part in together]
        return tuple(parts)

    @property
    def _max_positions(self) -> int:
        """Return the maximum positions of a decode bucket; unlimited on a GPU."""
        if self._device.type != "cpu":
            return 1 << 62
        return _CPU_BUCKET_BYTES // (self._position * self._dtype.itemsize)

    def _decode_bucket(self, spans: list[Span]) -> DecodeBucket:
        ids, rows = block_ids(spans), [span.row for span in spans]
        first, mask = spans[0], None
        if any((span.begin, span.end) != (first.begin, first.end) for span in spans):
            mask = self._decode_mask(spans, len(ids) // len(spans) * self._block_size)
        return DecodeBucket(
            rows=as_slice(rows) or upload_integers(rows, self._device),
            count=len(spans),
            blocks=as_slice(ids) or upload_integers(ids, self._device),
            scratch=self._make_scratch(ids),
            visible=slice(first.begin, first.end),
            mask=mask,
        )

    def _decode_mask(self, spans: list[Span], positions: int) -> Tensor:
        numbers = [span.begin for span in spans] + [span.end for span in spans]
        begins, ends = upload_integers(numbers, self._device).view(2, -1, 1, 1, 1)
        places = torch.arange(positions, device=self._device)
        hidden = (places >= ends) | (places < begins)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -math.inf)

    def _prefill_chunk(self, span: Span, sequence: SequenceRows, window: int) -> PrefillChunk:
        mask, whole = None, sequence.start == 0
        sees = self._shape.sees_whole_images(window) and bool(sequence.images)
        if not whole or self._by_hand or sees or (window and window < span.count):
            mask = self._chunk_mask(span, sequence, window)
        # All query groups share the positions that a row selects.
        can_fold = self._device.type == "cpu" and not self._shape.chooses
        folded = mask is not None and span.count <= _MAX_FOLDED_ROWS and can_fold
        if mask is not None and folded:
            mask = mask.repeat_interleave(self._shape.groups, 0)
        return PrefillChunk(
            rows=slice(span.row, span.row + span.count),
            count=span.count,
            blocks=None
            if whole
            else as_slice(span.blocks) or upload_integers(span.blocks, self._device),
            scratch=None if whole else self._make_scratch(span.blocks),
            visible=slice(span.begin, span.end),
            mask=mask,
            folds_groups=folded,
        )

    def _chunk_mask(self, span: Span, sequence: SequenceRows, window: int) -> Tensor:
        start, positions = sequence.start, span.end - span.begin
        before = positions - span.count
        shape = (span.count, positions)
        mask = torch.full(shape, -math.inf, dtype=self._dtype, device=self._device)
        mask.triu_(before + 1)
        if self._shape.sees_whole_images(window):
            for image in sequence.images:
                first, last = max(image.start, start), min(image.end, sequence.end)
                if first < last:
                    seen = slice(max(image.start - start, -before) + before, last - start + before)
                    mask[first - start : last - start, seen] = 0
        if window:
            rows = torch.arange(start, start + span.count, device=self._device).unsqueeze(1)
            places = torch.arange(start - before, start + span.count, device=self._device)
            mask.masked_fill_(places < self._shape.first_visible(rows, window), -math.inf)
        return mask

    def _make_scratch(self, ids: Sequence[int]) -> Tensor | None:
        """Allocate scratch for gathered blocks, shared by all layers."""
        size = len(ids) * self._block_size * self._position
        nbytes = size * self._dtype.itemsize
        if self._device.type != "cpu" or nbytes < _CPU_SCRATCH_BYTES or as_slice(ids) is not None:
            return None
        if self._scratch is None or len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=self._dtype)
        return self._scratch[:size]


def first_position(shape: AttentionShape, sequence: SequenceRows, window: int) -> int:
    """Return the first position that a sequence's rows see in layers with ``window`` (0 = none)."""
    return max(0, shape.first_visible(sequence.start, window)) if window else 0


def static_width(window: int, blocks: int, block_size: int) -> int:
    """Return the maximum blocks that a row reads in layers with ``window`` (0 = none)."""
    return min(blocks, -(-(window - 1) // block_size) + 1) if window else blocks


class _StaticTable:
    """Blocks and mask of layers with one window; ``numbers`` holds a step's."""

    def __init__(
        self,
        shape: AttentionShape,
        window: int,
        rows: int,
        width: int,
        block_size: int,
        dtype: torch.dtype,
        numbers: Tensor,
    ) -> None:
        self._shape, self._window = shape, window
        self._rows, self._block_size = rows, block_size
        self._width, self._numbers, device = width, numbers, numbers.device
        self._positions = torch.arange(width * block_size, device=device)
        mask = torch.zeros(rows, 1, 1, width * block_size, dtype=dtype, device=device)
        ids = self._numbers[: rows * width]
        self.bucket = DecodeBucket(slice(0, rows), rows, ids, None, slice(0, 0), mask)

    def pack_tables(self, sequences: Sequence[SequenceRows]) -> "array[int]":
        ids, begins, ends = array("i"), array("i"), array("i")
        for row, sequence in enumerate(sequences):
            first = first_position(self._shape, sequence, self._window)
            span = Span.from_sequence(row, sequence, first, self._block_size)
            ids.extend(span.blocks)
            # Padding repeats one of the request's blocks.
            ids.extend([span.blocks[0]] * (self._width - len(span.blocks)))
            begins.append(span.begin)
            ends.append(span.end)
        return ids + begins + ends

    def derive_masks(self) -> None:
        first, last = self._numbers[self._rows * self._width :].view(2, -1, 1, 1, 1)
        hidden = (self._positions >= last) | (self._positions < first)
        assert self.bucket.mask is not None
        self.bucket.mask.zero_().masked_fill_(hidden, -math.inf)


class StaticGather:
    """See :class:`~molink.stage.attention.base.StaticAttention`."""

    def __init__(
        self,
        shape: AttentionShape,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate_tables: AllocateTables,
    ) -> None:
        self._shape = shape
        windows = effective_windows(shape.windows, blocks * block_size)
        widths = {window: static_width(window, blocks, block_size) for window in windows}
        sizes = [rows * (width + 2) for width in widths.values()]
        parts = torch.split(allocate_tables(sum(sizes)), sizes)
        self._tables = {
            window: _StaticTable(shape, window, rows, width, block_size, dtype, part)
            for (window, width), part in zip(widths.items(), parts, strict=True)
        }
        self._layers = tuple(self._tables[window].bucket for window in windows)

    def pack_tables(self, sequences: Sequence[SequenceRows]) -> "array[int]":
        numbers = array("i")
        for table in self._tables.values():
            numbers += table.pack_tables(sequences)
        return numbers

    def derive_masks(self) -> None:
        for table in self._tables.values():
            table.derive_masks()

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        return self._layers[layer].attend_rows(layer, heads, pool, self._shape, sinks)

    def attend_chosen(self, layer: int, heads: Tensor, pool: KVPool, choice: TokenChoice) -> Tensor:
        """Return rows ``[T, heads * head_dim]``; see :class:`.ChoosingAttention`."""
        return self._layers[layer].attend_rows(layer, heads, pool, self._shape, None, choice)


@dataclass(frozen=True, slots=True)
class _PlainLayers:
    inner: _GatherLayers

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner(layer, heads, pool, sinks)

    def attend_chosen(self, layer: int, heads: Tensor, pool: KVPool, choice: TokenChoice) -> Tensor:
        """Return rows ``[T, heads * head_dim]``; see :class:`.ChoosingAttention`."""
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner.attend_chosen(layer, heads, pool, choice)


@dataclass(frozen=True, slots=True)
class _StaticPlain:
    inner: StaticGather

    def pack_tables(self, sequences: Sequence[SequenceRows]) -> "array[int]":
        return self.inner.pack_tables(sequences)

    def derive_masks(self) -> None:
        self.inner.derive_masks()

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner(layer, heads, pool, sinks)

    def attend_chosen(self, layer: int, heads: Tensor, pool: KVPool, choice: TokenChoice) -> Tensor:
        """Return rows ``[T, heads * head_dim]``; see :class:`.ChoosingAttention`."""
        with sdpa_kernel(SDPBackend.MATH):
            return self.inner.attend_chosen(layer, heads, pool, choice)


class PlainAttention:
    """The ``plain`` backend."""

    reads_pages, reads_unwritten, spans_context = False, True, False

    def __init__(self, shape: AttentionShape) -> None:
        self._gather = GatherAttention(shape)

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        return _PlainLayers(self._gather.prepare_layers(sequences, block_size, dtype, device))

    def prepare_static(
        self,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate_tables: AllocateTables,
    ) -> StaticAttention:
        return _StaticPlain(
            self._gather.prepare_static(rows, blocks, block_size, dtype, allocate_tables)
        )
