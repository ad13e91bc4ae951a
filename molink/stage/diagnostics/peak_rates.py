"""The best that a device can do: bytes read and operations computed per second, measured."""

import time
from collections.abc import Callable

import torch

from molink.stage.linear import ProjectionFactory

#: Bytes of the read: far beyond any cache.
_READ_BYTES = 512 << 20
#: Rows and columns of the matrices.
_CPU_SIZE = 2048
_CUDA_SIZE = 8192
_REPEATS = 5
_SECONDS = 2.0


def peak_read_rate(device: torch.device) -> float:
    """Bytes/s at which a large tensor is read, by the quickest of some plain reductions."""
    numbers = torch.ones(_READ_BYTES // 8, dtype=torch.int64, device=device)
    halves = numbers.view(torch.float32)
    return max(
        _measure_rate(read, _READ_BYTES, device) for read in (numbers.sum, numbers.amax, halves.sum)
    )


def peak_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations/s of a large square matrix product in ``dtype``."""
    size = _CUDA_SIZE if device.type == "cuda" else _CPU_SIZE
    left = torch.ones(size, size, dtype=dtype, device=device)
    right = torch.ones(size, size, dtype=dtype, device=device)
    kept = ProjectionFactory.probe_device(dtype, device).create_projection(right, None)
    operations = 2 * size**3
    with torch.inference_mode():
        return max(
            _measure_rate(product, operations, device)
            for product in (lambda: left @ right, lambda: kept(left))
        )


def _measure_rate(act: Callable[[], object], amount: int, device: torch.device) -> float:
    """``amount`` per second of the quickest run of ``act``, after one that warms up."""
    _time_run(act, device)
    taken: list[float] = []
    while len(taken) < _REPEATS and (not taken or sum(taken) < _SECONDS):
        taken.append(_time_run(act, device))
    return amount / min(taken)


def _time_run(act: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(1e-9, time.perf_counter() - begin)
