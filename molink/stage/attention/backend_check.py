"""Checks flash, Triton and compiled attention against ``gather`` on a small pool.

Version and platform are not enough: kernels may be missing from a build, refuse a head size, or be
wrong. Any failure disables the backend.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from molink.facts.kernels import MAX_KERNEL_HEAD_DIM
from molink.stage.attention.base import AttentionBackend, AttentionShape
from molink.stage.attention.compiled import CompiledAttention, compile_attention
from molink.stage.attention.flash import PAGE_MULTIPLE, FlashAttention, find_kernel
from molink.stage.attention.gather import GatherAttention
from molink.stage.batch import SequenceRows
from molink.stage.gpu_kernels.triton_support import find_triton_problem, is_interpreted
from molink.stage.kv_pool import KVPool

log = logging.getLogger(__name__)

#: Parts of the pool that block tables permute, and minimum positions of each.
_NUM_PARTS, _PART_POSITIONS = 5, 256
#: Number of random values in a trial.
_NUM_VALUES = 65521
#: A window that excludes some positions.
_WINDOW = 100
#: Tolerances for outputs of magnitude 1, in 16 bits and float32.
_NARROW, _WIDE = 0.05, 1e-4

#: Creates a backend, or returns why it can't be used.
CreateChecked = Callable[
    [AttentionShape, int, torch.dtype, torch.device], tuple[AttentionBackend | None, str]
]


def create_checked_flash(
    shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[FlashAttention | None, str]:
    """Return the backend, or ``None`` and the reason why it can't be used."""
    if device.type != "cuda":
        return None, "it needs a CUDA device"
    if shape.softcap:
        return None, "it has no softcap, which this model needs"
    if shape.sinks:
        return None, "it has no attention sinks, which this model needs"
    if shape.chunked:
        return None, "it has no attention in chunks, which this model needs"
    if shape.quantizes:
        return None, "it can't read KV in 8 bits"
    if block_size % PAGE_MULTIPLE:
        return None, f"KV blocks of {block_size} positions are not a multiple of {PAGE_MULTIPLE}"
    kernel = find_kernel()
    if kernel is None:
        return None, f"torch {torch.__version__} has no varlen_attn with a block table"
    try:
        difference = _difference(
            shape, lambda layer: FlashAttention(layer, kernel), PAGE_MULTIPLE, dtype, device
        )
    except Exception as error:  # kernels may raise anything
        log.info("no flash attention: %s", error)
        return None, f"{type(error).__name__}: {error}"
    # NaN also fails.
    if not difference <= _NARROW:
        log.warning("no flash attention: its results are off by %g", difference)
        return None, f"its results are off by {difference:g}"
    return FlashAttention(shape, kernel), ""


def create_checked_triton(
    shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionBackend | None, str]:
    """Return the backend, or ``None`` and the reason why it can't be used."""
    if device.type != "cuda" and not is_interpreted():
        return None, "it needs a CUDA device"
    if shape.head_dim > MAX_KERNEL_HEAD_DIM:
        return None, f"heads of {shape.head_dim} dimensions don't fit its tiles"
    problem = find_triton_problem()
    if problem:
        return None, f"Triton can't be used: {problem}"
    from molink.stage.attention.triton_attention import TritonAttention

    try:
        difference = _difference(shape, TritonAttention, block_size, dtype, device)
    except Exception as error:  # compilers and kernels may raise anything
        log.warning("no Triton attention: %s", error)
        return None, f"{type(error).__name__}: {error}"
    if not difference <= (_NARROW if dtype.itemsize == 2 else _WIDE):
        log.warning("no Triton attention: its results are off by %g", difference)
        return None, f"its results are off by {difference:g}"
    return TritonAttention(shape), ""


def create_checked_compiled(
    shape: AttentionShape, block_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[CompiledAttention | None, str]:
    """Return the CPU backend, or ``None`` and the reason why it can't be used."""
    if device.type != "cpu":
        return None, "it needs a CPU"
    attend = compile_attention(shape, block_size, dtype)
    if attend is None:
        return None, f"{dtype} with these heads and blocks is not supported on this CPU"
    difference = _difference(
        shape, lambda layer: CompiledAttention(layer, attend), block_size, dtype, device
    )
    if not difference <= (_NARROW if dtype.itemsize == 2 else _WIDE):
        log.warning("no compiled attention: its results are off by %g", difference)
        return None, f"its results are off by {difference:g}"
    return CompiledAttention(shape, attend), ""


def _spoil_unwritten(pool: KVPool, page: int) -> None:
    """Fill positions after the end of the last trial sequence, which has its own part, with NaN."""
    sequence = _trial_sequences(page)[-1]
    written, last = sequence.end % page, sequence.end // page
    for part in pool.layer_scales(0) or pool.layer_pages(0):
        for index, block in enumerate(sequence.blocks[last:]):
            part[block, 0 if index else written :] = torch.nan


@torch.inference_mode()
def _difference(
    shape: AttentionShape,
    create: Callable[[AttentionShape], AttentionBackend],
    page: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Return the largest difference from ``gather``, with and without a window; NaN if any.

    Requests run together and alone, so that all variants of a kernel are compiled before serving.
    Unwritten positions hold NaN unless the backend reads them.
    """
    differences = []
    sequences = _trial_sequences(page)
    for window in {min(window, _WINDOW) for window in shape.windows}:
        layer = replace(shape, windows=(window,))
        pool, heads = _make_rows(layer, page, dtype, device)
        count = layer.groups * layer.kv_heads
        sinks = torch.linspace(-4, 4, count, device=device) if layer.sinks else None
        backend, gather = create(layer), GatherAttention(layer)
        parts = torch.split(heads, [sequence.count for sequence in sequences])
        alone = [((each,), rows) for each, rows in zip(sequences, parts, strict=True)]
        batches = ((sequences, heads), *alone)
        expected = [
            gather.prepare_layers(batch, page, dtype, device)(0, rows, pool, sinks)
            for batch, rows in batches
        ]
        if not backend.reads_unwritten:
            _spoil_unwritten(pool, page)
        for (batch, rows), right in zip(batches, expected, strict=True):
            found = backend.prepare_layers(batch, page, dtype, device)(0, rows, pool, sinks)
            differences.append(float((found.float() - right.float()).abs().max()))
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _trial_sequences(page: int) -> tuple[SequenceRows, ...]:
    """Make decode rows and chunks that begin, end at and cross boundaries of pages and of parts.

    One of each has many positions. Sequences share parts, but no slot of a row.
    """
    each = -(-_PART_POSITIONS // page)
    size = each * page

    def table(*parts: int) -> list[int]:
        return [part * each + block for part in parts for block in reversed(range(each))]

    return (
        SequenceRows(size, 1, table(2, 0)),
        SequenceRows(size - 2, 1, table(0)),
        SequenceRows(2 * size - 3, 20, table(1, 2, 4)),
        SequenceRows(0, 20, table(3)),
    )


def _make_rows(
    shape: AttentionShape, page: int, dtype: torch.dtype, device: torch.device
) -> tuple[KVPool, Tensor]:
    """Create a pool of one layer with the KV of :func:`_trial_sequences`, and their rows."""
    generator = torch.Generator().manual_seed(0)
    blocks = _NUM_PARTS * -(-_PART_POSITIONS // page)
    kept = shape.kv_cache_dtype
    pool = KVPool(shape, 1, blocks, page, dtype, device, kv_cache_dtype=kept)
    heads = (shape.groups + 2) * shape.kv_heads

    def noise(*size: int) -> Tensor:
        # Repeating a prime number of values is fast and makes all positions different.
        values, total = torch.randn(_NUM_VALUES, generator=generator), math.prod(size)
        return values.repeat(-(-total // _NUM_VALUES))[:total].view(size).to(device, dtype)

    every = torch.arange(blocks * page, device=device)
    pool.write_rows(0, every, noise(len(every), 2, shape.kv_heads, shape.head_dim))
    slots = [
        sequence.blocks[position // page] * page + position % page
        for sequence in _trial_sequences(page)
        for position in range(sequence.start, sequence.start + sequence.count)
    ]
    rows = noise(len(slots), heads, shape.head_dim)
    both = rows[:, shape.groups * shape.kv_heads :]
    if shape.kv_kinds == 1:
        both[:, shape.kv_heads :] = both[:, : shape.kv_heads]
    shaped = both.view(len(rows), 2, shape.kv_heads, shape.head_dim)
    pool.write_rows(0, torch.tensor(slots, device=device), shaped)
    return pool, rows
