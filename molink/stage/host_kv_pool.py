"""Host memory for KV blocks of preempted requests.

On a GPU it is pinned, and copies run on a separate stream while steps run; only a step that uses a
block in flight waits for it, on the device. On a CPU blocks are copied synchronously between steps.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from molink.errors import InvariantError
from molink.stage.kv_pool import KVPool

#: Bytes of a host allocation. Torch rounds pinned memory up to a power of two.
_SLAB_BYTES = 1 << 28
#: Blocks copied in the timing.
_TIMED_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class _PendingCopy:
    """Blocks whose copy is in flight, and the event that ends it."""

    blocks: frozenset[int]
    done: torch.cuda.Event


class HostKVPool:
    """Host memory for ``blocks`` KV blocks; all stages use the same block ids."""

    def __init__(self, pool: KVPool, blocks: int, device: torch.device) -> None:
        """Allocate lazily zeroed memory; on a CPU only used blocks take physical memory.

        Raises:
            RuntimeError: the memory can't be pinned.
        """
        self._pool = pool
        self._device = device
        self.blocks = blocks
        pinned = device.type == "cuda"
        shape, dtype = pool.block_view(0).shape, pool.block_view(0).dtype
        self._blocks_per_slab = max(1, _SLAB_BYTES // max(1, shape.numel() * dtype.itemsize))
        counts = [
            min(self._blocks_per_slab, blocks - first)
            for first in range(0, blocks, self._blocks_per_slab)
        ]
        self._slabs = [
            torch.empty((count, *shape), dtype=dtype, pin_memory=pinned) for count in counts
        ]
        self._stream = _stream_for(device) if pinned else None
        self._pending: list[_PendingCopy] = []
        #: Host blocks with valid contents.
        self._filled_hosts: set[int] = set()

    def copy_out(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Swap out: copy ``blocks`` after all steps launched so far.

        Raises:
            InvariantError: invalid ids.
        """
        self._check_ids(blocks, hosts)
        self._filled_hosts.difference_update(hosts)
        self._copy_pairs(
            [(self._block_view(h), self._pool.block_view(b)) for b, h in _zip_ids(blocks, hosts)],
            blocks,
        )
        self._filled_hosts.update(hosts)

    def copy_in(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Swap in: copy ``hosts`` into the pool for later steps, and free them.

        Raises:
            InvariantError: invalid ids, or a host block has no contents.
        """
        self._check_ids(blocks, hosts)
        if not self._filled_hosts.issuperset(hosts):
            raise InvariantError("swapped-in blocks were never copied to host memory")
        self._filled_hosts.difference_update(hosts)
        self._copy_pairs(
            [(self._pool.block_view(b), self._block_view(h)) for b, h in _zip_ids(blocks, hosts)],
            blocks,
        )

    def wait_for_copies(self, tables: Iterable[Sequence[int]]) -> None:
        """Make later launches wait for pending copies of blocks in ``tables``."""
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
        """Copy sources to targets; ``blocks`` of the pool are busy until the copies end."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._pending.append(_PendingCopy(frozenset(blocks), self._stream.record_event()))

    def _block_view(self, host: int) -> Tensor:
        return self._slabs[host // self._blocks_per_slab][host % self._blocks_per_slab]

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


def _zip_ids(blocks: Sequence[int], hosts: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(blocks, hosts, strict=True)
