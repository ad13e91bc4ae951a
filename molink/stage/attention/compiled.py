"""Attention by code compiled for this CPU, which reads pages in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.errors import InvariantError
from molink.stage.attention.base import AllocateTables, AttentionShape, StaticAttention
from molink.stage.attention.gather import GatherAttention
from molink.stage.batch import SequenceRows
from molink.stage.cpu_kernels.create import create_attention_kernel
from molink.stage.cpu_kernels.kernel_shape import AttentionKernelShape
from molink.stage.kv_pool import KVPool

if TYPE_CHECKING:
    from molink.stage.cpu_kernels.attention_kernel import AttentionKernel


@dataclass(frozen=True, slots=True)
class CompiledLayers:
    """Attention of one forward.

    ``passes``, ``tables`` and ``scratch`` are inputs of
    :class:`~molink.stage.cpu_kernels.attention_kernel.AttentionKernel`, which checks no bounds.
    ``first_block`` and ``last_block`` are the lowest and highest block in the tables.
    """

    attend: "AttentionKernel"
    windows: tuple[int, ...]
    passes: Tensor
    tables: Tensor
    scratch: Tensor
    first_block: int
    last_block: int

    def __call__(
        self, layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None = None
    ) -> Tensor:
        if self.first_block < 0 or self.last_block >= pool.blocks:
            raise InvariantError(
                f"blocks {self.first_block} to {self.last_block} are not in a pool of {pool.blocks}"
            )
        # With 8-bit KV: codes, followed by their scales.
        keys, values = pool.layer_pages(layer)
        window = self.windows[layer]
        return self.attend(
            heads, keys, values, self.passes, self.tables, self.scratch, window, sinks
        )


def kernel_shape(shape: AttentionShape, block_size: int) -> AttentionKernelShape:
    """Properties that compiled code depends on."""
    return AttentionKernelShape(
        shape.kv_heads,
        shape.groups,
        shape.head_dim,
        shape.scale,
        block_size,
        shape.softcap,
        shape.sinks,
        shape.quantizes,
        shape.chunked,
    )


def compile_attention(
    shape: AttentionShape, block_size: int, dtype: torch.dtype
) -> "AttentionKernel | None":
    """Compile code for this CPU and torch's threads; ``None`` if unsupported.

    The caller must check the results.
    """
    return create_attention_kernel(kernel_shape(shape, block_size), dtype, torch.get_num_threads())


class CompiledAttention:
    """The ``compiled`` backend, for CPUs."""

    reads_pages, reads_unwritten, spans_context = True, True, False

    def __init__(self, shape: AttentionShape, attend: "AttentionKernel") -> None:
        self._attend, self._windows = attend, shape.windows
        self._gather = GatherAttention(shape)

    def prepare_layers(
        self,
        sequences: Sequence[SequenceRows],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> CompiledLayers:
        attend = self._attend
        rows = sum(sequence.count for sequence in sequences)
        most = attend.shape.choose_pass_rows(rows, attend.threads)
        passes: list[tuple[int, int, int, int]] = []
        table: list[int] = []
        row = 0
        for sequence in sequences:
            for done in range(0, sequence.count, most):
                count = min(most, sequence.count - done)
                passes.append((row + done, count, sequence.start + done, len(table)))
            table.extend(sequence.blocks)
            row += sequence.count
        # Interleave passes across threads, since later rows of a prompt take longer.
        shares = (passes[thread :: attend.threads] for thread in range(attend.threads))
        return CompiledLayers(
            attend,
            self._windows,
            torch.tensor([one for share in shares for one in share], dtype=torch.int64),
            torch.tensor(table, dtype=torch.int64),
            attend.allocate_scratch(),
            min(table),
            max(table),
        )

    def prepare_static(
        self,
        rows: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate_tables: AllocateTables,
    ) -> StaticAttention:
        """See :class:`~molink.stage.attention.base.AttentionBackend`; a CPU has no CUDA graphs."""
        return self._gather.prepare_static(rows, blocks, block_size, dtype, allocate_tables)
