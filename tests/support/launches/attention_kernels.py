"""Launches of paged attention in shapes of real models."""

from functools import partial

import torch

from molink.facts.model import KVCacheDType
from molink.stage.attention.base import AttentionShape
from molink.stage.attention.triton_attention import TritonAttention
from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool

_CPU = torch.device("cpu")
#: A decode row with a long context is split, a short one is not; drafts; a chunk.
_BATCHES = (
    (SequenceRows(4000, 1, range(251)),),
    (SequenceRows(20, 1, range(2)),),
    (SequenceRows(4000, 100, range(257)),),
)
#: (groups, head_dim, dtype, page, softcap, sinks)
_SHAPES = (
    (4, 128, torch.bfloat16, 16, 0.0, False),  # Llama 3, Qwen 3
    (2, 256, torch.bfloat16, 16, 50.0, False),  # Gemma 2
    (8, 64, torch.float16, 256, 0.0, True),  # gpt-oss
    (1, 96, torch.float32, 16, 0.0, False),
)
_INT8_SHAPES = (_SHAPES[0], _SHAPES[2], _SHAPES[3])


def _attend(
    groups: int,
    head_dim: int,
    dtype: torch.dtype,
    page: int,
    softcap: float,
    sinks: bool,
    kept: KVCacheDType = "auto",
) -> None:
    shape = AttentionShape(1, groups, head_dim, head_dim**-0.5, (0,), softcap, sinks, kept)
    pool = KVPool(shape, 1, 1, page, dtype, _CPU, kv_cache_dtype=kept)
    backend = TritonAttention(shape)
    for batch in _BATCHES:
        rows = sum(sequence.count for sequence in batch)
        heads = torch.empty(rows, groups + 2, head_dim, dtype=dtype)
        given = torch.empty(groups) if sinks else None
        backend.prepare_layers(batch, page, dtype, _CPU)(0, heads, pool, given)


LAUNCHES = [
    *(partial(_attend, *shape) for shape in _SHAPES),
    *(partial(_attend, *shape, "int8") for shape in _INT8_SHAPES),
]
