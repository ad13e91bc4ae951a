"""Norms, gates and heads with KV append, in shapes of real models."""

from functools import partial

import torch

from molink.facts.model import KVCacheDType
from molink.stage.attention.base import AttentionShape
from molink.stage.gpu_kernels.row_kernels import (
    add_and_norm,
    append_heads,
    apply_bounded_gate,
    apply_gate,
)
from molink.stage.kv_pool import KVPool

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def launch_sum(kept: torch.dtype, computed: torch.dtype, width: int) -> None:
    """A sum and both norms."""
    rows, result, weight = (
        torch.empty(3, width, dtype=kept),
        torch.empty(3, width, dtype=computed),
        torch.empty(width),
    )
    add_and_norm(rows, result, weight, 1.0, weight, 1e-6, computed)


def launch_parts(dtype: torch.dtype, width: int) -> None:
    """A norm alone, a sum alone, and both."""
    rows, result, weight = *torch.empty(2, 3, width, dtype=dtype), torch.empty(width)
    add_and_norm(rows, None, None, 1.0, weight, 1e-6, dtype)
    add_and_norm(rows, result, None, 1.0, None, 1e-6, dtype)
    add_and_norm(rows, result, None, 1.0, weight, 1e-6, dtype)


def launch_heads(
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: int,
    rotary: int,
    normed: bool = False,
    interleaved: bool = False,
    kept: KVCacheDType = "auto",
) -> None:
    queries, keys = heads
    members = queries + 2 * keys
    shape = AttentionShape(keys, 1, size, 1.0, (0,))
    pool = KVPool(shape, 1, 2, 16, dtype, torch.device("cpu"), kv_cache_dtype=kept)
    append_heads(
        torch.empty(3, members, size, dtype=dtype),
        torch.empty(queries + keys, size) if normed else None,
        1e-6,
        torch.empty(3, 1, 2, rotary, dtype=dtype) if rotary else None,
        torch.zeros(3, dtype=torch.int64),
        pool.layer_pages(0),
        pool.layer_scales(0),
        interleaved,
    )


LAUNCHES = [
    partial(launch_parts, BF16, 4096),
    partial(launch_sum, BF16, BF16, 4096),
    partial(launch_sum, F32, F16, 4096),
    partial(launch_sum, BF16, BF16, 16384),
    partial(apply_gate, torch.empty(3, 2 * 14336, dtype=BF16), "silu", 0.0),
    partial(apply_gate, torch.empty(3, 2 * 9216, dtype=F32), "gelu_tanh", 0.0),
    partial(apply_gate, torch.empty(3, 2 * 2880, dtype=BF16), "clamped_swiglu", 7.0),
    partial(apply_bounded_gate, torch.empty(3, 2 * 14336, dtype=F16), "silu", 0.0, 64.0),
    partial(apply_bounded_gate, torch.empty(3, 2 * 9216, dtype=F16), "gelu_tanh", 0.0, 64.0),
    partial(launch_heads, BF16, (32, 8), 128, 128),
    partial(launch_heads, BF16, (32, 8), 128, 128, kept="int8"),
    partial(launch_heads, F16, (16, 8), 64, 64, normed=True, kept="int8"),
    partial(launch_heads, BF16, (16, 8), 128, 128, normed=True),
    partial(launch_heads, F16, (8, 4), 256, 256, normed=True),
    partial(launch_heads, F16, (32, 32), 80, 32),
    partial(launch_heads, BF16, (32, 2), 128, 64, interleaved=True),
    partial(launch_heads, BF16, (16, 4), 128, 0),
]
