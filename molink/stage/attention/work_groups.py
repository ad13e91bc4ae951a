"""What ``gather`` runs in each layer: a bucket of decode rows, or a chunk of a prompt."""

from dataclasses import dataclass

from torch import Tensor

from molink.stage.attention.base import AttentionShape
from molink.stage.attention.dot_product import attend_dot_product
from molink.stage.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decode rows of similar length. ``rows`` are their indices in the batch.

    Without a ``mask`` (additive, ``[rows, 1, 1, positions]``) all attend to ``visible``.
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
    ) -> Tensor:
        queries = heads[self.rows, : shape.groups * shape.kv_heads]
        folded = queries.view(self.count, shape.kv_heads, shape.groups, shape.head_dim)
        keys, values = pool.read_blocks(layer, self.blocks, self.count, self.scratch)
        if self.mask is None:
            keys, values = keys[:, :, self.visible], values[:, :, self.visible]
        if sinks is not None:
            sinks = sinks.view(1, shape.kv_heads, shape.groups, 1)
        attended = attend_dot_product(
            folded, keys, values, self.mask, False, shape.scale, shape.softcap, sinks
        )
        return attended.reshape(self.count, -1)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows of one sequence. Without ``blocks`` nothing lies before them.

    ``mask`` is additive, ``[count, positions of seen]``; without one they are causal. Where groups
    are ``folds_groups`` into the query length, each of its rows is there ``groups`` times.
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
    ) -> Tensor:
        groups, kv_heads = shape.groups, shape.kv_heads
        rows = heads[self.rows]
        queries = rows[:, : groups * kv_heads].view(self.count, kv_heads, groups, shape.head_dim)
        if self.blocks is None:
            both = rows[:, groups * kv_heads :].view(self.count, 2, kv_heads, shape.head_dim)
            keys, values = both.permute(1, 2, 0, 3)
        else:
            gathered = pool.read_blocks(layer, self.blocks, 1, self.scratch)
            keys, values = (part[0, :, self.visible] for part in gathered)
        if self.folds_groups:
            together = queries.transpose(0, 1).reshape(1, kv_heads, -1, shape.head_dim)
            if sinks is not None:
                sinks = sinks.view(1, kv_heads, groups).repeat(1, 1, self.count).unsqueeze(-1)
            attended = attend_dot_product(
                together,
                keys[None],
                values[None],
                self.mask,
                False,
                shape.scale,
                shape.softcap,
                sinks,
            )
            apart = attended.view(kv_heads, self.count, groups, shape.head_dim)
            return apart.transpose(0, 1).reshape(self.count, -1)
        # [kv_heads, groups, T, head_dim]: key-value heads are the batch, and shared by the groups.
        attended = attend_dot_product(
            queries.permute(1, 2, 0, 3),
            keys[:, None].expand(-1, groups, -1, -1),
            values[:, None].expand(-1, groups, -1, -1),
            self.mask,
            self.mask is None,
            shape.scale,
            shape.softcap,
            None if sinks is None else sinks.view(kv_heads, groups, 1, 1),
        )
        return attended.permute(2, 0, 1, 3).reshape(self.count, -1)


WorkGroups = tuple[DecodeBucket | PrefillChunk, ...]
