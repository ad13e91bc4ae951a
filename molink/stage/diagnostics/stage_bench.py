"""Measures a stage for ``molink bench stage``: ``python -m molink.stage.diagnostics.stage_bench``.

Loads layers as a worker does, and measures their profile and the device's peak rates. Prints one
JSON object, which the command line, without torch, displays.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import psutil
import torch

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.stage_cost import StageCost
from molink.errors import MolinkError
from molink.facts.footprint import Footprint, StageSetup
from molink.facts.kernels import KernelName
from molink.facts.model import BLOCK_SIZE, Quantize
from molink.facts.profile import Profile
from molink.stage.cpu_kernels.create import supports_block_weights
from molink.stage.diagnostics.device import narrow_weight_dtypes, pick_device
from molink.stage.diagnostics.device_names import describe_cpu
from molink.stage.diagnostics.stage_profile import profile_stage
from molink.stage.diagnostics.trial_shapes import find_planes
from molink.stage.linear import ProjectionFactory, slow_kernels
from molink.stage.linear.planes_check import check_all_planes
from molink.stage.linear.quantized import has_slow_blocks
from molink.stage.stage import Stage
from molink.stage.torch_dtypes import TORCH_DTYPES, choose_dtype, cpu_supports_bf16

_MAX_KV_BYTES = 1 << 30


def run_bench(options: argparse.Namespace) -> dict[str, object]:
    """Load the layers, measure them, and compare the rates with the device's."""
    layers = (options.first, options.last)
    folder = ModelFolder.open(Path(options.model_dir), layers)
    device = pick_device(options.device)
    on_cpu = device.type == "cpu"
    kind: Literal["cpu", "cuda"] = "cpu" if on_cpu else "cuda"
    computed = TORCH_DTYPES[choose_dtype(options.dtype, folder.config.dtype, device)]
    target = StageSetup(
        kind,
        cpu_supports_bf16(),
        options.dtype,
        options.quantize,
        has_block_kernels=supports_block_weights()
        if on_cpu
        else check_all_planes(find_planes(folder.config, folder.tensors), computed, device),
        narrow_dtypes=narrow_weight_dtypes(device),
    )
    facts, free = folder.placement_facts(options.model_dir), _free_bytes(device)
    stage = Stage.load_layers(
        folder,
        layers,
        str(device),
        options.dtype,
        quantize=options.quantize,
        kv_cache_dtype=options.kv_cache_dtype,
        disabled_kernels=_find_slow(computed, device, options.quantize),
        host_experts=options.host_experts,
    )
    profile = profile_stage(
        stage, min(_MAX_KV_BYTES, free // 4), BLOCK_SIZE, seconds=options.seconds
    )
    first, last = layers
    opens, closes = first == 0, last == facts.layers
    weights = Footprint.of_stage(facts, target).weight_bytes(
        last - first, opens=opens, closes=closes
    )
    work = StageCost(folder.config, layers, stage.dtype, weights, stage.kv_cache_dtype)
    return {
        "layers": list(layers),
        "device": str(device),
        "device_name": describe_cpu() if on_cpu else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads() if on_cpu else 0,
        "torch": torch.__version__,
        "dtype": stage.dtype,
        "quantize": options.quantize,
        "kv_cache_dtype": options.kv_cache_dtype,
        "weight_bytes": stage.weight_bytes,
        "host_expert_bytes": stage.host_expert_bytes,
        "decode": _format_points(profile.decode),
        "prefill": _format_points(profile.prefill),
        "context": profile.context,
        "decode_token_s": profile.decode_token_s,
        "tile": profile.tile,
        "read": _rate_reading(work, profile, device),
        "compute": _rate_computing(work, profile, stage),
    }


def _find_slow(
    dtype: torch.dtype, device: torch.device, quantize: Quantize
) -> tuple[KernelName, ...]:
    found = slow_kernels(dtype, device)
    if quantize != "none" and device.type == "cpu" and has_slow_blocks(dtype, quantize):
        return (*found, "quantized-blocks")
    return found


def _format_points(points: Sequence[tuple[int, float]]) -> list[dict[str, float]]:
    return [
        {"rows": rows, "seconds": seconds, "tokens_per_s": rows / seconds}
        for rows, seconds in points
    ]


def _rate_reading(work: StageCost, profile: Profile, device: torch.device) -> dict[str, float]:
    """Return the read rate of a single decode row, which is memory-bound."""
    nbytes = work.decode_bytes(profile.context)
    reached, peak = nbytes / profile.decode_s(1), peak_read_rate(device)
    return {
        "bytes": nbytes,
        "bytes_per_s": reached,
        "peak_bytes_per_s": peak,
        "share": reached / peak,
    }


def _rate_computing(work: StageCost, profile: Profile, stage: Stage) -> dict[str, float]:
    """Return the compute rate of the most efficient chunk."""
    rates = {rows: work.prefill_flops(rows) / seconds for rows, seconds in profile.prefill}
    rows = max(rates, key=rates.__getitem__)
    peak = peak_matmul_rate(stage.device, TORCH_DTYPES[stage.dtype])
    return {
        "rows": rows,
        "flops": work.prefill_flops(rows),
        "flops_per_s": rates[rows],
        "peak_flops_per_s": peak,
        "share": rates[rows] / peak,
    }


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m molink.stage.diagnostics.stage_bench", description=__doc__
    )
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--host-experts", type=int, default=0, help="experts of a layer in RAM")
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's default")
    parser.add_argument("--seconds", type=float, default=20.0, help="maximum seconds of measuring")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the measurement; print errors to stderr and return their exit code."""
    options = _parse_arguments(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        result = run_bench(options)
    except MolinkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except (MemoryError, torch.OutOfMemoryError) as error:
        print(f"the stage doesn't fit the memory of {options.device}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result), flush=True)
    return 0


#: Bytes to read, far more than any cache holds.
_READ_BYTES = 512 << 20
#: Rows and columns of the matrices.
_CPU_SIZE = 2048
_CUDA_SIZE = 8192
_REPEATS = 5
_SECONDS = 2.0


def peak_read_rate(device: torch.device) -> float:
    """Measure the bytes/s at which a large tensor is read."""
    numbers = torch.ones(_READ_BYTES // 8, dtype=torch.int64, device=device)
    halves = numbers.view(torch.float32)
    return max(
        _measure_rate(read, _READ_BYTES, device) for read in (numbers.sum, numbers.amax, halves.sum)
    )


def peak_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the operations/s of a large square matrix product."""
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
    """Return ``amount`` per second of the fastest run of ``act``, after a warm-up."""
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


if __name__ == "__main__":
    sys.exit(main())
