"""Copies between the host and a device: none is waited for but the last of a step.

A copy from or to ordinary host memory makes CUDA wait for everything before it. So rows and tables
go through pinned memory, which torch caches and doesn't hand out again before the copy has ended.
What is computed on a CPU isn't copied to it.

Whether that works is tried once in a process, on each device, before it is used: a copy that is not
waited for and comes late, or from memory that was given to somebody else, would be a wrong answer.
"""

import logging
from array import array
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

log = logging.getLogger(__name__)

#: Numbers of a copy that is tried, and how many are under way at a time.
_TRIED, _TOGETHER = (1, 7, 4096, 1 << 18), 16


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; the same one if it is there."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    if not has_pinned(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def gather_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a tensor, in ascending order; copied only if they have gaps."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[rows[0] : rows[-1] + 1]
    return tensor.index_select(0, upload_integers(rows, tensor.device))


def download_rows(parts: Sequence[Tensor]) -> list[bytearray]:
    """The bytes of rows ``[n, hidden]``, in memory of their own; waits once, for all of them.

    A row that doesn't come begins with NaN, so that its request fails: pinned memory still has the
    rows of an earlier step, those of another request.
    """
    return [_copy_bytes(part) for part in download_tensors(parts)]


def download_tensors(parts: Sequence[Tensor]) -> list[Tensor]:
    """Tensors ``[n, m]`` in memory of the host; waits once, for all of them.

    A row that doesn't come begins with NaN, or with -1 if it has whole numbers.
    """
    if all(part.device.type == "cpu" for part in parts):
        return list(parts)
    if not all(has_pinned(part.device) for part in parts):
        return [part.cpu() for part in parts]
    return _copy_pinned(parts)


def _copy_pinned(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same rows in pinned memory."""
    staged = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
    for pinned, part in zip(staged, parts, strict=True):
        pinned[:, :1] = torch.nan if part.dtype.is_floating_point else -1
        pinned.copy_(part, non_blocking=True)
    for device in {part.device for part in parts if part.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return staged


def _copy_bytes(tensor: Tensor) -> bytearray:
    data = bytearray(tensor.nbytes)
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    return data


def upload_into(target: Tensor, values: Tensor) -> None:
    """Copy ``values`` (on the host) into ``target`` (on a device, of the same shape)."""
    if target.device.type == "cpu" or not has_pinned(target.device):
        target.copy_(values)
    else:
        target.copy_(values.pin_memory(), non_blocking=True)


def upload_integers(numbers: "Sequence[int] | array[int]", device: torch.device) -> Tensor:
    """Whole numbers as int64 ``[n]`` on ``device``."""
    packed = numbers if isinstance(numbers, array) else array("q", numbers)
    if not packed:
        return torch.empty(0, dtype=torch.int64, device=device)
    return upload_tensor(torch.frombuffer(packed, dtype=torch.int64), device)


@cache
def has_pinned(device: torch.device) -> bool:
    """Whether copies of pinned memory that aren't waited for give what they should on a GPU."""
    try:
        error = pinned_error(device)
    except RuntimeError as failed:  # no memory can be pinned (WSL has a bound for it, say)
        log.warning("pinned copies fail on %s (%s): copies are waited for instead", device, failed)
        return False
    if error:
        log.warning("pinned copies are wrong on %s: copies are waited for instead", device)
    return not error


@torch.inference_mode()
def pinned_error(device: torch.device) -> float:
    """Greatest difference of what is copied to a GPU and back to what was sent; 0 if it works."""
    worst = 0.0
    for size in _TRIED:
        sent = [torch.arange(size) + turn for turn in range(_TOGETHER)]
        # Each is used after all others were begun; the pinned memory of each is free by then.
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
