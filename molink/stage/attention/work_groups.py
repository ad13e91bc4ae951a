"""Work groups of the ``gather`` backend: decode buckets and prefill chunks.

A row attends to all positions up to its own; in a layer with a window, it starts at
:meth:`~molink.stage.attention.base.AttentionShape.first_visible`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from molink.stage.attention.base import AttentionShape
from molink.stage.attention.token_choice import TokenChoice
from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decode rows of similar length. ``rows`` are their indices in the batch.

    Without an additive ``mask`` ``[rows, 1, 1, positions]``, all rows attend to ``visible``.
    """

    rows: Tensor | slice
    count: int
    blocks: Tensor | slice
    scratch: Tensor | None
    visible: slice
    mask: Tensor | None

    def attend_rows(
        self,
        layer: int,
        heads: Tensor,
        pool: KVPool,
        shape: AttentionShape,
        sinks: Tensor | None,
        choice: TokenChoice | None = None,
    ) -> Tensor:
        queries = heads[self.rows, : shape.groups * shape.kv_heads]
        folded = queries.view(self.count, shape.kv_heads, shape.groups, shape.head_dim)
        keys, values = pool.read_blocks(layer, self.blocks, self.count, self.scratch)
        mask = self.mask
        if mask is None:
            keys, values = keys[:, :, self.visible], values[:, :, self.visible]
        if choice is not None:
            seen = keys.new_zeros(keys.shape[::2]) if mask is None else mask.flatten(1)
            mask = choice.restrict_mask(seen, self.rows, keys[:, 0])[:, None, None]
        if sinks is not None:
            sinks = sinks.view(1, shape.kv_heads, shape.groups, 1)
        attended = attend_dot_product(
            folded, keys, values, mask, False, shape.scale, shape.softcap, sinks
        )
        return attended.reshape(self.count, -1)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows of one sequence; without ``blocks`` there is no earlier context.

    ``mask`` is additive, ``[count, visible positions]``; without it attention is causal. With
    ``folds_groups`` the mask's rows are repeated for each group.
    """

    rows: slice
    count: int
    blocks: Tensor | slice | None
    scratch: Tensor | None
    visible: slice
    mask: Tensor | None
    folds_groups: bool = False

    def attend_rows(
        self,
        layer: int,
        heads: Tensor,
        pool: KVPool,
        shape: AttentionShape,
        sinks: Tensor | None,
        choice: TokenChoice | None = None,
    ) -> Tensor:
        groups, kv_heads = shape.groups, shape.kv_heads
        rows = heads[self.rows]
        queries = rows[:, : groups * kv_heads].view(self.count, kv_heads, groups, shape.head_dim)
        if self.blocks is None:
            both = rows[:, groups * kv_heads :].view(self.count, 2, kv_heads, shape.head_dim)
            keys, values = pool.round_rows(both).permute(1, 2, 0, 3)
        else:
            gathered = pool.read_blocks(layer, self.blocks, 1, self.scratch)
            keys, values = (part[0, :, self.visible] for part in gathered)
        mask = self.mask
        if choice is not None:
            assert mask is not None, "a causal mask is not restricted"
            mask = choice.restrict_mask(mask, self.rows, keys)
        if self.folds_groups:
            together = queries.transpose(0, 1).reshape(1, kv_heads, -1, shape.head_dim)
            if sinks is not None:
                sinks = sinks.view(1, kv_heads, groups).repeat(1, 1, self.count).unsqueeze(-1)
            attended = attend_dot_product(
                together,
                keys[None],
                values[None],
                mask,
                False,
                shape.scale,
                shape.softcap,
                sinks,
            )
            apart = attended.view(kv_heads, self.count, groups, shape.head_dim)
            return apart.transpose(0, 1).reshape(self.count, -1)
        # [kv_heads, groups, T, head_dim]: KV heads are the batch, shared by the groups.
        attended = attend_dot_product(
            queries.permute(1, 2, 0, 3),
            keys[:, None].expand(-1, groups, -1, -1),
            values[:, None].expand(-1, groups, -1, -1),
            mask,
            mask is None,
            shape.scale,
            shape.softcap,
            None if sinks is None else sinks.view(kv_heads, groups, 1, 1),
        )
        return attended.permute(2, 0, 1, 3).reshape(self.count, -1)


WorkGroups = tuple[DecodeBucket | PrefillChunk, ...]


#: Padding (in positions, over all rows) that is cheaper than another SDPA call.
FREE_PADDING = 1024


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks that the rows of one sequence read in layers of one window.

    Positions ``begin … end - 1`` are visible, counted from the first position of the first block.
    ``row`` is the batch index of the sequence's first row.
    """

    row: int
    count: int
    blocks: Sequence[int]
    begin: int
    end: int

    @classmethod
    def from_sequence(cls, row: int, sequence: SequenceRows, first: int, block_size: int) -> "Span":
        """Create the span of rows from batch index ``row`` that see positions from ``first`` on."""
        end = sequence.start + sequence.count
        block = first // block_size
        blocks = sequence.blocks[block : -(-end // block_size)]
        base = block * block_size
        return cls(row, sequence.count, blocks, first - base, end - base)


def effective_windows(windows: Sequence[int], longest: int) -> tuple[int, ...]:
    """Replace ``windows`` that exclude nothing at ``longest`` positions with 0."""
    return tuple(0 if window >= longest else window for window in windows)


def bucket_spans(decode: Sequence[Span], block_size: int, max_positions: int) -> list[list[Span]]:
    """Group decode rows into buckets, each padded to its longest row.

    Rows are taken longest first; a new bucket begins if padding would dominate, or if the bucket
    would gather more than ``max_positions`` positions (a single row may exceed that).
    """
    rest = sorted(decode, key=lambda span: -len(span.blocks))
    found: list[list[Span]] = []
    begin = 0
    for index in range(1, len(rest) + 1):
        longest = len(rest[begin].blocks) * block_size
        if index < len(rest):
            positions = len(rest[index].blocks) * block_size
            padding = (longest - positions) * (len(rest) - index)
            sparse = positions < longest // 2 and padding > FREE_PADDING
            if not sparse and longest * (index - begin + 1) <= max_positions:
                continue
        found.append(sorted(rest[begin:index], key=lambda span: span.row))
        begin = index
    return found


def block_ids(bucket: Sequence[Span]) -> list[int]:
    """Return the block ids of all spans, each padded to the longest.

    Padding repeats one of the request's own blocks, never another request's.
    """
    width = max(len(span.blocks) for span in bucket)
    ids: list[int] = []
    for span in bucket:
        ids.extend(span.blocks)
        ids.extend([span.blocks[0]] * (width - len(span.blocks)))
    return ids


def as_slice(numbers: Sequence[int]) -> slice | None:
    """Return ``numbers`` as a slice if they are consecutive."""
    first, count = numbers[0], len(numbers)
    if numbers[-1] - first != count - 1:
        return None
    if all(number == first + index for index, number in enumerate(numbers)):
        return slice(first, first + count)
    return None


#: Scores computed at once without SDPA: 64 MiB in float32.
_MAX_SCORES = 1 << 24


def attend_dot_product(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with ``queries [a, b, m, d]`` to ``keys`` and ``values [a, b, n, d]``.

    ``mask`` is additive and broadcasts to ``[a, b, m, n]``; ``causal`` requires ``m == n``, and
    neither softcap nor sinks. Scores are multiplied by the factor ``scale``. ``sinks`` broadcast to
    ``[a, b, m, 1]``.
    """
    if softcap or sinks is not None:
        return _attend_float32(queries, keys, values, mask, scale, softcap, sinks)
    return scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )


def _attend_float32(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute in float32, in slabs of query rows, since a soft cap needs the precision."""
    transposed, wide = keys.float().transpose(2, 3), values.float()
    a, b, m, _ = queries.shape
    slab = max(1, _MAX_SCORES // (a * b * transposed.shape[3]))
    parts = []
    for first in range(0, m, slab):
        part = queries[:, :, first : first + slab].float() * (scale / (softcap or 1.0))
        scores = torch.matmul(part, transposed)
        if softcap:
            scores = scores.tanh_().mul_(softcap)
        if mask is not None:
            scores += mask if mask.shape[-2] == 1 else mask[..., first : first + slab, :]
        result = torch.matmul(scores.softmax(dim=-1), wide)
        if sinks is not None:
            total = scores.logsumexp(dim=-1, keepdim=True)
            own = sinks if sinks.shape[2] == 1 else sinks[:, :, first : first + slab]
            result *= torch.sigmoid(total - own)
        parts.append(result.to(queries.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
