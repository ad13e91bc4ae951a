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
from molink.stage.pool import KVPool

#: Bytes of a piece of host memory. Torch rounds what it pins up to a power of two.
_SLAB = 1 << 28
#: Copies there and back that are timed.
_TIMED = 4


@dataclass(frozen=True, slots=True)
class _Copying:
    """Blocks of the pool that are being copied, and what says that they are."""

    blocks: frozenset[int]
    done: torch.cuda.Event


class HostPool:
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
        shape, dtype = pool.block(0).shape, pool.block(0).dtype
        self._each = max(1, _SLAB // max(1, shape.numel() * dtype.itemsize))
        counts = [min(self._each, blocks - first) for first in range(0, blocks, self._each)]
        self._slabs = [
            torch.empty((count, *shape), dtype=dtype, pin_memory=pinned) for count in counts
        ]
        self._stream = _stream_for(device) if pinned else None
        self._copying: list[_Copying] = []
        #: Host blocks that hold what was copied there.
        self._filled: set[int] = set()

    def copy_out(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Copy ``blocks`` of the pool, as all steps before have left them.

        Raises:
            InvariantError: the ids make no sense.
        """
        self._check(blocks, hosts)
        self._filled.difference_update(hosts)
        self._copy([(self._view(h), self._pool.block(b)) for b, h in _pairs(blocks, hosts)], blocks)
        self._filled.update(hosts)

    def copy_in(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        """Copy ``hosts`` into the pool, for steps to come; they hold nothing any more.

        Raises:
            InvariantError: the ids make no sense, or nothing was copied there.
        """
        self._check(blocks, hosts)
        if not self._filled.issuperset(hosts):
            raise InvariantError("blocks are to come back that were not copied to host memory")
        self._filled.difference_update(hosts)
        self._copy([(self._pool.block(b), self._view(h)) for b, h in _pairs(blocks, hosts)], blocks)

    def wait(self, tables: Iterable[Sequence[int]]) -> None:
        """Let what is launched from now on wait for copies of blocks in ``tables``."""
        if not self._copying:
            return
        self._copying = [each for each in self._copying if not _is_done(each)]
        if not self._copying:
            return
        used = set(chain.from_iterable(tables))
        for each in self._copying:
            if not used.isdisjoint(each.blocks):
                torch.cuda.current_stream(self._device).wait_event(each.done)

    def block_s(self) -> float:
        """Seconds that a block takes one way, as measured now; it is before anything is copied."""
        count = min(self.blocks, self._pool.blocks, _TIMED)
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

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], blocks: Sequence[int]) -> None:
        """Copy each target's source; ``blocks`` of the pool are in use until that is done."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._copying.append(_Copying(frozenset(blocks), self._stream.record_event()))

    def _view(self, host: int) -> Tensor:
        return self._slabs[host // self._each][host % self._each]

    def _check(self, blocks: Sequence[int], hosts: Sequence[int]) -> None:
        ranges = ((blocks, self._pool.blocks), (hosts, self.blocks))
        for ids, total in ranges:
            if any(not 0 <= each < total for each in ids) or len(set(ids)) != len(ids):
                raise InvariantError(f"blocks to be copied are not all different ones of {total}")


def _stream_for(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _is_done(copying: _Copying) -> bool:
    return bool(copying.done.query())  # type: ignore[no-untyped-call]


def _pairs(blocks: Sequence[int], hosts: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(blocks, hosts, strict=True)
