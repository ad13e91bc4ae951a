"""Compiled attention gives the results of plain masked softmax, and reads nothing else."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import InvariantError, UsageError
from molink.stage.attention.backend_check import create_checked_compiled
from molink.stage.attention.base import AttentionShape
from molink.stage.attention.compiled import CompiledAttention, kernel_shape
from molink.stage.attention.create import create_attention
from molink.stage.attention.gather import GatherAttention
from molink.stage.batch import SequenceRows
from molink.stage.cpu_kernels.arithmetic import Arithmetic, DotBf16, Float32
from molink.stage.cpu_kernels.attention_kernel import AttentionKernel
from molink.stage.cpu_kernels.kernel_shape import AttentionKernelShape
from molink.stage.kv_pool import KVPool
from tests.stage.attention.conftest import Requests
from tests.support.kernels import NOT_COMPILED, require

CPU, BF16 = torch.device("cpu"), torch.bfloat16
MIXES = {
    "decode": [(7, 1), (40, 1), (8, 1), (0, 1), (200, 1)],
    "whole": [(0, 12), (0, 2), (0, 70)],
    "chunks": [(16, 5), (5, 9), (63, 2), (31, 65)],
    "fused": [(33, 1), (0, 30), (2, 1), (24, 11), (50, 1)],
    "long": [(250, 40), (600, 1), (511, 2), (255, 1)],
}
#: Arithmetic, required CPU features, compilation target, and tolerance.
KINDS: dict[str, tuple[Arithmetic, tuple[str, ...], str | None, float]] = {
    "AVX512-BF16": (DotBf16(), ("avx512bf16", "avx512f"), None, 3e-2),
    "AVX512": (Float32(lanes=16, tile=12), ("avx512f",), None, 1e-5),
    "AVX2": (Float32(), ("avx2", "fma"), "+avx,+avx2,+fma", 1e-5),
}
kinds = pytest.mark.parametrize("kind", KINDS)
#: "AVX512" runs the code of "AVX2" with wider vectors, so it has fewer shapes.
different_kinds = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "AVX512"])
mixes = pytest.mark.parametrize("mix", MIXES)


@cache
def compiled(shape: AttentionKernelShape, kind: str, threads: int) -> AttentionKernel:
    arithmetic, wanted, features, _ = KINDS[kind]
    openmp = require(wanted, threads)
    return AttentionKernel(shape, arithmetic, openmp, threads, features)


class Backend:
    """A backend for a shape, compared with plain masked softmax."""

    def __init__(
        self, check: Callable[..., None], shape: AttentionShape, kind: str, threads: int = 1
    ) -> None:
        self._check, self._shape, self._kind, self._threads = check, shape, kind, threads

    def __call__(
        self, mix: Requests, block_size: int = 16, seed: int = 0, loose: float = 1.0
    ) -> None:
        attend = compiled(kernel_shape(self._shape, block_size), self._kind, self._threads)
        made = CompiledAttention(self._shape, attend)
        given = (made, self._shape, mix, block_size, attend.dtype)
        self._check(*given, seed=seed, atol=loose * KINDS[self._kind][-1])


@pytest.fixture
def checked(
    check: Callable[..., None], shape_of: Callable[..., AttentionShape]
) -> Callable[..., Backend]:
    """``checked(kind, threads=1, **shape)(mix, block_size=16)`` compares."""

    def make(kind: str, threads: int = 1, **shape: Any) -> Backend:
        return Backend(check, shape_of(**shape), kind, threads)

    return make


@kinds
@mixes
@pytest.mark.parametrize(("threads", "chunked"), [(1, False), (3, True)])
def test_every_window_at_once(
    checked: Callable[..., Backend], kind: str, mix: str, threads: int, chunked: bool
) -> None:
    windows = (0, 1, 5, 16, 17, 33, 64, 300)
    checked(kind, threads, windows=windows, head_dim=32, scale=0.4, chunked=chunked)(MIXES[mix])


@different_kinds
@mixes
@pytest.mark.parametrize("scores", [{"softcap": 2.0}, {"sinks": True}], ids=["softcap", "sinks"])
def test_scores_that_are_bounded_and_sinks_that_take_their_share(
    checked: Callable[..., Backend], kind: str, mix: str, scores: dict[str, Any]
) -> None:
    wide = {"groups": 8, "windows": (0, 5, 16, 64), "head_dim": 64, "scale": 0.4}
    checked(kind, **wide, **scores)(MIXES[mix])


@kinds
@mixes
@pytest.mark.parametrize("head_dim", [32, 128])
def test_kv_in_8_bits(checked: Callable[..., Backend], kind: str, mix: str, head_dim: int) -> None:
    # bf16 kernels round dequantized keys to bf16, and wider heads add up more rounding errors.
    wide = {"groups": 3, "windows": (0, 5, 64), "scale": 2 * head_dim**-0.5, "sinks": True}
    checked(kind, head_dim=head_dim, **wide, kv_cache_dtype="int8")(MIXES[mix])


@different_kinds
@pytest.mark.parametrize(("groups", "kv_heads"), [(1, 3), (3, 2), (7, 1), (16, 2), (100, 1)])
def test_every_grouping(
    checked: Callable[..., Backend], kind: str, groups: int, kv_heads: int
) -> None:
    shaped = checked(kind, groups=groups, kv_heads=kv_heads, head_dim=64, windows=(0, 20))
    shaped(MIXES["fused"])


@kinds
@pytest.mark.parametrize("block_size", [16, 256])
def test_page_edges(checked: Callable[..., Backend], kind: str, block_size: int) -> None:
    shaped = checked(kind, windows=(0, block_size + 1), head_dim=96)
    for beyond in (-1, 0, 1):
        for count in (1, 2, 17):
            shaped([(max(0, block_size + beyond - count), count), (1, 1)], block_size)


@kinds
@settings(deadline=None, max_examples=30)
@given(
    requests=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=5),
    window=st.integers(0, 100),
    kept=st.sampled_from(["auto", "int8"]),
    seed=st.integers(0, 99),
)
def test_random_forwards(
    check: Callable[..., None],
    shape_of: Callable[..., AttentionShape],
    kind: str,
    requests: Requests,
    window: int,
    kept: str,
    seed: int,
) -> None:
    windows = (0, window)
    shape = shape_of(groups=4, kv_heads=2, head_dim=32, windows=windows, kv_cache_dtype=kept)
    Backend(check, shape, kind)(requests, seed=seed)


@kinds
@pytest.mark.parametrize("start", [300, 500], ids=["in a span", "across spans"])
def test_results_do_not_depend_on_other_rows(
    shape_of: Callable[..., AttentionShape], kind: str, start: int
) -> None:
    shape = shape_of(head_dim=32, groups=3, windows=(0, 70))
    attend = compiled(kernel_shape(shape, 16), kind, 1)
    pool = KVPool(shape, 2, 40, 16, attend.dtype, CPU)
    pool._storage.normal_(generator=torch.Generator().manual_seed(0))
    heads = torch.randn(40, 10, 32, generator=torch.Generator().manual_seed(1)).to(attend.dtype)
    backend = CompiledAttention(shape, attend)

    def attended(first: int, count: int, layer: int) -> torch.Tensor:
        rows = [SequenceRows(start + first, count, range(40))]
        prepared = backend.prepare_layers(rows, 16, attend.dtype, CPU)
        return prepared(layer, heads[first : first + count], pool)

    for layer in range(2):
        together = attended(0, 40, layer)
        for first, count in ((0, 1), (7, 1), (39, 1), (5, 30)):
            assert torch.equal(attended(first, count, layer), together[first : first + count])


def test_threads_have_like_shares(shape_of: Callable[..., AttentionShape]) -> None:
    shape = shape_of(head_dim=32, groups=4)
    attend = compiled(kernel_shape(shape, 16), "AVX2", 3)
    backend = CompiledAttention(shape, attend)
    passes = backend.prepare_layers([SequenceRows(0, 960, range(60))], 16, attend.dtype, CPU).passes
    work = [
        sum(count * (start + count) for _, count, start, _ in part.tolist())
        for part in passes.chunk(3)
    ]
    assert max(work) < 1.1 * min(work)
    rows = sorted(passes[:, :2].tolist())
    assert [first for first, _ in rows] == list(range(0, 960, rows[0][1]))


@kinds
def test_scores_far_apart(checked: Callable[..., Backend], kind: str) -> None:
    # For scores of about a thousand, float32 rounding is a hundred times larger.
    checked(kind, head_dim=64, scale=30.0, windows=(0, 40))([(100, 3), (500, 30)], loose=10)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_memory_of_a_stage(shape_of: Callable[..., AttentionShape], dtype: torch.dtype) -> None:
    kinds: list[dict[str, Any]] = [{}, {"softcap": 50.0}, {"sinks": True}, {"windows": (0, 4096)}]
    kinds.append({"kv_cache_dtype": "int8"})
    shapes = [shape_of(head_dim=64, **options) for options in kinds]
    _, wanted, _, _ = KINDS["AVX512-BF16" if dtype is BF16 else "AVX2"]
    require(wanted, 1)
    for shape in shapes:
        assert isinstance(create_attention("auto", shape, 16, dtype, CPU), CompiledAttention)


def test_unsupported_shapes(shape_of: Callable[..., AttentionShape]) -> None:
    fine = shape_of(head_dim=64)
    assert isinstance(create_attention("gather", fine, 16, BF16, CPU), GatherAttention)
    others = [(fine, 16, torch.float16), (fine, 8, BF16), (shape_of(head_dim=48), 16, BF16)]
    for shape, block_size, dtype in others:
        assert isinstance(create_attention("auto", shape, block_size, dtype, CPU), GatherAttention)
        with pytest.raises(UsageError, match="compiled attention can't run on cpu"):
            create_attention("compiled", shape, block_size, dtype, CPU)


def test_results_that_are_off_are_not_used(
    shape_of: Callable[..., AttentionShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(head_dim=64)
    if create_checked_compiled(shape, 16, torch.float32, CPU)[0] is None:
        pytest.skip(NOT_COMPILED["f32"])
    wrong = "molink.stage.attention.compiled.CompiledLayers.__call__"
    for bad in (1.0, float("nan")):
        monkeypatch.setattr(
            wrong,
            lambda _, layer, heads, pool, sinks, bad=bad: heads.new_full((len(heads), 256), bad),
        )
        found, reason = create_checked_compiled(shape, 16, torch.float32, CPU)
        assert found is None
        assert "off" in reason


@pytest.mark.parametrize("block", [-1, 4, 1 << 40])
def test_blocks_outside_the_pool_are_not_read(
    shape_of: Callable[..., AttentionShape], block: int
) -> None:
    shape = shape_of(head_dim=32)
    attend = compiled(kernel_shape(shape, 16), "AVX2", 1)
    pool = KVPool(shape, 1, 4, 16, attend.dtype, CPU)
    rows = [SequenceRows(20, 1, (block, 1))]
    prepared = CompiledAttention(shape, attend).prepare_layers(rows, 16, attend.dtype, CPU)
    with pytest.raises(InvariantError, match="not in a pool of 4"):
        prepared(0, torch.zeros(1, 8, 32), pool)
