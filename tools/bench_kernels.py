"""Compiled CPU matrix products compared with torch's, measured alternately.

    python -m tools.bench_kernels --json

Per number of rows: median microseconds of a product with uncached weights, and its read and compute
rates. ``bf16`` is compared with oneDNN's packed product; ``float32`` rows with bf16 weights, for
CPUs without bf16, with torch's float32 weights. ``AVX2`` variants are compiled for AVX2 only, with
bf16 and float16 weights.

    python -m tools.bench_kernels --formats q4_k q6_k nf4

measures quantized weights instead, with rows in 8 bits and in full precision.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from molink.gguf.block_formats import BLOCK_FORMATS
from molink.stage.cpu_kernels.arithmetic import WidenedBf16, WidenedF16
from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul
from molink.stage.cpu_kernels.block_matmul import BlockMatMul
from molink.stage.cpu_kernels.create import (
    create_block_matmul,
    create_integer_matmul,
    create_matmul,
)
from molink.stage.cpu_kernels.matmul import MatMul
from molink.stage.linear import PackedLinear, PlainLinear, can_pack
from molink.stage.linear.nf4 import NF4_FORMAT
from molink.stage.torch_dtypes import cpu_supports_bf16

_ROWS = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256)
_WEIGHTS, _ROUNDS = 12, 5
#: Byte of which 16- and 32-bit floats are neither huge nor tiny.
_FILL = 60
_AVX2 = "+avx,+avx2,+fma,+f16c"

Product = Callable[[int, Tensor], Tensor]
#: Kind, type of rows, bytes of a weight, product.
_Side = tuple[str, torch.dtype, float, Product]


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
    sides: list[_Side] = []
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
    return _measure_sides(sides, columns, depth)


@torch.inference_mode()
def measure_formats(names: Sequence[str], columns: int, depth: int, threads: int) -> list[Result]:
    """Measure products of weights in these formats."""
    dtype = torch.bfloat16 if cpu_supports_bf16() else torch.float32
    sides: list[_Side] = []
    for name in names:
        form = NF4_FORMAT if name == "nf4" else BLOCK_FORMATS[name]
        for kind, product in (
            ("rows in 8 bits", create_integer_matmul(form, dtype, threads)),
            ("full rows", create_block_matmul(form, dtype, threads)),
        ):
            if product is not None:
                made = make_quantized(product, columns, depth)
                sides.append((f"{name}, {kind}", product.dtype, form.nbytes / form.block, made))
    return _measure_sides(sides, columns, depth)


def make_quantized(multiply: BlockMatMul | IntegerBlockMatMul, columns: int, depth: int) -> Product:
    """Products of weights whose scales are about 1."""
    nbytes = depth // multiply.form.block * multiply.columns * multiply.form.nbytes
    shape = columns // multiply.columns, nbytes
    packed = [torch.full(shape, _FILL, dtype=torch.uint8) for _ in range(_WEIGHTS)]
    bias = torch.zeros(columns)
    return lambda index, rows: multiply(packed[index], rows, bias)


def _measure_sides(sides: Sequence[_Side], columns: int, depth: int) -> list[Result]:
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
    names = (*BLOCK_FORMATS, "nf4")
    parser.add_argument("--formats", nargs="+", choices=names, default=(), metavar="NAME")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = options.columns, options.depth
    if options.formats:
        found = measure_formats(options.formats, *shape, options.threads)
    else:
        found = measure(*shape, options.threads)
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
