"""The paged cache of keys and values of one stage."""

from collections.abc import Sequence

import torch
from torch import Tensor

from molink.model.config import ModelConfig


def block_bytes(config: ModelConfig, layers: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over ``layers`` layers."""
    return 2 * layers * block_size * config.kv_heads * config.head_dim * dtype.itemsize


class KVPool:
    """Keys and values of all layers, in blocks of ``block_size`` positions.

    A *slot* is a position in the pool: ``block * block_size + offset``. A request's block table
    maps its positions to slots, and every layer uses the same one.
    """

    __slots__ = ("_layers", "_storage", "block_size", "blocks", "head_dim", "kv_heads")

    def __init__(
        self,
        config: ModelConfig,
        layers: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        row = block_size * config.kv_heads * config.head_dim
        # Not zeroed: a CPU then has memory only for blocks that were in use (see `clear`).
        self._storage = torch.empty(layers, 2, blocks, row, dtype=dtype, device=device)
        self._layers = self._storage.unbind(0)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store rows ``[T, 2, kv_heads, head_dim]`` (keys, values) at ``slots`` (int64 ``[T]``)."""
        flat = self._layers[layer].view(2, -1, self.kv_heads, self.head_dim)
        flat.index_copy_(1, slots, rows.transpose(0, 1))

    def read(self, layer: int, block_ids: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Gather keys and values of whole blocks, the same number for each of ``sequences``.

        ``block_ids`` (int64, flat) has them sequence by sequence. Both results are
        ``[sequences, kv_heads, positions, head_dim]`` (strided).
        """
        rows = self._layers[layer].index_select(1, block_ids)
        shaped = rows.view(2, sequences, -1, self.kv_heads, self.head_dim).transpose(2, 3)
        return shaped[0], shaped[1]

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks in all layers.

        Attention reads whole blocks and masks what lies beyond a sequence's end; a weight of 0
        times a NaN left behind by an earlier owner would still be NaN.
        """
        for block in block_ids:
            self._storage[:, :, block].zero_()
