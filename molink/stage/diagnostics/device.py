"""Measures a device for the daemon, which never imports torch.

Run as ``python -m molink.stage.diagnostics.device``.

Prints one JSON object: ``kind`` (``cpu`` or ``cuda``), ``index``, ``name``, ``total`` and ``free``
memory in bytes (available without swapping on a CPU), ``read_rate`` (bytes/s at which decode steps
stream weights), ``bf16`` (native support), ``blocks`` (products with GGUF blocks), ``narrow``
(types of weights that stay 16-bit with f32 rows), ``block_size`` (multiple that the attention
backend wants), ``instructions`` and ``threads`` (of a CPU), ``torch`` (version), ``gpus``
(number of CUDA devices).
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import psutil
import torch

from molink.facts.dtypes import NarrowDType
from molink.stage.attention.backend_check import preferred_block_size
from molink.stage.cpu_kernels.create import supports_block_weights
from molink.stage.linear import ProjectionFactory, slow_kernels
from molink.stage.torch_dtypes import TORCH_DTYPES, supports_bf16

_WEIGHT_ROWS = 4096
#: Minimum repeats, their maximum, and seconds of measuring.
_REPEATS, _MOST, _MEASURING_S = 5, 100, 0.5


def pick_device(wanted: str) -> torch.device:
    """``auto`` is the CUDA device with most free memory, else the CPU."""
    if wanted != "auto":
        return torch.device(wanted)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    return torch.device("cuda", free.index(max(free)))


def measure_read_rate(device: torch.device, nbytes: int) -> float:
    """Bytes/s at which a projection of ``nbytes`` processes one row.

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


def probe_device(wanted: str, nbytes: int) -> dict[str, object]:
    """Collect what the daemon reports of a device."""
    device = pick_device(wanted)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    index = device.index or 0
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(index)
    else:
        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    return {
        "kind": kind,
        "index": index,
        "name": describe_device(device),
        "total": int(total),
        "free": int(free),
        "read_rate": measure_read_rate(device, min(nbytes, int(free) // 4)),
        "bf16": supports_bf16(device),
        "narrow": narrow_weight_dtypes(device),
        "blocks": kind == "cpu" and supports_block_weights(),
        "block_size": preferred_block_size(device),
        "instructions": describe_instructions(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "gpus": torch.cuda.device_count(),
    }


def narrow_weight_dtypes(device: torch.device) -> tuple[NarrowDType, ...]:
    """Types of weights that stay 16-bit with float32 rows."""
    projections = _probe_projections(torch.float32, device)
    return tuple(
        kept for kept in get_args(NarrowDType) if projections.keeps_dtype(TORCH_DTYPES[kept])
    )


def _probe_projections(dtype: torch.dtype, device: torch.device) -> ProjectionFactory:
    """The projections of a stage, whose slow kernels are disabled."""
    return ProjectionFactory.probe_device(dtype, device, slow_kernels(dtype, device))


def describe_device(device: torch.device) -> str:
    """Product name of a device."""
    return describe_cpu() if device.type == "cpu" else torch.cuda.get_device_name(device.index or 0)


def describe_instructions(device: torch.device) -> str:
    """Name a CPU's instruction set, which its name need not tell; empty for a GPU."""
    if device.type != "cpu":
        return ""
    return f" ({torch.backends.cpu.get_cpu_capability()}{' with bf16' * supports_bf16(device)})"


def driver_version() -> str:
    """Version of NVIDIA's driver; empty if unknown."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""


def describe_cpu() -> str:
    """Product name of the CPU, where available."""
    table = Path("/proc/cpuinfo")  # Linux only
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or os.environ.get("PROCESSOR_IDENTIFIER") or platform.machine()


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
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    print(json.dumps(probe_device(options.device, options.mbytes << 20)), flush=True)


if __name__ == "__main__":
    main()
