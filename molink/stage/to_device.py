"""Copies between the host and a device: none is waited for but the last of a step.

A copy from or to ordinary host memory makes CUDA wait for everything before it. So rows and tables
go through pinned memory, which torch caches and doesn't hand out again before the copy has ended.
What is computed on a CPU isn't copied to it.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; the same one if it is there."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def take_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a tensor, in ascending order; copied only if they have gaps."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[rows[0] : rows[-1] + 1]
    return tensor.index_select(0, upload_integers(rows, tensor.device))


def download(parts: Sequence[Tensor]) -> list[bytearray]:
    """The bytes of rows ``[n, hidden]``, in memory of their own; waits once, for all of them.

    A row that doesn't come begins with NaN, so that its request fails: pinned memory still has the
    rows of an earlier step, those of another request.
    """
    if all(part.device.type == "cpu" for part in parts):
        return [_bytes(part) for part in parts]
    staged = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
    for pinned, part in zip(staged, parts, strict=True):
        pinned[:, :1] = torch.nan
        pinned.copy_(part, non_blocking=True)
    for device in {part.device for part in parts if part.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return [_bytes(pinned) for pinned in staged]


def _bytes(tensor: Tensor) -> bytearray:
    data = bytearray(tensor.nbytes)
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
    return data


def refill(target: Tensor, values: Tensor) -> None:
    """Copy ``values`` (on the host) into ``target`` (on a device, of the same shape)."""
    if target.device.type == "cpu":
        target.copy_(values)
    else:
        target.copy_(values.pin_memory(), non_blocking=True)


def upload_integers(numbers: "Sequence[int] | array[int]", device: torch.device) -> Tensor:
    """Whole numbers as int64 ``[n]`` on ``device``."""
    packed = numbers if isinstance(numbers, array) else array("q", numbers)
    if not packed:
        return torch.empty(0, dtype=torch.int64, device=device)
    return upload(torch.frombuffer(packed, dtype=torch.int64), device)
