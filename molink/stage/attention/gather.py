"""Attention by gathering blocks into a dense tensor: works on every device and dtype.

Decode rows of all sequences run together, padded to the longest of their bucket. Query heads that
share a key-value head are folded into the query length there (a decode row is then a query of
length ``groups`` per key-value head), since SDPA's ``enable_gqa`` is six times slower on a CPU. A
prefill chunk runs alone, against everything before it and, causally, itself.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from molink.stage.attention.base import AttentionShape, LayerAttention
from molink.stage.base import SequenceRows
from molink.stage.pool import KVPool

#: Padding of a decode bucket (positions over all rows) that is cheaper than another SDPA call.
_FREE_PADDING = 1024


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Decode rows of similar length. ``rows`` are their indices in the batch.

    ``mask`` is additive, ``[rows, 1, 1, positions]``; with a single row there is none and the keys
    are cut at ``length`` instead.
    """

    rows: Tensor | slice
    count: int
    block_ids: Tensor
    mask: Tensor | None
    length: int

    def attend(self, layer: int, heads: Tensor, pool: KVPool, shape: AttentionShape) -> Tensor:
        queries = heads[self.rows, : shape.groups * shape.kv_heads]
        folded = queries.view(self.count, shape.kv_heads, shape.groups, shape.head_dim)
        keys, values = pool.read(layer, self.block_ids, self.count)
        if self.mask is None:
            keys, values = keys[:, :, : self.length], values[:, :, : self.length]
        attended = scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask)
        return attended.reshape(self.count, -1)


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """Rows of one sequence. Without ``block_ids`` nothing lies before them.

    ``mask`` is additive, ``[count, length]``.
    """

    rows: slice
    count: int
    block_ids: Tensor | None
    mask: Tensor | None
    length: int

    def attend(self, layer: int, heads: Tensor, pool: KVPool, shape: AttentionShape) -> Tensor:
        groups, kv_heads = shape.groups, shape.kv_heads
        rows = heads[self.rows]
        queries = rows[:, : groups * kv_heads].view(self.count, kv_heads, groups, shape.head_dim)
        if self.block_ids is None:
            both = rows[:, groups * kv_heads :].view(self.count, 2, kv_heads, shape.head_dim)
            keys, values = both.permute(1, 2, 0, 3)
        else:
            gathered_keys, gathered_values = pool.read(layer, self.block_ids, 1)
            keys, values = gathered_keys[0, :, : self.length], gathered_values[0, :, : self.length]
        # [kv_heads, groups, T, head_dim]: key-value heads are the batch, and shared by the groups.
        attended = scaled_dot_product_attention(
            queries.permute(1, 2, 0, 3),
            keys[:, None].expand(-1, groups, -1, -1),
            values[:, None].expand(-1, groups, -1, -1),
            attn_mask=self.mask,
            is_causal=self.mask is None,
        )
        return attended.permute(2, 0, 1, 3).reshape(self.count, -1)


class _GatherLayers:
    """The prepared parts of one forward."""

    __slots__ = ("_parts", "_shape")

    def __init__(
        self, parts: tuple[_DecodeBucket | _PrefillChunk, ...], shape: AttentionShape
    ) -> None:
        self._parts, self._shape = parts, shape

    def __call__(self, layer: int, heads: Tensor, pool: KVPool) -> Tensor:
        shape, parts = self._shape, self._parts
        if len(parts) == 1:
            return parts[0].attend(layer, heads, pool, shape)
        attended = heads.new_empty(len(heads), shape.groups * shape.kv_heads * shape.head_dim)
        for part in parts:
            attended[part.rows] = part.attend(layer, heads, pool, shape)
        return attended


class GatherAttention:
    """The ``gather`` backend."""

    __slots__ = ("_shape",)

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def prepare(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        """See :class:`~molink.stage.attention.base.Attention`."""
        decode: list[tuple[int, SequenceRows]] = []
        parts: list[_DecodeBucket | _PrefillChunk] = []
        row = 0
        for sequence in sequences:
            if sequence.count == 1:
                decode.append((row, sequence))
            else:
                parts.append(_prefill(row, sequence, block_size, dtype, device))
            row += sequence.count
        decode.sort(key=lambda item: -item[1].start)
        parts += [_bucket(part, block_size, dtype, device) for part in _split(decode)]
        return _GatherLayers(tuple(parts), self._shape)


def _split(decode: list[tuple[int, SequenceRows]]) -> list[list[tuple[int, SequenceRows]]]:
    """Cut rows, longest first, where the shorter ones would mostly be padding."""
    buckets: list[list[tuple[int, SequenceRows]]] = []
    begin = 0
    for index in range(1, len(decode)):
        longest, here = decode[begin][1].start, decode[index][1].start
        padding = (longest - here) * (len(decode) - index)
        if here < longest // 2 and padding > _FREE_PADDING:
            buckets.append(decode[begin:index])
            begin = index
    if decode:
        buckets.append(decode[begin:])
    return buckets


def _bucket(
    part: list[tuple[int, SequenceRows]], block_size: int, dtype: torch.dtype, device: torch.device
) -> _DecodeBucket:
    part.sort(key=lambda item: item[0])
    longest = max(sequence.start for _, sequence in part) + 1
    width = -(-longest // block_size)
    ids = array("q")
    for _, sequence in part:
        used = sequence.start // block_size + 1
        ids.extend(sequence.blocks[:used])
        # Padding repeats a block of the same request: nothing of another one is ever read.
        ids.extend([sequence.blocks[0]] * (width - used))
    rows = [row for row, _ in part]
    mask = None
    if len(part) > 1:
        lengths = torch.tensor([sequence.start for _, sequence in part])[:, None, None, None]
        beyond = torch.arange(width * block_size) > lengths
        mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))
        mask = mask.to(device)
    return _DecodeBucket(_as_slice(rows, device), len(part), _on(ids, device), mask, longest)


def _prefill(
    row: int, sequence: SequenceRows, block_size: int, dtype: torch.dtype, device: torch.device
) -> _PrefillChunk:
    start, count = sequence.start, sequence.count
    rows, length = slice(row, row + count), start + count
    if start == 0:
        return _PrefillChunk(rows, count, None, None, length)
    ids = array("q", sequence.blocks[: -(-length // block_size)])
    later = torch.ones(count, length, dtype=torch.bool, device=device).triu_(start + 1)
    mask = torch.zeros(count, length, dtype=dtype, device=device)
    return _PrefillChunk(
        rows, count, _on(ids, device), mask.masked_fill_(later, float("-inf")), length
    )


def _on(ids: "array[int]", device: torch.device) -> Tensor:
    return torch.frombuffer(ids, dtype=torch.int64).to(device)


def _as_slice(rows: list[int], device: torch.device) -> Tensor | slice:
    """Row indices as a slice where they are consecutive: that selects without a copy."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
