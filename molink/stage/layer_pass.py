"""A stage's layers with the KV pool, attention and RoPE that a step needs."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.attention.base import AttentionBackend
from molink.stage.batch import SequenceRows
from molink.stage.decoder.block import ForwardContext
from molink.stage.decoder.decoder import Decoder
from molink.stage.decoder.rotary import Rope
from molink.stage.device_copy import upload_integers
from molink.stage.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """Device rows ``[T, hidden]`` of ``sequences``, with positions and slots on the host.

    See :meth:`~molink.stage.kv_pool.KVPool.locate_rows`.
    """

    rows: Tensor
    positions: "array[int]"
    slots: "array[int]"
    sequences: Sequence[SequenceRows]


@dataclass(frozen=True, slots=True)
class LayerPass:
    """Runs steps eagerly on one KV pool."""

    decoder: Decoder
    pool: KVPool
    attention: AttentionBackend
    ropes: tuple[Rope, ...]
    dtype: torch.dtype

    def run_layers(self, step: LocatedRows) -> Tensor:
        """Run rows ``[T, hidden]`` through all layers."""
        count, device = len(step.rows), step.rows.device
        both = upload_integers(step.positions + step.slots, device)
        angles = tuple(rope.compute_angles(both[:count], step.sequences) for rope in self.ropes)
        size = self.pool.block_size
        attention = self.attention.prepare_layers(step.sequences, size, self.dtype, device)
        return self.decoder.run_layers(
            step.rows, ForwardContext(self.pool, both[count:], angles, attention)
        )
