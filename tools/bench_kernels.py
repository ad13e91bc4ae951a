"""Compiled CPU matrix products beside torch's, taking turns.

    python -m tools.bench_kernels --json

Per number of rows: median microseconds of a product with uncached weights, and its read and compute
rates. ``bf16`` is compared with oneDNN's packed product; ``float32`` rows with bf16 weights, for
CPUs without bf16, with torch's float32 weights. ``AVX2`` variants are compiled for AVX2 only, with
bf16 and float16 weights.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from molink.stage.cpu_kernels.arithmetic import WidenedBf16, WidenedF16
from molink.stage.cpu_kernels.create import create_matmul
from molink.stage.cpu_kernels.matmul import MatMul
from molink.stage.linear import PackedLinear, PlainLinear, can_pack

_ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)
_WEIGHTS, _ROUNDS = 12, 5
_AVX2 = "+avx,+avx2,+fma,+f16c"

Product = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Result:
    """One product with one number of rows."""

    kind: str
    rows: int
    microseconds: float
    read_gb_s: float
    gflop_s: float


def make_compiled(multiply: MatMul, weights: list[Tensor]) -> Product:
    """Compiled products."""
    packed = [multiply.pack_weight(weight) for weight in weights]
    bias = torch.zeros(len(weights[0]))
    return lambda index, rows: multiply(packed[index], rows, bias)


def make_torch(weights: list[Tensor], dtype: torch.dtype) -> Product:
    """Torch's best products."""
    packs = can_pack(dtype, torch.device("cpu"))
    kind = PackedLinear.pack_weight if packs else PlainLinear
    made = [kind(weight.to(dtype), None) for weight in weights]
    return lambda index, rows: made[index](rows)


@torch.inference_mode()
def measure(columns: int, depth: int, threads: int) -> list[Result]:
    """Measure all kinds that this CPU supports."""
    weights = [torch.randn(columns, depth).bfloat16() for _ in range(_WEIGHTS)]
    sides: list[tuple[str, torch.dtype, int, Product]] = []
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        multiply = create_matmul(dtype, threads)
        if multiply is not None:
            sides.append((f"{name}, compiled", dtype, 2, make_compiled(multiply, weights)))
        if multiply is not None and dtype is torch.float32 and threads == 1:
            narrow = MatMul(WidenedBf16(), features=_AVX2)
            sides.append((f"{name}, compiled, AVX2", dtype, 2, make_compiled(narrow, weights)))
            half = MatMul(WidenedF16(), features=_AVX2)
            sides.append((f"{name}, float16, AVX2", dtype, 2, make_compiled(half, weights)))
        size = dtype.itemsize
        sides.append((f"{name}, torch", dtype, size, make_torch(weights, dtype)))
    found = []
    for count in _ROWS:
        taken: dict[str, list[float]] = {kind: [] for kind, *_ in sides}
        for _ in range(_ROUNDS):
            for kind, dtype, _, product in sides:
                rows = torch.randn(count, depth).to(dtype)
                for index in range(_WEIGHTS):
                    begin = time.perf_counter()
                    product(index, rows)
                    taken[kind].append(time.perf_counter() - begin)
        for kind, _, size, _ in sides:
            seconds = statistics.median(taken[kind])
            numbers = columns * depth
            read, computed = numbers * size / seconds, 2 * numbers * count / seconds
            found.append(Result(kind, count, 1e6 * seconds, read / 1e9, computed / 1e9))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--columns", type=int, default=5632)
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = measure(options.columns, options.depth, options.threads)
    if options.json:
        print(json.dumps([asdict(result) for result in found], indent=1))
        return
    for one in found:
        print(
            f"{one.rows:4} rows, {one.kind:24} {one.microseconds:8.0f} us"
            f" {one.read_gb_s:6.1f} GB/s {one.gflop_s:6.0f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
