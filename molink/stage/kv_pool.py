"""The paged cache of keys and values of one stage."""

import mmap
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from molink.checkpoint.config import ModelConfig
from molink.errors import InvariantError
from molink.stage.batch import SequenceRows


def block_bytes(config: ModelConfig, layers: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over ``layers`` layers."""
    return 2 * layers * block_size * config.kv_heads * config.head_dim * dtype.itemsize


class KVShape(Protocol):
    """What a pool has to know of a model."""

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""

    @property
    def head_dim(self) -> int:
        """Their size."""


class KVPool:
    """Keys and values of all layers, in blocks of ``block_size`` positions.

    A *slot* is a position in the pool: ``block * block_size + offset``. A request's block table
    maps its positions to slots, and every layer uses the same one. Behind the ``blocks`` there may
    be a ``padding_block`` one that no request ever has: it holds zeros, or what padding rows leave
    there.

    In memory a position has all its heads side by side, as kernels want them that read pages in
    place. On a CPU each head has a region of its own, but in fp16, in which nothing reads pages in
    place there: attention then reads memory in order, which takes up to half the time.
    """

    def __init__(
        self,
        config: KVShape,
        layers: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: bool = False,
    ) -> None:
        self.blocks, self.block_size = blocks, block_size
        self.padding_block = blocks if spare else None
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self._heads_first = device.type == "cpu" and dtype != torch.float16
        heads, count, row = self.kv_heads, blocks + spare, block_size * self.head_dim
        # Not zeroed: a CPU then has memory only for blocks that were in use (see `clear`).
        memory = _allocate_memory(2 * layers * count * heads * row, dtype, device)
        if self._heads_first:
            split = memory.view(layers, 2, heads, count, block_size, self.head_dim)
            self._storage = split.permute(0, 1, 3, 4, 2, 5)
            self._blocks = memory.view(layers, 2, heads, count, row).unbind(0)
        else:
            self._storage = memory.view(layers, 2, count, block_size, heads, self.head_dim)
            self._blocks = memory.view(layers, 2, count, heads * row).unbind(0)
        #: Of each layer ``[2, slots, kv_heads, head_dim]``, a view like all of these.
        self._slots = self._storage.view(layers, 2, -1, heads, self.head_dim).unbind(0)
        if spare:
            self.zero_blocks((blocks,))

    def write_rows(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store rows ``[T, 2, kv_heads, head_dim]`` (keys, values) at ``slots`` (int64 ``[T]``)."""
        self._slots[layer].index_copy_(1, slots, rows.transpose(0, 1))

    def read_blocks(
        self, layer: int, blocks: Tensor | slice, sequences: int, scratch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks, the same number for each of ``sequences``.

        ``blocks`` (int64, flat) has them sequence by sequence; consecutive ones may be a slice and
        are not copied then. Both results are ``[sequences, kv_heads, positions, head_dim]``
        (strided), in ``scratch`` (flat, of as many elements as both) if given.
        """
        both, dim = self._blocks[layer], 2 if self._heads_first else 1
        if isinstance(blocks, slice):
            rows = both.narrow(dim, blocks.start, blocks.stop - blocks.start)
        elif scratch is None:
            rows = both.index_select(dim, blocks)
        else:
            shape = (*both.shape[:dim], len(blocks), both.shape[-1])
            rows = torch.index_select(both, dim, blocks, out=scratch.view(shape))
        if self._heads_first:
            shaped = rows.view(2, self.kv_heads, sequences, -1, self.head_dim).transpose(1, 2)
        else:
            shaped = rows.view(2, sequences, -1, self.kv_heads, self.head_dim).transpose(2, 3)
        return shaped[0], shaped[1]

    def copy_block(self, source: int, target: int, positions: int) -> None:
        """Make ``target`` begin as ``source`` does, in all layers; beyond ``positions`` it is zero.

        What follows in ``source`` is another request's, and perhaps being written.
        """
        self._storage[:, :, target, :positions] = self._storage[:, :, source, :positions]
        self._storage[:, :, target, positions:] = 0

    def block_view(self, block: int) -> Tensor:
        """Keys and values of a block, ``[layers, 2, block_size, kv_heads, head_dim]``, a view."""
        return self._storage[:, :, block]

    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and all values, ``[blocks, block_size, kv_heads, head_dim]`` each."""
        keys, values = self._storage[layer]
        return keys, values

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero blocks in all layers.

        Attention reads whole blocks and masks what lies beyond a sequence's end; a weight of 0
        times a NaN left behind by an earlier owner would still be NaN.
        """
        for block in block_ids:
            self._storage[:, :, block].zero_()

    def locate_rows(
        self, sequences: Sequence[SequenceRows]
    ) -> "tuple[array[int], array[int], list[int]]":
        """Position and slot of each row, and the blocks that are begun here but not filled.

        Raises:
            InvariantError: rows don't fit their blocks, or blocks the pool.
        """
        size = self.block_size
        positions, slots = array("q"), array("q")
        fresh: list[int] = []
        for sequence in sequences:
            start, end, blocks = sequence.start, sequence.start + sequence.count, sequence.blocks
            if start < 0 or end <= start or end > len(blocks) * size:
                raise InvariantError(f"rows {start}:{end} don't fit {len(blocks)} blocks of {size}")
            last = (end - 1) // size
            for index in range(start // size, last + 1):
                block = blocks[index]
                if not 0 <= block < self.blocks:
                    raise InvariantError(f"block {block} is not in a pool of {self.blocks}")
                first, stop = max(start, index * size), min(end, (index + 1) * size)
                positions.extend(range(first, stop))
                slots.extend(range((block - index) * size + first, (block - index) * size + stop))
            if start <= last * size and end % size:
                fresh.append(blocks[last])
        return positions, slots, fresh


def _allocate_memory(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``size`` elements of a pool, of a CPU in small pages whatever torch asks for otherwise.

    Each head of each layer has a region of its own, so the first row that lies in new pages of 2 MB
    would have one zeroed for each: 128 MB for four layers of eight heads, in the midst of a step.
    """
    nbytes = size * dtype.itemsize
    if sys.platform == "linux" and device.type == "cpu" and nbytes:
        with suppress(OSError):  # torch's own error says it better
            memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype)
    return torch.empty(size, dtype=dtype, device=device)
