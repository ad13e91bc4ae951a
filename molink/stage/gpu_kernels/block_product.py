"""Launches the kernels of :mod:`.block_kernels` for a weight's planes."""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from molink.facts.footprint import MAX_DEQUANTIZED
from molink.facts.kernels import MIN_TRITON_CAPABILITY
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout
from molink.stage.gpu_kernels.triton_support import find_triton_problem

#: Maximum rows for the fused kernel; with more, a dequantized weight is multiplied.
MAX_FUSED_ROWS = 64
#: Tiles of a program: rows, outputs, warps, and columns per step if they divide a row. Tiles with
#: more rows have more outputs, since each program reads its rows, which then take more bytes than
#: its weights.
_TILES = ((8, 32, 2, 128), (16, 64, 4, 128), (32, 128, 8, 64), (64, 128, 8, 64))
#: Tiles without tensor cores, which Triton uses for 16-bit rows from Ampere (RTX 30) on.
_PLAIN_TILES = ((1, 32, 2, 128), (4, 32, 2, 128), (16, 64, 4, 128))
#: Maximum rows of a program that scales the sums of groups instead of weights: with minima, which
#: then double the products, and without. GeForce cards accumulate in float32 at half the rate of
#: tensor cores.
_SUMMED_ROWS = (8, 32)
#: Steps of software pipelining.
PRODUCT_STAGES = 3
_DEQUANTIZED_OUTPUTS = 64
#: Dequantized slices of a weight begin at multiples of this, so that torch's product can write
#: aligned results in place.
_ALIGNED_OUTPUTS = 128
#: Columns are split until there are this many warps per multiprocessor; minimum steps per part, and
#: maximum parts.
_WARPS, _MIN_STEPS, _MAX_SPLITS = 12, 4, 8
_ADDED = 1024
#: Assumed multiprocessors of a device without CUDA.
_USUAL_PROCESSORS = 64


def find_planes_problem(device: torch.device) -> str:
    """Explain why a device can't multiply by weights in bit planes; empty if it can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "it is no GPU"
    problem = find_triton_problem()
    if problem:
        return f"Triton can't be used: {problem}"
    if torch.cuda.get_device_capability(device) < MIN_TRITON_CAPABILITY:
        return "it needs a Turing GPU (RTX 20) or a newer one"
    return ""


def multiply_blocks(planes: BlockPlanes, rows: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``rows [T, in]`` times the weight plus ``bias``, ``[T, out]``."""
    return (
        multiply_fused(planes, rows, bias)
        if len(rows) <= MAX_FUSED_ROWS
        else multiply_dequantized(planes, rows, bias)
    )


def multiply_fused(
    planes: BlockPlanes, rows: Tensor, bias: Tensor | None, splits: int = 0
) -> Tensor:
    """Do :func:`multiply_blocks` for few rows ``[T, in]``, in one kernel, or two with splits.

    ``splits`` is the number of parts of the columns; by default it depends on the device.
    """
    from molink.stage.gpu_kernels.block_kernels import add_splits_kernel, multiply_kernel

    layout, (count, depth) = planes.layout, rows.shape
    outputs = layout.shape[0]
    results = rows.new_empty(count, outputs)
    if not count:
        return results
    tile, tile_outputs, warps, columns = choose_tile(rows, count)
    tiles, row_tiles = -(-outputs // tile_outputs), -(-count // tile)
    chunks = choose_chunks(layout, columns)
    steps = layout.chunks // chunks
    if not splits:
        splits = choose_splits(tiles * row_tiles * warps, steps, count_processors(rows.device))
    each = -(-steps // splits)
    splits = -(-steps // each)
    whole = splits == 1
    added = bias if bias is not None else results
    parts = results if whole else rows.new_empty((splits, count, outputs), dtype=torch.float32)
    multiply_kernel[tiles, splits, row_tiles](
        rows.contiguous(),
        planes.tensors,
        added,
        parts,
        count,
        depth,
        outputs,
        layout.chunks,
        each,
        int(whole and bias is not None),
        FORM=layout.kernel_form,
        ROWS=tile,
        OUTPUTS=tile_outputs,
        CHUNKS=chunks,
        SCALE_SUMS=scales_sums(layout, tile, rows.dtype),
        num_warps=warps,
        num_stages=PRODUCT_STAGES,
    )
    if not whole:
        add_splits_kernel[(-(-results.numel() // _ADDED),)](
            parts,
            added,
            results,
            results.numel(),
            outputs,
            splits,
            int(bias is not None),
            COUNT=_ADDED,
        )
    return results


def multiply_dequantized(planes: BlockPlanes, rows: Tensor, bias: Tensor | None) -> Tensor:
    """Do :func:`multiply_blocks` for many rows ``[T, in]``, by torch's product.

    A large weight is dequantized in slices of its outputs.
    """
    outputs, depth = planes.layout.shape
    most = max(1, MAX_DEQUANTIZED // depth)
    if outputs <= most:
        return linear(rows, dequantize_rows(planes, 0, outputs, rows.dtype), bias)
    # Slices are equally large, since a small last one would leave multiprocessors idle.
    even = -(-outputs // -(-outputs // most))
    aligned = -(-even // _ALIGNED_OUTPUTS) * _ALIGNED_OUTPUTS
    step = aligned if aligned <= most else max(1, most // _ALIGNED_OUTPUTS * _ALIGNED_OUTPUTS)
    results = rows.new_empty(len(rows), outputs)
    for first in range(0, outputs, step):
        last = min(first + step, outputs)
        weight = dequantize_rows(planes, first, last, rows.dtype).t()
        part = results[:, first:last]
        if bias is None:
            torch.mm(rows, weight, out=part)
        else:
            torch.addmm(bias[first:last], rows, weight, out=part)
    return results


def dequantize_rows(
    planes: BlockPlanes, first: int, last: int, dtype: torch.dtype, tokens: Tensor | None = None
) -> Tensor:
    """Dequantize rows ``first … last - 1`` of the weight, or rows ``tokens`` (int64 ``[last]``).

    Returns ``[…, in]``.
    """
    from molink.stage.gpu_kernels.block_kernels import dequantize_kernel

    layout, count = planes.layout, last - first
    results = planes.words.new_empty((count, layout.shape[1]), dtype=dtype)
    if count:
        dequantize_kernel[-(-count // _DEQUANTIZED_OUTPUTS), layout.chunks](
            planes.tensors,
            planes.words if tokens is None else tokens,
            results,
            first,
            count,
            layout.shape[1],
            layout.shape[0],
            FORM=layout.kernel_form,
            HAS_TOKENS=tokens is not None,
            OUTPUTS=_DEQUANTIZED_OUTPUTS,
            num_warps=4,
        )
    return results


def choose_tile(rows: Tensor, count: int) -> tuple[int, int, int, int]:
    """Choose rows, outputs, warps and columns of a program, for ``count`` rows like ``rows``."""
    is_plain = rows.dtype == torch.float32 or not has_tensor_products(rows.device)
    tiles = _PLAIN_TILES if is_plain else _TILES
    return next((one for one in tiles if count <= one[0]), tiles[-1])


def choose_chunks(layout: PlaneLayout, columns: int) -> int:
    """Choose the number of chunks per step of about ``columns`` columns."""
    chunks = max(1, columns // layout.chunk_columns)
    return 1 if layout.chunks % chunks else chunks


def scales_sums(layout: PlaneLayout, rows: int, dtype: torch.dtype) -> bool:
    """Whether a program of ``rows`` rows scales the sums of groups instead of weights."""
    return dtype != torch.float32 and rows <= _SUMMED_ROWS[not layout.has_minima]


def choose_splits(warps: int, steps: int, processors: int) -> int:
    """Choose the number of parts of the columns: a power of two up to 8."""
    splits = 1
    most = min(_MAX_SPLITS, steps // _MIN_STEPS)
    while warps * splits < _WARPS * processors and 2 * splits <= most:
        splits *= 2
    return splits


@cache
def count_processors(device: torch.device) -> int:
    """Count a device's multiprocessors."""
    if device.type != "cuda":
        return _USUAL_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def has_tensor_products(device: torch.device) -> bool:
    """Whether Triton can multiply 16-bit matrices on a device's tensor cores."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
