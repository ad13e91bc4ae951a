"""Host memory for KV blocks of preempted requests.

For a GPU it is pinned, and copies run on a separate CUDA stream while steps run. A step waits, on
the device, only for blocks that it uses. On a CPU blocks are copied synchronously between steps.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from molink.errors import InvariantError
from molink.stage.mixed_kv_pool import AnyKVPool

#: Bytes per host allocation. Torch rounds pinned memory up to a power of two.
_SLAB_BYTES = 1 << 28
#: Blocks copied to measure the time.
_TIMED_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class _PendingCopy:
    """Blocks whose copy is in flight, and the event after it."""

    blocks: frozenset[int]
    done: torch.cuda.Event


class HostKVPool:
    """Host memory for ``blocks`` KV blocks; all stages use the same block ids."""

    def __init__(self, pool: AnyKVPool, blocks: int, device: torch.device) -> None:
        """Allocate lazily zeroed memory; on a CPU only used blocks take physical memory.

        Raises:
            RuntimeError: the memory can't be pinned.
        """
        self._pool = pool
        self._device = device
        self.blocks = blocks
        pinned = device.type == "cuda"
        views = [part.block_view(0) for part in pool.parts]
        self._blocks_per_slab = max(1, _SLAB_BYTES // max(1, *(view.nbytes for view in views)))
        counts = [
            min(self._blocks_per_slab, blocks - first)
            for first in range(0, blocks, self._blocks_per_slab)
        ]
        #: Memory of each part of the pool.
        self._slabs = [
            [
                torch.empty((count, *view.shape), dtype=view.dtype, pin_memory=pinned)
                for count in counts
            ]
            for view in views
        ]
        self._stream = _stream_for(device) if pinned else None
        self._pending: list[_PendingCopy] = []
        #: Host blocks with valid contents.
        self._filled_hosts: set[int] = set()

    def copy_out(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Swap ``blocks`` out: copy them after all steps launched so far.

        Raises:
            InvariantError: invalid ids.
        """
        self._check_ids(blocks, hosts)
        self._filled_hosts.difference_update(hosts)
        self._copy_pairs(
            [(host, pooled) for pooled, host in self._view_pairs(blocks, hosts)], blocks
        )
        self._filled_hosts.update(hosts)

    def copy_in(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Swap ``hosts`` in: copy them into the pool for later steps, and free them.

        Raises:
            InvariantError: invalid ids, or a host block has no contents.
        """
        self._check_ids(blocks, hosts)
        if not self._filled_hosts.issuperset(hosts):
            raise InvariantError("swapped-in blocks were never copied to host memory")
        self._filled_hosts.difference_update(hosts)
        self._copy_pairs(list(self._view_pairs(blocks, hosts)), blocks)

    def wait_for_copies(self, tables: Iterable[Sequence[int]]) -> None:
        """Make later launches wait for pending copies of the blocks in ``tables``."""
        if not self._pending:
            return
        self._pending = [each for each in self._pending if not _is_done(each)]
        if not self._pending:
            return
        used = set(chain.from_iterable(tables))
        for each in self._pending:
            if not used.isdisjoint(each.blocks):
                torch.cuda.current_stream(self._device).wait_event(each.done)

    def measure_block_s(self) -> float:
        """Measure the seconds per block and direction; call it before any copy."""
        count = min(self.blocks, self._pool.blocks, _TIMED_BLOCKS)
        ids = range(count)
        for turn in range(2):  # the first round touches fresh memory
            began = time.perf_counter()
            self.copy_out(ids, ids)
            self.copy_in(ids, ids)
            if self._stream is not None:
                self._stream.synchronize()
            if turn:
                return (time.perf_counter() - began) / (2 * count)
        return 0.0

    def _copy_pairs(self, pairs: Sequence[tuple[Tensor, Tensor]], blocks: Sequence[int]) -> None:
        """Copy sources to targets; ``blocks`` of the pool are in use until the copies end."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._pending.append(_PendingCopy(frozenset(blocks), self._stream.record_event()))

    def _view_pairs(
        self, blocks: Sequence[int], hosts: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the memory of blocks in the pool with that of blocks in host memory."""
        for part, slabs in zip(self._pool.parts, self._slabs, strict=True):
            for block, host in zip(blocks, hosts, strict=True):
                slab, index = divmod(host, self._blocks_per_slab)
                yield part.block_view(block), slabs[slab][index]

    def _check_ids(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        ranges = ((blocks, self._pool.blocks), (hosts, self.blocks))
        for ids, total in ranges:
            if any(not 0 <= each < total for each in ids) or len(set(ids)) != len(ids):
                raise InvariantError(f"block ids are duplicated or not below {total}")


def _stream_for(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _is_done(copying: _PendingCopy) -> bool:
    return bool(copying.done.query())  # type: ignore[no-untyped-call]
