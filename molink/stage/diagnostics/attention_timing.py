"""Times attention backends against each other on a device, with a model's heads."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from molink.errors import UsageError
from molink.stage.attention.base import AttentionBackend, AttentionShape, BackendName
from molink.stage.attention.create import create_attention
from molink.stage.batch import SequenceRows
from molink.stage.diagnostics.trial_shapes import TrialShapes
from molink.stage.kv_pool import KVPool
from molink.stage.out_of_memory import empty_device_cache, is_out_of_memory

#: Maximum number of decoding requests, and positions of each.
_MAX_REQUESTS, _POSITIONS = 32, 1024
#: Maximum bytes of KV, which ``gather`` copies; more than a GPU's cache holds.
_MAX_BYTES = 256 << 20
#: Rows of a prefill chunk.
_CHUNK_ROWS = 256
#: Calls per run, enough that the device is never idle, and runs, of which the fastest counts.
_CALLS, _RUNS = 8, 3


@torch.inference_mode()
def is_slower(
    preferred: BackendName,
    other: BackendName,
    shapes: TrialShapes,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Return whether a backend is slower, as geometric mean of decode rows and a chunk.

    False if one of them doesn't work on this device, or memory is short.
    """
    shape = replace(shapes.attention, windows=(0,))
    try:
        backends = [
            create_attention(name, shape, shapes.block_size, dtype, device)
            for name in (preferred, other)
        ]
        return _compare_backends(backends, shape, shapes.block_size, dtype, device) > 1
    except UsageError:
        return False
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        empty_device_cache()
        return False


def _compare_backends(
    backends: Sequence[AttentionBackend],
    shape: AttentionShape,
    page: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Return the product of the first backend's relative times on decode rows and on a chunk."""
    blocks = -(-_POSITIONS // page)
    nbytes = blocks * page * 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    requests = max(1, min(_MAX_REQUESTS, _MAX_BYTES // nbytes))
    pool = KVPool(shape, 1, requests * blocks, page, dtype, device)
    pool.zero_blocks(range(pool.blocks))
    order = list(range(pool.blocks))
    random.Random(0).shuffle(order)
    tables = [order[first : first + blocks] for first in range(0, len(order), blocks)]
    decode = [SequenceRows(_POSITIONS - 1, 1, table) for table in tables]
    chunk = [SequenceRows(_POSITIONS - _CHUNK_ROWS, _CHUNK_ROWS, tables[0])]
    sinks = torch.zeros(shape.groups * shape.kv_heads, device=device) if shape.sinks else None
    ratio = 1.0
    for step in (decode, chunk):
        rows = sum(sequence.count for sequence in step)
        heads = (shape.groups + 2) * shape.kv_heads
        given = torch.zeros(rows, heads, shape.head_dim, dtype=dtype, device=device)
        layers = [backend.prepare_layers(step, page, dtype, device) for backend in backends]
        taken = [_time_calls(partial(layer, 0, given, pool, sinks), device) for layer in layers]
        ratio *= taken[0] / taken[1]
    return ratio


def _time_calls(attend: Callable[[], object], device: torch.device) -> float:
    """Measure the seconds of a few calls, after one that may compile."""
    attend()
    taken = []
    for _ in range(_RUNS):
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(_CALLS):
            attend()
        _synchronize(device)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
