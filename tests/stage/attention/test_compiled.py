"""Compiled attention gives what plain masked softmax gives, and reads nothing beyond."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import InvariantError, UsageError
from molink.stage.attention.base import AttentionShape
from molink.stage.attention.compiled import CompiledAttention
from molink.stage.attention.create import create_attention
from molink.stage.attention.gather import GatherAttention
from molink.stage.attention.trial import try_compiled
from molink.stage.batch import SequenceRows
from molink.stage.kernels.create import create_attend
from molink.stage.kernels.shape import AttendShape
from molink.stage.pool import KVPool

CPU, BF16 = torch.device("cpu"), torch.bfloat16
MIXES = {
    "decode": [(7, 1), (40, 1), (8, 1), (0, 1), (200, 1)],
    "whole": [(0, 12), (0, 2), (0, 70)],
    "chunks": [(16, 5), (5, 9), (63, 2), (31, 65)],
    "fused": [(33, 1), (0, 30), (2, 1), (24, 11), (50, 1)],
}


def backend(shape: AttentionShape, block_size: int = 16, threads: int = 1) -> CompiledAttention:
    numbers = AttendShape(
        shape.kv_heads, shape.groups, shape.head_dim, shape.scale, block_size, shape.sinks
    )
    attend = create_attend(numbers, threads)
    if attend is None:
        pytest.skip("this CPU has no compiled attention")
    return CompiledAttention(shape, attend)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_window_at_once(
    check: Callable[..., None], shape_of: Callable[..., AttentionShape], mix: str, threads: int
) -> None:
    shape = shape_of(windows=(0, 1, 5, 16, 17, 33, 64), head_dim=32, scale=0.4)
    check(backend(shape, 16, threads), shape, MIXES[mix], 16, BF16, atol=3e-2)


@pytest.mark.parametrize("mix", MIXES)
def test_sinks_take_their_share(
    check: Callable[..., None], shape_of: Callable[..., AttentionShape], mix: str
) -> None:
    shape = shape_of(groups=8, windows=(0, 5, 16, 64), head_dim=64, scale=0.4, sinks=True)
    check(backend(shape, 16, 2), shape, MIXES[mix], 16, BF16, atol=3e-2)
    assert try_compiled(shape, 16, BF16, CPU)[0] is not None


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_every_grouping(
    check: Callable[..., None], shape_of: Callable[..., AttentionShape], groups: int, kv_heads: int
) -> None:
    shape = shape_of(groups=groups, kv_heads=kv_heads, head_dim=64, windows=(0, 20))
    check(backend(shape), shape, MIXES["fused"], 16, BF16, atol=3e-2)


@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("count", [1, 2, 17])
def test_page_edges(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    block_size: int,
    beyond: int,
    count: int,
) -> None:
    before = max(0, block_size + beyond - count)
    shape = shape_of(windows=(0, block_size + 1), head_dim=96)
    check(backend(shape, block_size), shape, [(before, count), (1, 1)], block_size, BF16, atol=3e-2)


@settings(deadline=None, max_examples=30)
@given(
    requests=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=5),
    window=st.integers(0, 100),
    seed=st.integers(0, 99),
)
def test_random_forwards(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    requests: list[tuple[int, int]],
    window: int,
    seed: int,
) -> None:
    shape = shape_of(groups=4, kv_heads=2, head_dim=32, windows=(0, window))
    check(backend(shape), shape, requests, 16, BF16, seed=seed, atol=3e-2)


def test_scores_far_apart(
    check: Callable[..., None], shape_of: Callable[..., AttentionShape]
) -> None:
    shape = shape_of(head_dim=64, scale=30.0)
    check(backend(shape), shape, [(100, 3)], 16, BF16, atol=3e-2)


def test_what_there_is_no_code_for(shape_of: Callable[..., AttentionShape]) -> None:
    fine = shape_of(head_dim=64)
    if try_compiled(fine, 16, BF16, CPU)[0] is None:
        pytest.skip("this CPU has no compiled attention")
    assert isinstance(create_attention("auto", fine, 16, BF16, CPU), CompiledAttention)
    assert isinstance(create_attention("gather", fine, 16, BF16, CPU), GatherAttention)
    others = [
        (fine, 16, torch.float32),
        (fine, 8, BF16),
        (shape_of(head_dim=48), 16, BF16),
        (shape_of(head_dim=64, groups=13), 16, BF16),
        (shape_of(head_dim=64, softcap=30.0), 16, BF16),
    ]
    for shape, block_size, dtype in others:
        assert isinstance(create_attention("auto", shape, block_size, dtype, CPU), GatherAttention)
        with pytest.raises(UsageError, match="compiled attention can't run on cpu"):
            create_attention("compiled", shape, block_size, dtype, CPU)


def test_results_that_are_off_are_not_used(
    shape_of: Callable[..., AttentionShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(head_dim=64)
    backend(shape)
    wrong = "molink.stage.attention.compiled.CompiledLayers.__call__"
    for bad in (1.0, float("nan")):
        monkeypatch.setattr(
            wrong, lambda _, layer, heads, pool, sinks, bad=bad: heads.new_full((10, 256), bad)
        )
        found, reason = try_compiled(shape, 16, BF16, CPU)
        assert found is None
        assert "off" in reason


@pytest.mark.parametrize("block", [-1, 4, 1 << 40])
def test_blocks_outside_the_pool_are_not_read(
    shape_of: Callable[..., AttentionShape], block: int
) -> None:
    shape = shape_of(head_dim=32)
    pool = KVPool(shape, 1, 4, 16, BF16, CPU)
    prepared = backend(shape).prepare([SequenceRows(20, 1, (block, 1))], 16, BF16, CPU)
    with pytest.raises(InvariantError, match="not in a pool of 4"):
        prepared(0, torch.zeros(1, 8, 32, dtype=BF16), pool)
