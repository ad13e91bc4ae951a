"""Gathering gives the results of plain masked softmax, and reads nothing else."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.stage.attention import gather
from molink.stage.attention import work_groups as scores
from molink.stage.attention.base import AttentionShape
from molink.stage.attention.gather import GatherAttention

MIXES = {
    "decode": [(7, 1), (40, 1), (8, 1), (0, 1)],
    "alike": [(9, 1), (9, 1), (9, 1)],
    "one": [(21, 1)],
    "whole": [(0, 12), (0, 2)],
    "chunks": [(16, 5), (5, 9), (63, 2)],
    "fused": [(33, 1), (0, 30), (2, 1), (24, 11), (50, 1)],
}
WINDOWS = (0, 1, 3, 4, 5, 8, 17, 64)
#: In bf16 a CPU's pool has another layout.
DTYPES = pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_every_window_at_once(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    mix: str,
    softcap: float,
    sinks: bool,
    chunked: bool,
) -> None:
    scores = {"softcap": softcap, "scale": 0.4, "sinks": sinks}
    shape = shape_of(windows=WINDOWS, groups=3, **scores, chunked=chunked)
    check(GatherAttention(shape), shape, MIXES[mix])


@pytest.mark.parametrize("mix", MIXES)
@DTYPES
def test_kv_in_8_bits(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    mix: str,
    dtype: torch.dtype,
    atol: float,
) -> None:
    shape = shape_of(windows=WINDOWS, scale=0.4, groups=3, kv_cache_dtype="int8")
    check(GatherAttention(shape), shape, MIXES[mix], dtype=dtype, atol=atol)


def test_sinks_in_slabs(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scores, "_MAX_SCORES", 1 << 8)
    shape = shape_of(windows=WINDOWS, groups=3, sinks=True)
    check(GatherAttention(shape), shape, MIXES["fused"])


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_grouping(
    check: Callable[..., None], shape_of: Callable[..., AttentionShape], groups: int, kv_heads: int
) -> None:
    shape = shape_of(groups=groups, kv_heads=kv_heads, windows=(0, 6))
    check(GatherAttention(shape), shape, MIXES["fused"])


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_page_edges(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    block_size: int,
    beyond: int,
    count: int,
) -> None:
    before = max(0, 3 * block_size + beyond - count)
    shape = shape_of(windows=(0, block_size, block_size + 1, 2 * block_size))
    check(GatherAttention(shape), shape, [(before, count), (1, 1)], block_size=block_size)


@DTYPES
def test_consecutive_blocks_are_read_where_they_lie(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    dtype: torch.dtype,
    atol: float,
) -> None:
    shape = shape_of(windows=(0, 5), softcap=0.0)
    for mix in MIXES.values():
        check(GatherAttention(shape), shape, mix, dtype=dtype, atol=atol, consecutive=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_16_bits(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    dtype: torch.dtype,
    softcap: float,
) -> None:
    shape = shape_of(windows=(0, 9), softcap=softcap, head_dim=64)
    check(GatherAttention(shape), shape, MIXES["fused"], dtype=dtype, atol=3e-2)


@DTYPES
def test_long_requests_share_memory_over_the_layers(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    atol: float,
) -> None:
    monkeypatch.setattr(gather, "_CPU_SCRATCH_BYTES", 1)
    shape = shape_of(windows=(0, 7, 0))
    for mix in MIXES.values():
        check(GatherAttention(shape), shape, mix, dtype=dtype, atol=atol)


def test_buckets_that_fit_a_cache(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gather, "_CPU_BUCKET_BYTES", 1 << 14)
    shape = shape_of(windows=(0, 7))
    check(GatherAttention(shape), shape, [(n, 1) for n in (5, 30, 6, 200, 7, 90, 8, 31)])


requests = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=40)
@given(
    mix=requests,
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.integers(0, 40),
    softcap=st.sampled_from([0.0, 3.0]),
    consecutive=st.booleans(),
)
def test_random_mixes_of_rows(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    mix: list[tuple[int, int]],
    block_size: int,
    window: int,
    softcap: float,
    consecutive: bool,
) -> None:
    shape = shape_of(windows=(0, window), softcap=softcap)
    check(GatherAttention(shape), shape, mix, block_size=block_size, consecutive=consecutive)
