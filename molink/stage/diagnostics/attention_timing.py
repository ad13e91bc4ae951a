"""Times attention backends against each other on a device, with a model's heads."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from molink.errors import UsageError
from molink.stage.attention.base import BackendName
from molink.stage.attention.create import create_attention
from molink.stage.batch import SequenceRows
from molink.stage.diagnostics.trial_shapes import TrialShapes
from molink.stage.kv_pool import KVPool

#: Requests that decode, and their positions: more KV than a cache holds.
_REQUESTS, _POSITIONS = 32, 1024
#: Rows of a prefill chunk.
_CHUNK_ROWS = 256
#: Calls of a run, so that the device is never idle, and runs, of which the fastest counts.
_CALLS, _RUNS = 8, 3


@torch.inference_mode()
def is_slower(
    preferred: BackendName,
    other: BackendName,
    shapes: TrialShapes,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether a backend is slower than another on decode rows and a chunk, as geometric mean.

    False if the other one doesn't work here.
    """
    shape, page = replace(shapes.attention, windows=(0,)), shapes.block_size
    try:
        alternative = create_attention(other, shape, page, dtype, device)
    except UsageError:
        return False
    backend = create_attention(preferred, shape, page, dtype, device)
    each = -(-_POSITIONS // page)
    pool = KVPool(shape, 1, _REQUESTS * each, page, dtype, device)
    pool.zero_blocks(range(pool.blocks))
    order = list(range(pool.blocks))
    random.Random(0).shuffle(order)
    tables = [order[first : first + each] for first in range(0, len(order), each)]
    decode = [SequenceRows(_POSITIONS - 1, 1, table) for table in tables]
    chunk = [SequenceRows(_POSITIONS - _CHUNK_ROWS, _CHUNK_ROWS, tables[0])]
    ratio = 1.0
    for step in (decode, chunk):
        rows = sum(sequence.count for sequence in step)
        heads = (shape.groups + 2) * shape.kv_heads
        given = torch.zeros(rows, heads, shape.head_dim, dtype=dtype, device=device)
        sinks = torch.zeros(shape.groups * shape.kv_heads, device=device) if shape.sinks else None
        taken = [
            _time_calls(
                partial(made.prepare_layers(step, page, dtype, device), 0, given, pool, sinks),
                device,
            )
            for made in (backend, alternative)
        ]
        ratio *= taken[0] / taken[1]
    return ratio > 1


def _time_calls(attend: Callable[[], object], device: torch.device) -> float:
    """Seconds of a few calls, after one that may compile."""
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
