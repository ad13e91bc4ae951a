"""Measures a device for the daemon, which never imports torch.

Run as ``python -m molink.stage.diagnostics.device``.

Prints one JSON object: ``kind`` (``cpu`` or ``cuda``), ``index``, ``name``, ``total`` and ``free``
memory in bytes (available without swapping on a CPU), ``read_rate`` (bytes/s at which decode steps
stream weights), ``bf16`` (native support), ``blocks`` (products with GGUF blocks), ``reads_pages``
(attention needs no copies of KV), ``narrow`` (types of weights that stay 16-bit with f32 rows),
``block_size`` (multiple that the attention backend requires), ``instructions`` and ``threads`` (of
a CPU), ``torch`` (version), ``gpus`` (number of CUDA devices). With ``--host`` also ``host``: the
same for the CPU of a GPU's PC.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import psutil
import torch

from molink.facts.dtypes import NarrowDType
from molink.facts.kernels import KernelName
from molink.stage.attention.flash import PAGE_MULTIPLE
from molink.stage.cpu_kernels.create import supports_block_weights
from molink.stage.diagnostics.device_names import describe_device, describe_instructions
from molink.stage.diagnostics.kernel_checks import find_proven_kernels
from molink.stage.linear import ProjectionFactory, slow_kernels
from molink.stage.torch_dtypes import TORCH_DTYPES, supports_bf16

_WEIGHT_ROWS = 4096
#: Minimum and maximum number of runs, and seconds of measuring.
_REPEATS, _MOST, _MEASURING_S = 5, 100, 0.5


def pick_device(wanted: str) -> torch.device:
    """Choose a device; ``auto`` means the CUDA device with most free memory, or the CPU."""
    if wanted != "auto":
        return torch.device(wanted)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    return torch.device("cuda", free.index(max(free)))


def measure_read_rate(device: torch.device, nbytes: int) -> float:
    """Measure the bytes/s at which a projection of ``nbytes`` processes one row.

    The fastest of several runs counts, since other programs only add time.
    """
    narrow = torch.float16 if device.type == "cuda" else torch.float32
    dtype = torch.bfloat16 if supports_bf16(device) else narrow
    itemsize = torch.empty((), dtype=dtype).element_size()
    columns = max(64, nbytes // (itemsize * _WEIGHT_ROWS))
    weight = torch.ones(_WEIGHT_ROWS, columns, dtype=dtype, device=device)
    projection = _probe_projections(dtype, device).create_projection(weight, None)
    row = torch.ones(1, columns, dtype=dtype, device=device)
    synchronize = _make_synchronizer(device)
    times: list[float] = []
    with torch.inference_mode():
        while len(times) <= _REPEATS or (sum(times) < _MEASURING_S and len(times) < _MOST):
            synchronize()
            begin = time.perf_counter()
            projection(row)
            synchronize()
            times.append(time.perf_counter() - begin)
    return weight.numel() * itemsize / max(1e-9, min(times[1:]))


def probe_device(
    wanted: str, nbytes: int, kernel_checks: Path | None = None, *, with_host: bool = False
) -> dict[str, object]:
    """Collect the daemon's report about a device and, if asked, about a GPU's host.

    Without a file of ``kernel_checks`` nothing is known about a GPU's kernels.
    """
    device = pick_device(wanted)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    index = device.index or 0
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(index)
    else:
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    found: dict[str, object] = {
        "kind": kind,
        "index": index,
        "name": describe_device(device),
        "total": int(total),
        "free": int(free),
        "read_rate": measure_read_rate(device, min(nbytes, int(free) // 4)),
        "bf16": supports_bf16(device),
        "narrow": narrow_weight_dtypes(device),
        "instructions": describe_instructions(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "gpus": torch.cuda.device_count(),
    }
    if with_host and kind == "cuda":
        found["host"] = probe_device("cpu", nbytes)
    # Last, since a kernel that fails may leave the device unusable.
    proven: tuple[KernelName, ...] = ()
    if kind == "cuda" and kernel_checks is not None:
        proven = find_proven_kernels(kernel_checks, device)
    return found | {
        "blocks": supports_block_weights() if kind == "cpu" else "gguf-blocks" in proven,
        "reads_pages": "triton-attention" in proven,
        "block_size": PAGE_MULTIPLE if "flash-attention" in proven else 1,
    }


def narrow_weight_dtypes(device: torch.device) -> tuple[NarrowDType, ...]:
    """List the types of weights that stay 16-bit with float32 rows."""
    projections = _probe_projections(torch.float32, device)
    return tuple(
        kept for kept in get_args(NarrowDType) if projections.keeps_dtype(TORCH_DTYPES[kept])
    )


def _probe_projections(dtype: torch.dtype, device: torch.device) -> ProjectionFactory:
    """Find the projections that a stage would use, with slow kernels disabled."""
    return ProjectionFactory.probe_device(dtype, device, slow_kernels(dtype, device))


def _make_synchronizer(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m molink.stage.diagnostics.device", description=__doc__
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--mbytes", type=int, default=256, help="size of the matrix to stream, in MB"
    )
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's default")
    parser.add_argument("--kernel-checks", type=Path, help="file with results of kernel checks")
    parser.add_argument("--host", action="store_true", help="measure the CPU beside a GPU, too")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    nbytes, checks = options.mbytes << 20, options.kernel_checks
    probe = probe_device(options.device, nbytes, checks, with_host=options.host)
    print(json.dumps(probe), flush=True)


if __name__ == "__main__":
    main()
