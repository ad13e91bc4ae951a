"""Asynchronous copies between host and device, with one wait at the end of a step.

A copy from pageable memory makes CUDA wait for all earlier work. So rows and tables go through
pinned memory, which torch caches and reuses only after the copy has ended. Each process tests
pinned copies once per device, since a late or misplaced copy would corrupt answers.
"""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

log = logging.getLogger(__name__)

#: Initial size of a :class:`StagingBuffer`.
_STAGING_BYTES = 1 << 16

#: Sizes of tested copies, and their number in flight.
_TRIED, _TOGETHER = (1, 7, 4096, 1 << 18), 16


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of any shape to ``device`` unless it is there."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    if not has_pinned(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def gather_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Select rows in ascending order; copy only if they have gaps."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[rows[0] : rows[-1] + 1]
    return tensor.index_select(0, upload_integers(rows, tensor.device))


def download_rows(parts: Sequence[Tensor]) -> list[bytearray]:
    """Download rows ``[n, hidden]`` as bytes, with one wait for all of them.

    The buffer is prefilled with NaN, so that a row that never arrives fails its request instead of
    exposing another request's data.
    """
    return [_copy_bytes(part) for part in download_tensors(parts)]


def download_tensors(parts: Sequence[Tensor]) -> list[Tensor]:
    """Download tensors ``[n, m]``, with one wait for all of them.

    A row that never arrives begins with NaN, or with -1 for integers.
    """
    if all(part.device.type == "cpu" for part in parts):
        return list(parts)
    if not all(has_pinned(part.device) for part in parts):
        return [part.cpu() for part in parts]
    return _copy_pinned(parts)


@dataclass(frozen=True, slots=True)
class Download:
    """Tensors being copied to the host; ``copied`` is the event after the last copy."""

    tensors: list[Tensor]
    copied: torch.cuda.Event | None = None

    def wait(self) -> list[Tensor]:
        """Wait for the copies, but not for later launches; return the tensors."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.tensors


def begin_download(parts: Sequence[Tensor]) -> Download:
    """Begin to download tensors ``[n, m]`` of one device; see :func:`download_tensors`."""
    if parts[0].device.type == "cpu":
        return Download(list(parts))
    if not has_pinned(parts[0].device):
        return Download([part.cpu() for part in parts])
    staged = _stage_pinned(parts)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return Download(staged, copied)


def _copy_pinned(parts: Sequence[Tensor]) -> list[Tensor]:
    staged = _stage_pinned(parts)
    for device in {part.device for part in parts if part.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return staged


def _stage_pinned(parts: Sequence[Tensor]) -> list[Tensor]:
    staged = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
    for pinned, part in zip(staged, parts, strict=True):
        pinned[:, :1] = torch.nan if part.dtype.is_floating_point else -1
        pinned.copy_(part, non_blocking=True)
    return staged


def _copy_bytes(tensor: Tensor) -> bytearray:
    data = bytearray(tensor.nbytes)
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    return data


class StagingBuffer:
    """Host memory through which each step's numbers go to the device in one copy.

    Two growing buffers alternate; a buffer is rewritten only after its last copy has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type != "cpu" and has_pinned(device)
        self._turns = [_PinnedTurn(self._pinned) for _ in range(2)]

    def upload(self, target: Tensor, parts: "Sequence[array[int] | memoryview]") -> None:
        """Copy ``parts``, one after the other, into ``target`` (uint8), from its first byte on."""
        turn = self._turns[0]
        self._turns.reverse()
        views = [memoryview(part).cast("B") for part in parts]
        nbytes = sum(map(len, views))
        turn.prepare(nbytes)
        first = 0
        for view in views:
            turn.view[first : first + len(view)] = view
            first += len(view)
        target[:nbytes].copy_(turn.memory[:nbytes], non_blocking=self._pinned)
        turn.mark_copied()


class _PinnedTurn:
    """One buffer of a :class:`StagingBuffer`, pinned if pinned copies work."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._copied: torch.cuda.Event | None = None
        self._allocate(_STAGING_BYTES)

    def _allocate(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        self.view = self.memory.numpy().data

    def prepare(self, nbytes: int) -> None:
        """Wait for the last copy, and make room for ``nbytes``."""
        if self._copied is not None:
            self._copied.synchronize()
        if nbytes > len(self.view):
            self._allocate(1 << (nbytes - 1).bit_length())

    def mark_copied(self) -> None:
        """Record that a copy was launched."""
        if self._pinned:
            if self._copied is None:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()


def upload_integers(numbers: "Sequence[int] | array[int]", device: torch.device) -> Tensor:
    """Upload integers as int64 ``[n]``."""
    is_packed = isinstance(numbers, array) and numbers.typecode == "q"
    packed = numbers if is_packed else array("q", numbers)
    if not packed:
        return torch.empty(0, dtype=torch.int64, device=device)
    return upload_tensor(torch.frombuffer(packed, dtype=torch.int64), device)


@cache
def has_pinned(device: torch.device) -> bool:
    """Check that asynchronous copies of pinned memory work on a device."""
    try:
        error = pinned_error(device)
    except RuntimeError as failed:  # pinning fails, for example beyond WSL's limit
        log.warning("pinned copies fail on %s (%s): using synchronous copies", device, failed)
        return False
    if error:
        log.warning("pinned copies are wrong on %s: using synchronous copies", device)
    return not error


@torch.inference_mode()
def pinned_error(device: torch.device) -> float:
    """Return the largest error of data after a round trip through pinned memory."""
    worst = 0.0
    for size in _TRIED:
        sent = [torch.arange(size) + turn for turn in range(_TOGETHER)]
        # All copies are in flight before the first is used, and their pinned memory is released by
        # then.
        there = [one.pin_memory().to(device, non_blocking=True) for one in sent]
        target = torch.empty_like(there[0])
        copies = []
        for one in sent:
            target.copy_(one.pin_memory(), non_blocking=True)
            copies.append(target.clone())
        rows = [one.view(1, -1).double() for one in (*there, *copies)]
        for found, expected in zip(_copy_pinned(rows), (*sent, *sent), strict=True):
            difference = float((found - expected).abs().max())
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst
