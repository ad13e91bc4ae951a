"""Times products of low-bit weights on a card with several tiles, splits and steps.

    python -m tools.tune_products --formats q4_k q6_k q8_0 --rows 1 4 16 64

Each line is a choice of the constants of :mod:`molink.stage.gpu_kernels.block_product`, with
microseconds per product, medians of CUDA graphs over weights that exceed the L2 cache, and GB/s of
packed weights. The choice in use comes first. Compiling takes longer than measuring.
"""

import argparse
import statistics
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import torch

from molink.gguf.block_formats import BLOCK_FORMATS
from molink.stage.gpu_kernels import block_product
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout

#: A small and a large projection of Llama 3 8B, ``[out, in]``.
_SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))
_BYTES, _REPEATS = 192 << 20, 20
#: Outputs and warps of a program, columns of a step, warps per multiprocessor, stages.
_TILES, _COLUMNS = ((32, 2), (64, 4), (128, 8), (128, 4)), (64, 128, 256)
_WARPS, _STAGES = (8, 12, 24), (3, 4)


def make_planes(name: str, shape: tuple[int, int], device: torch.device) -> list[BlockPlanes]:
    """Weights of random codes, of more bytes than a cache holds."""
    layout, made = PlaneLayout(BLOCK_FORMATS[name], shape), []
    while sum(planes.nbytes for planes in made) < _BYTES:
        planes = BlockPlanes.create_empty(layout, device)
        planes.words.random_()
        for plane in (planes.high, planes.scale_steps, planes.minimum_steps):
            plane.random_(0, 64)
        for plane in (planes.scales, planes.minima):
            plane.fill_(0.01)
        made.append(planes)
    return made


def list_choices(rows: int) -> Iterator[dict[str, Any]]:
    """Constants to try for some rows, those in use first."""
    tiles = block_product._TILES
    tile = next((one for one in tiles if rows <= one[0]), tiles[-1])[0]
    names = "_WARPS", "PRODUCT_STAGES", "_SUMMED_ROWS"
    yield {"_TILES": tiles, **{name: getattr(block_product, name) for name in names}}
    summed = ((tile, tile), (0, 0)) if tile <= 16 else ((0, 0),)
    for one, columns, *others in product(_TILES, _COLUMNS, _WARPS, _STAGES, summed):
        yield {"_TILES": ((tile, *one, columns),), **dict(zip(names, others, strict=True))}


def time_choice(weights: list[BlockPlanes], rows: torch.Tensor, choice: dict[str, Any]) -> float:
    """Microseconds of a product."""

    def work() -> None:
        for planes in weights:
            block_product.multiply_fused(planes, rows, None)

    with mock.patch.multiple(block_product, **choice):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times) / len(weights)


@torch.inference_mode()
def main() -> None:
    """Print a line per format, shape, rows and choice."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["q4_k", "q8_0"], choices=BLOCK_FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    options = parser.parse_args()
    device = torch.device("cuda")
    for name, shape in product(options.formats, _SHAPES):
        weights = make_planes(name, shape, device)
        for count in options.rows:
            rows = torch.randn(count, shape[1], dtype=torch.bfloat16, device=device)
            for choice in list_choices(count):
                try:
                    taken = time_choice(weights, rows, choice)
                except Exception as error:  # too much shared memory
                    print(name, shape, count, choice, type(error).__name__)
                    continue
                rate = weights[0].nbytes / taken / 1e3
                print(f"{name} {shape} {count} rows: {taken:.1f} us, {rate:.0f} GB/s, {choice}")


if __name__ == "__main__":
    main()
