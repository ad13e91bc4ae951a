"""Memory of the host for KV blocks that a stage's pool has no room for now.

On a GPU it is pinned, and copies run on a stream of their own, beside the steps: only a step that
uses blocks which are being copied waits, on the device, until they are. On a CPU blocks are copied
at once, between two steps.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from molink.errors import InvariantError
from molink.stage.kv_pool import KVPool

#: Bytes of a piece of host memory. Torch rounds what it pins up to a power of two.
_SLAB_BYTES = 1 << 28
#: Copies there and back that are timed.
_TIMED_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class _PendingCopy:
    """Blocks of the pool that are being copied, and what says that they are."""

    blocks: frozenset[int]
    done: torch.cuda.Event


class HostKVPool:
    """Up to ``blocks`` blocks of ``pool``, of which each stage has the same under the same id."""

    def __init__(self, pool: KVPool, blocks: int, device: torch.device) -> None:
        """Not zeroed: a CPU then has memory only for blocks that were in use.

        Raises:
            RuntimeError: so much memory can't be pinned.
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
        #: Host blocks that hold what was copied there.
        self._filled_hosts: set[int] = set()

    def copy_out(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Copy ``blocks`` of the pool, as all steps before have left them.

        Raises:
            InvariantError: the ids make no sense.
        """
        self._check_ids(blocks, hosts)
        self._filled_hosts.difference_update(hosts)
        self._copy_pairs(
            [(self._block_view(h), self._pool.block_view(b)) for b, h in _zip_ids(blocks, hosts)],
            blocks,
        )
        self._filled_hosts.update(hosts)

    def copy_in(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Copy ``hosts`` into the pool, for steps to come; they hold nothing any more.

        Raises:
            InvariantError: the ids make no sense, or nothing was copied there.
        """
        self._check_ids(blocks, hosts)
        if not self._filled_hosts.issuperset(hosts):
            raise InvariantError("blocks are to come back that were not copied to host memory")
        self._filled_hosts.difference_update(hosts)
        self._copy_pairs(
            [(self._pool.block_view(b), self._block_view(h)) for b, h in _zip_ids(blocks, hosts)],
            blocks,
        )

    def wait_for_copies(self, tables: Iterable[Sequence[int]]) -> None:
        """Let what is launched from now on wait for copies of blocks in ``tables``."""
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
        """Seconds that a block takes one way, as measured now; it is before anything is copied."""
        count = min(self.blocks, self._pool.blocks, _TIMED_BLOCKS)
        ids = range(count)
        for turn in range(2):  # memory is there only once it has been written to
            began = time.perf_counter()
            self.copy_out(ids, ids)
            self.copy_in(ids, ids)
            if self._stream is not None:
                self._stream.synchronize()
            if turn:
                return (time.perf_counter() - began) / (2 * count)
        return 0.0

    def _copy_pairs(self, pairs: Sequence[tuple[Tensor, Tensor]], blocks: Sequence[int]) -> None:
        """Copy each target's source; ``blocks`` of the pool are in use until that is done."""
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
                raise InvariantError(f"blocks to be copied are not all different ones of {total}")


def _stream_for(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _is_done(copying: _PendingCopy) -> bool:
    return bool(copying.done.query())  # type: ignore[no-untyped-call]


def _zip_ids(blocks: Sequence[int], hosts: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(blocks, hosts, strict=True)
