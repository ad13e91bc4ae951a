"""Attention by torch's flash kernels, which read the paged pool in place.

``torch.nn.attention.varlen.varlen_attn`` with a block table: on CUDA from compute capability 8.0,
in fp16 and bf16, with pages of a multiple of :data:`PAGE_MULTIPLE` positions. Decode rows and
prefill chunks are separate calls: the kernel packs the query heads of a KV head only if there is
one row per sequence and no window, and decode rows need no mask.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from molink.stage.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class PageTable:
    """Block tables of some sequences in the kernel's form, int32 on the device.

    ``table [n, pages]`` has their pages, ``num_positions [n]`` their valid positions, ``starts [n +
    1]`` their first rows. ``ends [n + 1]`` is required, but unused with pages.
    """

    table: Tensor
    num_positions: Tensor
    starts: Tensor
    ends: Tensor

    @classmethod
    def from_numbers(cls, numbers: Tensor, count: int) -> "PageTable":
        """Split the array of :func:`pack_page_table`."""
        width = (len(numbers) - 3 * count - 2) // count
        sizes = [count * width, count, count + 1, count + 1]
        table, used, starts, ends = torch.split(numbers, sizes)
        return cls(table.view(count, width), used, starts, ends)


def pack_page_table(sequences: Sequence[SequenceRows], width: int, page: int) -> "array[int]":
    """Pack a :class:`PageTable` into one array, for a single copy.

    Tables are padded to ``width`` with their first page, which is not read.
    """
    table, used = array("i"), array("i")
    starts, ends = array("i", [0]), array("i", [0])
    for index, sequence in enumerate(sequences):
        length = sequence.start + sequence.count
        pages = sequence.blocks[: -(-length // page)]
        table.extend(pages)
        table.extend([pages[0]] * (width - len(pages)))
        used.append(length)
        starts.append(starts[-1] + sequence.count)
        ends.append((index + 1) * width * page)
    return table + used + starts + ends


def row_indices(part: Sequence[tuple[int, SequenceRows]], device: torch.device) -> Tensor | slice:
    """Return the indices of sequences' rows in the batch, as a slice if contiguous."""
    first, (last, sequence) = part[0][0], part[-1]
    if last + sequence.count - first == sum(each.count for _, each in part):
        return slice(first, last + sequence.count)
    rows = [row + i for row, each in part for i in range(each.count)]
    return upload_tensor(torch.tensor(rows), device)


#: Page sizes must be multiples of this.
PAGE_MULTIPLE = 256

FlashKernel = Callable[..., Any]


def find_kernel() -> FlashKernel | None:
    """Return ``varlen_attn`` if this torch version has it with a block table."""
    import inspect

    try:
        from torch.nn.attention.varlen import varlen_attn
    except (ImportError, RuntimeError):
        return None
    wanted = {"block_table", "seqused_k", "enable_gqa", "window_size", "scale"}
    return varlen_attn if wanted <= inspect.signature(varlen_attn).parameters.keys() else None


@dataclass(frozen=True, slots=True)
class FlashCall:
    """A kernel call for some rows of the batch.

    ``max_rows`` and ``max_positions`` are maxima over its sequences.
    """

    kernel: FlashKernel
    shape: AttentionShape
    rows: Tensor | slice
    pages: PageTable
    max_rows: int
    max_positions: int

    def attend_rows(self, layer: int, heads: Tensor, pool: KVPool) -> Tensor:
        """Compute attention of the rows, ``[n, heads * head_dim]``."""
        shape, pages = self.shape, self.pages
        keys, values = pool.layer_pages(layer)
        window = shape.windows[layer] if shape.windows[layer] < self.max_positions else 0
        right = -1 if self.max_rows == 1 and not window else 0
        attended: Tensor = self.kernel(
            heads[self.rows, : shape.groups * shape.kv_heads],
            keys,
            values,
            pages.starts,
            pages.ends,
            self.max_rows,
            self.max_positions,
            scale=shape.scale,
            window_size=(window - 1, right),
            enable_gqa=shape.groups > 1,
            seqused_k=pages.num_positions,
            block_table=pages.table,
        )
        return attended.flatten(1)

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        """See :class:`~molink.stage.attention.base.LayerAttention`; the batch is these rows."""
        return self.attend_rows(layer, heads, pool)


class _FlashLayers:
    """Decode rows and prefill chunks of one forward."""

    def __init__(self, calls: Sequence[FlashCall]) -> None:
        self._calls = calls

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        shape = self._calls[0].shape
        attended = heads.new_empty(len(heads), shape.groups * shape.kv_heads * shape.head_dim)
        for call in self._calls:
            attended[call.rows] = call.attend_rows(layer, heads, pool)
        return attended


class _StaticFlash:
    """See :class:`~molink.stage.attention.base.StaticAttention`."""

    def __init__(
        self,
        kernel: FlashKernel,
        shape: AttentionShape,
        rows: int,
        width: int,
        page: int,
        allocate_tables: AllocateTables,
    ) -> None:
        self._width, self._page = width, page
        pages = PageTable.from_numbers(allocate_tables(rows * (width + 3) + 2), rows)
        self._call = FlashCall(kernel, shape, slice(0, rows), pages, 1, width * page)

    def pack_tables(self, sequences: Sequence[SequenceRows]) -> "array[int]":
        return pack_page_table(sequences, self._width, self._page)

    def derive_masks(self) -> None:
        """Do nothing: the kernel reads the tables directly."""

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        return self._call(layer, heads, pool)


class FlashAttention:
    """The ``flash`` backend; softcap, sinks and chunked windows are not supported."""

    reads_pages, reads_unwritten, spans_context = True, True, False

    def __init__(self, shape: AttentionShape, kernel: FlashKernel) -> None:
        self._shape, self._kernel = shape, kernel

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerAttention:
        kinds: dict[bool, list[tuple[int, SequenceRows]]] = {True: [], False: []}
        row = 0
        for sequence in sequences:
            kinds[sequence.count == 1].append((row, sequence))
            row += sequence.count
        calls = [self._make_call(part, block_size, device) for part in kinds.values() if part]
        return calls[0] if len(calls) == 1 else _FlashLayers(calls)

    def prepare_static(
        self,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate_tables: AllocateTables,
    ) -> StaticAttention:
        return _StaticFlash(self._kernel, self._shape, rows, blocks, block_size, allocate_tables)

    def _make_call(
        self, part: Sequence[tuple[int, SequenceRows]], page: int, device: torch.device
    ) -> FlashCall:
        sequences = [sequence for _, sequence in part]
        width = max(-(-(each.start + each.count) // page) for each in sequences)
        numbers = torch.frombuffer(pack_page_table(sequences, width, page), dtype=torch.int32)
        return FlashCall(
            kernel=self._kernel,
            shape=self._shape,
            rows=row_indices(part, device),
            pages=PageTable.from_numbers(upload_tensor(numbers, device), len(sequences)),
            max_rows=max(sequence.count for sequence in sequences),
            max_positions=width * page,
        )
