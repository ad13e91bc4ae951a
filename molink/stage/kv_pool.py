"""The paged KV cache of a stage."""

import math
import mmap
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from molink.errors import InvariantError
from molink.facts.model import KVCacheDType
from molink.stage.batch import SequenceRows
from molink.stage.device_copy import upload_integers
from molink.stage.kv_quantizer import SCALE_DTYPE, dequantize_rows, quantize_rows


class KVShape(Protocol):
    """Model properties that a pool depends on."""

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""

    @property
    def kv_kinds(self) -> int:
        """2 (keys and values), or 1 if keys serve as values."""


def block_bytes(
    shape: KVShape,
    layers: int,
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: KVCacheDType = "auto",
) -> int:
    """Return the bytes of one KV block over ``layers`` layers, including scales."""
    head = block_size * shape.head_dim * dtype.itemsize
    if kv_cache_dtype == "int8":
        head = _align_scales(block_size * shape.head_dim) + block_size * SCALE_DTYPE.itemsize
    return shape.kv_kinds * layers * shape.kv_heads * head


class KVPool:
    """Keys and values of all layers, in blocks of ``block_size`` positions.

    A *slot* is ``block * block_size + offset``. A request's block table maps positions to slots,
    and is shared by all layers. ``padding_block``, if any, follows the ``blocks``, belongs to no
    request and is used by padding rows.

    A position's heads are contiguous, as paged kernels expect. On a CPU, except in fp16, each head
    has its own region, so that attention reads memory sequentially, in as little as half the time.

    If keys serve as values (latent attention), only keys are stored, and read as both.

    With ``int8`` a block has the codes of its positions, then their scales; if heads have regions,
    each region is laid out so for its head.
    """

    def __init__(
        self,
        config: KVShape,
        layers: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        with_padding: bool = False,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> None:
        """Allocate a pool for rows of ``dtype``."""
        self.blocks, self.block_size, self.dtype = blocks, block_size, dtype
        self.padding_block = blocks if with_padding else None
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self._kinds = kinds = config.kv_kinds
        self._quantizes = kv_cache_dtype == "int8"
        self._heads_first = device.type == "cpu" and dtype != torch.float16
        heads, count = self.kv_heads, blocks + with_padding
        regions, inside = ((heads,), ()) if self._heads_first else ((), (heads,))
        #: Positions per block, and heads per position within a region.
        self._inner = (block_size, *inside)
        size = math.prod(self._inner) * self.head_dim
        if self._quantizes:
            size = _align_scales(size) + math.prod(self._inner) * SCALE_DTYPE.itemsize
        stored = torch.int8 if self._quantizes else dtype
        # Not zeroed, so that on a CPU only used blocks take physical memory (see `zero_blocks`).
        memory = _allocate_memory(
            layers * kinds * math.prod(regions) * count * size, stored, device
        )
        #: Memory of a block by layer, kind and region: ``[layers, kinds, …, blocks, size]``.
        self._memory = memory.view(layers, kinds, *regions, count, size)
        self._block_dim = self._memory.dim() - 2
        self._storage, self._scales = self._split_memory(self._memory)
        if self._heads_first:
            self._storage = self._storage.permute(0, 1, 3, 4, 2, 5)
            self._scales = None if self._scales is None else self._scales.permute(0, 1, 3, 4, 2)
        #: Views by layer: of blocks, and of rows ``[kinds, slots, kv_heads, head_dim]`` unless
        #: scales lie between them.
        self._blocks = self._memory.unbind(0)
        self._slots: tuple[Tensor, ...] = ()
        if not self._quantizes:
            positions = count * block_size
            shape = layers, kinds, positions, heads, self.head_dim
            self._slots = self._storage.view(shape).unbind(0)
        if with_padding:
            self.zero_blocks((blocks,))

    @property
    def parts(self) -> "tuple[KVPool, ...]":
        """The pool itself; see :class:`~molink.stage.mixed_kv_pool.MixedKVPool`."""
        return (self,)

    def locate_layer(self, layer: int) -> "tuple[KVPool, int]":
        """Return a layer's pool, and the layer's index in it."""
        return self, layer

    def write_rows(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store keys and values ``[T, 2, kv_heads, head_dim]`` at ``slots`` (int64 ``[T]``)."""
        by_kind = rows[:, : self._kinds].transpose(0, 1)
        if self._scales is None:
            self._slots[layer].index_copy_(1, slots, by_kind)
            return
        codes, scales = quantize_rows(by_kind)
        blocks, positions = slots // self.block_size, slots % self.block_size
        self._storage[layer][:, blocks, positions] = codes
        self._scales[layer][:, blocks, positions] = scales

    def round_rows(self, rows: Tensor) -> Tensor:
        """Round rows ``[…, head_dim]`` as writing and reading them would."""
        return dequantize_rows(*quantize_rows(rows), rows.dtype) if self._quantizes else rows

    def read_blocks(
        self, layer: int, blocks: Tensor | slice, sequences: int, scratch: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of whole blocks, the same number for each sequence.

        ``blocks`` (int64, flat) lists them by sequence; a slice avoids the copy. Both results are
        strided ``[sequences, kv_heads, positions, head_dim]``, in ``scratch`` (flat, with as many
        elements) if given.
        """
        both, dim = self._blocks[layer], self._block_dim - 1
        if isinstance(blocks, slice):
            rows = both.narrow(dim, blocks.start, blocks.stop - blocks.start)
        elif scratch is None or self._quantizes:
            rows = both.index_select(dim, blocks)
        else:
            shape = (*both.shape[:dim], len(blocks), both.shape[-1])
            rows = torch.index_select(both, dim, blocks, out=scratch.view(shape))
        if self._quantizes:
            codes, scales = self._split_memory(rows)
            assert scales is not None
            rows = dequantize_rows(codes, scales, self.dtype, scratch)
        kinds, heads, size = self._kinds, self.kv_heads, self.head_dim
        if self._heads_first:
            shaped = rows.view(kinds, heads, sequences, -1, size).transpose(1, 2)
        else:
            shaped = rows.view(kinds, sequences, -1, heads, size).transpose(2, 3)
        return shaped[0], shaped[-1]

    def copy_block(self, source: int, target: int, positions: int) -> None:
        """Copy the first ``positions`` of a block in all layers, and zero the rest.

        The rest of ``source`` belongs to another request and may be written concurrently.
        """
        for part in (self._storage, self._scales):
            if part is not None:
                part[:, :, target, :positions] = part[:, :, source, :positions]
                part[:, :, target, positions:] = 0

    def block_view(self, block: int) -> Tensor:
        """Return a view of a block's memory, ``[layers, kinds, …]``."""
        return self._memory.select(self._block_dim, block)

    def layer_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer, ``[blocks, block_size, kv_heads, head_dim]`` each.

        With ``int8`` they are codes.
        """
        kinds = self._storage[layer]
        return kinds[0], kinds[-1]

    def layer_scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return scales of a layer's ``int8`` pages, ``[blocks, block_size, kv_heads]`` each."""
        if self._scales is None:
            return None
        kinds = self._scales[layer]
        return kinds[0], kinds[-1]

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero blocks in all layers.

        Most attention backends read whole blocks and mask positions beyond the end, but a weight of
        0 times a stale NaN would still be NaN.
        """
        if self._memory.device.type == "cpu" or len(block_ids) == 1:
            for block in block_ids:
                self.block_view(block).zero_()
        elif block_ids:
            ids = upload_integers(block_ids, self._memory.device)
            self._memory.index_fill_(self._block_dim, ids, 0)

    def zero_layer(self, layer: int, block_ids: Sequence[int]) -> None:
        """Zero blocks in one layer, for the same reason."""
        for part in (self._storage, self._scales):
            if part is not None:
                for block in block_ids:
                    part[layer, :, block].zero_()

    def _split_memory(self, memory: Tensor) -> tuple[Tensor, Tensor | None]:
        """View rows ``[…, *inner, head_dim]`` and scales ``[…, *inner]`` in blocks' memory."""
        count = math.prod(self._inner)
        shape = (*memory.shape[:-1], *self._inner)
        rows = memory[..., : count * self.head_dim].view(*shape, self.head_dim)
        if not self._quantizes:
            return rows, None
        scales = memory[..., _align_scales(count * self.head_dim) :].view(SCALE_DTYPE)
        return rows, scales.view(shape)

    def locate_rows(
        self, sequences: Sequence[SequenceRows]
    ) -> "tuple[array[int], array[int], list[int]]":
        """Return each row's position and slot, and the blocks that the rows start but don't fill.

        Raises: InvariantError: rows don't fit their blocks, or blocks are outside the pool.
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


def _align_scales(nbytes: int) -> int:
    """Return the aligned offset of scales after codes."""
    return nbytes + nbytes % SCALE_DTYPE.itemsize


def _allocate_memory(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate ``size`` elements, without huge pages on Linux CPUs.

    Each head of each layer has its own region, so the first row in new pages of 2 MB would zero one
    per region during a step: 128 MB for four layers of eight heads.
    """
    nbytes = size * dtype.itemsize
    if sys.platform == "linux" and device.type == "cpu" and nbytes:
        with suppress(OSError):  # torch then reports an error
            memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # Linux kernels without huge pages
                memory.madvise(mmap.MADV_NOHUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype)
    return torch.empty(size, dtype=dtype, device=device)
