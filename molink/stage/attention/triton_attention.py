"""Attention by Triton kernels, which read the paged pool in place.

It supports every page size and head size, windows, softcap and sinks. A sequence with few rows (a
decode row, drafts) is one tile of the kernel, a chunk is several tiles. If there are few tiles,
their positions are split into parts, so that the GPU is fully used.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from molink.stage.attention.base import (
    AllocateTables,
    AttentionShape,
    LayerAttention,
    StaticAttention,
)
from molink.stage.batch import SequenceRows
from molink.stage.device_copy import upload_tensor
from molink.stage.gpu_kernels.attention_kernels import (
    PARTS_AT_ONCE,
    TileSize,
    attend_pages,
    reduce_splits,
)
from molink.stage.gpu_kernels.block_product import count_processors
from molink.stage.kv_pool import KVPool

#: Maximum number of parts of all tiles together, and of each tile.
MAX_PARTS, _MAX_SPLITS = 512, 64
#: Concurrent programs per multiprocessor, of low and of tall tiles, as on an H100.
_LOW_PROGRAMS, _TALL_PROGRAMS = 4, 2
#: Minimum positions of a part, in total and per line, at which a part's results take half the bytes
#: of its KV.
_MIN_POSITIONS, _POSITIONS_PER_LINE = 128, 4
#: More rows than any tile holds.
_LONG_CHUNK = 1 << 10
#: Numbers per tile; see :func:`~molink.stage.gpu_kernels.attention_kernels.attend_pages`.
_TILE_NUMBERS = 4
_NO_WINDOW = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class TileLaunch:
    """Tiles of one height, in a batch or in static buffers.

    ``tiles`` is the result of :func:`pack_tiles` on the device: ``count`` tiles of at most ``rows``
    rows, which see at most ``positions`` positions.
    """

    shape: AttentionShape
    tiles: Tensor
    count: int
    rows: int
    positions: int
    size: TileSize

    def attend_rows(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None, output: Tensor
    ) -> None:
        """Compute attention of these rows into ``output [T, heads * head_dim]``."""
        shape, size, (keys, values) = self.shape, self.size, pool.layer_pages(layer)
        scales = pool.layer_scales(layer)
        key_scales, value_scales = scales or (None, None)
        scale_strides = (0, 0, 0) if scales is None else scales[0].stride()
        window, lines = shape.windows[layer], self.rows * shape.groups
        visible = min(self.positions, window + self.rows) if window else self.positions
        splits = self.choose_splits(visible, heads.device)
        sums = partial = None
        if splits > 1:
            parts = (self.count, shape.kv_heads, splits)
            sums = heads.new_empty((*parts, 2, lines), dtype=torch.float32)
            partial = heads.new_empty((*parts, lines, shape.head_dim), dtype=torch.float32)
        attend_pages[shape.kv_heads, self.count, splits](
            heads, keys, values, sinks, self.tiles, output, sums, partial, key_scales, value_scales,
            shape.scale, shape.softcap, window or _NO_WINDOW, lines,
            heads.stride(0), *keys.stride()[:3], *scale_strides,
            GROUPS=shape.groups, HEAD_DIM=shape.head_dim, PAGE=pool.block_size,
            HAS_SOFTCAP=bool(shape.softcap), HAS_SINKS=shape.sinks,
            IS_CHUNKED=shape.chunked, IS_SPLIT=splits > 1,
            BLOCK_M=size.lines, BLOCK_N=size.positions, BLOCK_D=size.dims, num_stages=size.stages,
        )  # fmt: skip
        if splits > 1:
            reduce_splits[shape.kv_heads, self.count, lines](
                sums, partial, self.tiles, output, splits,
                GROUPS=shape.groups, HEAD_DIM=shape.head_dim,
                MAX_SPLITS=_MAX_SPLITS, BLOCK_S=PARTS_AT_ONCE, BLOCK_D=size.dims,
            )  # fmt: skip

    def choose_splits(self, visible: int, device: torch.device) -> int:
        """Choose the parts of tiles that see ``visible`` positions, to fill the device."""
        wanted = _LOW_PROGRAMS if self.size.is_low else _TALL_PROGRAMS
        parts = min(MAX_PARTS, wanted * count_processors(device))
        lines = self.rows * self.shape.groups
        longest = visible // max(_MIN_POSITIONS, _POSITIONS_PER_LINE * lines)
        return max(1, min(_MAX_SPLITS, parts // (self.count * self.shape.kv_heads), longest))


def pack_tiles(
    sequences: Sequence[tuple[int, SequenceRows]], height: int, block_size: int, capacity: int = 0
) -> tuple["array[int]", int]:
    """Pack tiles of up to ``height`` rows and their block tables; also return the number of tiles.

    Each sequence comes with the index of its first row in the batch. Tiles with more positions take
    longer and come first. Empty tiles fill up ``capacity``.
    """
    found: list[tuple[int, int, int, int]] = []
    tables = array("i")
    for row, sequence in sequences:
        for done in range(0, sequence.count, height):
            count = min(height, sequence.count - done)
            found.append((sequence.start + done, row + done, count, len(tables)))
        tables.extend(sequence.blocks[: -(-sequence.end // block_size)])
    total = max(len(found), capacity)
    tiles = array("i")
    for start, row, count, table in sorted(found, reverse=True):
        tiles.extend((row, count, start, _TILE_NUMBERS * total + table))
    tiles.extend((0,) * (_TILE_NUMBERS * (total - len(found))))
    return tiles + tables, total


class _TritonLayers:
    """Attention of one forward."""

    def __init__(self, launches: Sequence[TileLaunch]) -> None:
        self._launches = launches

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        shape = self._launches[0].shape
        output = heads.new_empty(len(heads), shape.groups * shape.kv_heads * shape.head_dim)
        for launch in self._launches:
            launch.attend_rows(layer, heads, pool, sinks, output)
        return output


class _StaticTriton(_TritonLayers):
    """See :class:`~molink.stage.attention.base.StaticAttention`."""

    def __init__(self, launch: TileLaunch, block_size: int) -> None:
        super().__init__((launch,))
        self._launch, self._block_size = launch, block_size

    def pack_tables(self, sequences: Sequence[SequenceRows]) -> "array[int]":
        return pack_tiles(_locate(sequences), 1, self._block_size, self._launch.count)[0]

    def derive_masks(self) -> None:
        """Do nothing: the kernel reads the tables directly."""


class TritonAttention:
    """The ``triton`` backend."""

    reads_pages, reads_unwritten, spans_context = True, False, True

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        _set_device(device)
        groups, tall = self._shape.groups, self._choose_tile(_LONG_CHUNK, dtype).lines
        kinds: dict[bool, list[tuple[int, SequenceRows]]] = {True: [], False: []}
        for row, sequence in _locate(sequences):
            kinds[sequence.count * groups <= tall].append((row, sequence))
        return _TritonLayers(
            [self._make_launch(part, block_size, dtype, device) for part in kinds.values() if part]
        )

    def prepare_static(
        self,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate_tables: AllocateTables,
    ) -> StaticAttention:
        numbers = allocate_tables(rows * (_TILE_NUMBERS + blocks))
        _set_device(numbers.device)
        tile = self._choose_tile(1, dtype)
        launch = TileLaunch(self._shape, numbers, rows, 1, blocks * block_size, tile)
        return _StaticTriton(launch, block_size)

    def _choose_tile(self, rows: int, dtype: torch.dtype) -> TileSize:
        return TileSize.choose(self._shape.groups, rows, self._shape.head_dim, dtype.itemsize)

    def _make_launch(
        self,
        part: Sequence[tuple[int, SequenceRows]],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> TileLaunch:
        longest = max(sequence.count for _, sequence in part)
        size = self._choose_tile(longest, dtype)
        rows = min(longest, size.lines // self._shape.groups)
        numbers, count = pack_tiles(part, rows, block_size)
        tiles = upload_tensor(torch.frombuffer(numbers, dtype=torch.int32), device)
        positions = max(sequence.end for _, sequence in part)
        return TileLaunch(self._shape, tiles, count, rows, positions, size)


def _locate(sequences: Sequence[SequenceRows]) -> list[tuple[int, SequenceRows]]:
    """Pair sequences with the indices of their first rows in the batch."""
    ends = accumulate(sequence.count for sequence in sequences)
    return [(end - each.count, each) for end, each in zip(ends, sequences, strict=True)]


def _set_device(device: torch.device) -> None:
    """Make ``device`` current, since Triton launches on the thread's current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
