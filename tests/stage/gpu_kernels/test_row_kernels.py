"""Row-wise GPU kernels give the results of torch's operators, and a layer launches few of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.traits import Activation
from molink.stage.batch import SequenceRows
from molink.stage.decoder import weight_source
from molink.stage.decoder.append_heads import SeparateAppend
from molink.stage.decoder.block import ForwardContext, run_blocks
from molink.stage.decoder.mlp import MAX_FLOAT16_INPUT, create_gate
from molink.stage.decoder.norm import IdentityNorm, QueryKeyNorm, RmsNorm, add_residual
from molink.stage.decoder.operators import (
    RowOperators,
    create_fused,
    create_operators,
)
from molink.stage.decoder.rotary import rotate_half, rotate_pairs
from molink.stage.gpu_kernels.triton_support import is_interpreted
from molink.stage.kv_pool import KVPool
from molink.stage.stage import Stage
from molink.stage.torch_dtypes import TORCH_DTYPES, residual_dtype
from tests.support.launch_counter import counted_launches
from tests.support.models import MakeModel
from tests.support.stage import Ring
from tests.support.triton_device import DEVICE, needs_triton

pytestmark = needs_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
few_examples = settings(max_examples=5)


def noise(*size: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).mul_(2).to(DEVICE, dtype)


def assert_near(found: Tensor, exact: Tensor, roundings: float = 0.5) -> None:
    """Check an error of at most ``roundings`` units in the type's last place, plus float32's."""
    unit = torch.finfo(found.dtype).eps
    if found.dtype is torch.bfloat16 and is_interpreted():
        roundings = 1.0  # the interpreter truncates
    within = roundings * unit + 4e-6
    torch.testing.assert_close(found.double(), exact, rtol=within, atol=4e-6)


@few_examples
@given(
    dtype=st.sampled_from(DTYPES),
    wide_residual=st.booleans(),
    count=st.integers(1, 9),
    width=st.integers(1, 300),
    scale=st.sampled_from((1.0, 0.22)),
    has_post=st.booleans(),
    has_norm=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sums_and_norms_equal_exact_ones(
    dtype: torch.dtype,
    wide_residual: bool,
    count: int,
    width: int,
    scale: float,
    has_post: bool,
    has_norm: bool,
    seed: int,
) -> None:
    from molink.stage.gpu_kernels.row_kernels import add_and_norm

    kept = torch.float32 if wide_residual else dtype
    rows = noise(count, width, seed=seed, dtype=kept)
    result = noise(count, 2 * width, seed=seed + 1, dtype=dtype)[:, width:]  # strided rows
    post, weight = (noise(width, seed=seed + n, dtype=torch.float32) for n in (2, 3))
    given = (post if has_post else None, scale, weight if has_norm else None, 1e-5, dtype)
    total, normed = add_and_norm(rows, result, *given)
    assert (total.dtype, normed.dtype) == (kept, dtype)

    def identity_or(has: bool, weight: Tensor) -> RmsNorm | IdentityNorm:
        return RmsNorm(weight.double(), 1e-5) if has else IdentityNorm(torch.float64)

    exact, _ = add_residual(
        rows.double(),
        result.double(),
        scale,
        identity_or(has_post, post),
        IdentityNorm(torch.float64),
    )
    # Where terms cancel, the error is relative to the terms.
    assert_near(total, exact, 0.6)
    assert_near(normed, identity_or(has_norm, weight)(total.double()))
    alone, normed = add_and_norm(rows, None, None, 1.0, weight, 1e-5, dtype)
    assert alone is rows
    assert_near(normed, identity_or(True, weight)(rows.double()))


@few_examples
@given(
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(("silu", "gelu_tanh", "clamped_swiglu")),
    count=st.integers(1, 9),
    width=st.sampled_from((1, 7, 96, 1024, 1100)),
    seed=st.integers(0, 99),
)
def test_gates_equal_exact_ones(
    dtype: torch.dtype, activation: Activation, count: int, width: int, seed: int
) -> None:
    from molink.stage.gpu_kernels.row_kernels import apply_gate

    rows = noise(count, 2 * width, seed=seed, dtype=dtype).mul_(4)
    before = rows.clone()
    found = apply_gate(rows, activation, 1.5)
    assert torch.equal(rows, before)
    assert_near(found, create_gate(activation, 1.5)(rows.double()))


@few_examples
@given(
    activation=st.sampled_from(("silu", "gelu_tanh", "clamped_swiglu")),
    count=st.integers(1, 9),
    width=st.sampled_from((1, 7, 96, 2048, 2100)),
    seed=st.integers(0, 99),
)
def test_bounded_gates_equal_exact_ones(
    activation: Activation, count: int, width: int, seed: int
) -> None:
    from molink.stage.gpu_kernels.row_kernels import apply_bounded_gate

    rows = noise(count, 2 * width, seed=seed, dtype=torch.float16)
    rows[0] *= 200  # products beyond float16
    exact = create_gate(activation, 1.5)(rows.double())
    found, factors = apply_bounded_gate(rows, activation, 1.5, MAX_FLOAT16_INPUT)
    assert factors.dtype is torch.float32
    assert bool((factors >= 1).all())
    assert float(found.abs().max()) <= MAX_FLOAT16_INPUT
    # Rows are not scaled further than needed.
    expected = exact.abs().amax(-1, keepdim=True).div_(MAX_FLOAT16_INPUT).clamp_min_(1.0)
    torch.testing.assert_close(factors.double(), expected, rtol=4e-6, atol=0)
    assert_near(found, exact / factors.double())


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's, from infinity / infinity
def test_bounded_gates_keep_nan_and_infinity() -> None:
    from molink.stage.gpu_kernels.row_kernels import apply_bounded_gate

    rows = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [2.0, 3.0]], device=DEVICE).half()
    found, factors = apply_bounded_gate(rows, "silu", 0.0, MAX_FLOAT16_INPUT)
    assert not (found * factors)[:2].isfinite().any()
    assert bool((found * factors)[2].isfinite().all())


def test_gates_keep_nan_and_survive_large_numbers() -> None:
    from molink.stage.gpu_kernels.row_kernels import apply_gate

    rows = torch.tensor([[torch.nan, 1.0], [-3e4, 1.0], [3e4, 1.0]], device=DEVICE)
    for activation, up in (("silu", 1), ("gelu_tanh", 1), ("clamped_swiglu", 2)):
        limit = 1e5
        found = apply_gate(rows, activation, limit).flatten().tolist()
        assert found[0] != found[0]
        assert found[1:] == [0.0, 3e4 * up]


@few_examples
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 5),
    size=st.sampled_from((16, 24, 40, 64, 80, 96, 112, 128, 256)),
    rotary=st.sampled_from((0, 4, 8, 16, None)),
    interleaved=st.booleans(),
    normed=st.sampled_from(("none", "each head", "all heads", "each rotated head")),
    layer=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_heads_and_pages_equal_exact_ones(
    dtype: torch.dtype,
    count: int,
    kv_heads: int,
    groups: int,
    size: int,
    rotary: int | None,
    interleaved: bool,
    normed: str,
    layer: int,
    seed: int,
) -> None:
    from molink.stage.decoder.fused import FusedOperators

    turned = (groups + 1) * kv_heads
    members, dim = turned + kv_heads, size if rotary is None else rotary
    # A fused projection's result may have padding behind its heads.
    whole = noise(count, members * size + 8, seed=seed, dtype=dtype)
    heads = whole[:, : members * size].view(count, members, size)
    angles = noise(count, 1, 2, dim, seed=seed + 1, dtype=dtype) if dim else None
    weight = noise(turned, size, seed=seed + 2, dtype=torch.float32)
    norm = QueryKeyNorm(
        weight, groups * kv_heads, normed == "all heads", 1e-5, normed == "each rotated head"
    )
    blocks, block_size = 5, 4
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(seed))
    slots = slots[:count].to(DEVICE)
    shape = mock.Mock(kv_heads=kv_heads, head_dim=size, kv_kinds=2)

    def append(append_heads: Callable[..., Tensor], heads: Tensor) -> tuple[Tensor, Tensor]:
        pool = KVPool(shape, 2, blocks, block_size, heads.dtype, DEVICE)
        pool.zero_blocks(range(blocks))
        wide = None if angles is None else angles.to(heads.dtype)
        given = None if normed == "none" else norm
        found = append_heads(heads, given, wide, pool, layer, slots)
        return found, torch.stack([torch.stack(pool.layer_pages(one)) for one in range(2)])

    exact = append(SeparateAppend(rotate_pairs if interleaved else rotate_half), heads.double())
    before = heads.clone()
    fused = FusedOperators(1e-5, 0.0, "silu", 0.0, interleaved, dtype)
    found = append(fused.append_heads, heads)
    # Such norms use torch, which also rounds between norm and rotation.
    stays = normed in ("all heads", "each rotated head")
    roundings = 2.0 if stays else 1.0
    for one, other in zip(found, exact, strict=True):
        unit = torch.finfo(dtype).eps
        atol = roundings * unit * 12 if stays else 2e-5
        torch.testing.assert_close(one.double(), other, rtol=roundings * unit + 4e-6, atol=atol)
    assert stays or torch.equal(heads, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "page", "kinds"), [(16, 4, 1), (12, 5, 2), (96, 16, 2)])
def test_codes_are_those_of_torch(dtype: torch.dtype, size: int, page: int, kinds: int) -> None:
    from molink.stage.decoder.fused import FusedOperators

    shape = mock.Mock(kv_heads=3, head_dim=size, kv_kinds=kinds)
    # Rows from tiny to large, and one of zeros.
    heads = noise(9, 12, size, seed=1, dtype=torch.float32)
    heads = (heads * torch.logspace(-6, 3, 9, device=DEVICE)[:, None, None]).to(dtype)
    heads[4] = 0
    slots = torch.randperm(3 * page, generator=torch.Generator().manual_seed(0))[:9].to(DEVICE)

    def append(append_heads: Callable[..., Tensor]) -> KVPool:
        pool = KVPool(shape, 2, 3, page, dtype, DEVICE, kv_cache_dtype="int8")
        pool.zero_blocks(range(3))
        append_heads(heads.clone(), None, None, pool, 1, slots)
        return pool

    fused = FusedOperators(1e-5, 0.0, "silu", 0.0, False, dtype)
    found, expected = append(fused.append_heads), append(SeparateAppend(rotate_half))
    assert torch.equal(found._memory, expected._memory)
    assert found.layer_pages(1)[0].any()


# --- whole models -----------------------------------------------------------------------------

#: Families that cover the layers' differences: norms, rotations, gates, residuals.
FAMILIES = (
    "llama",
    "qwen3",
    "qwen2_moe",
    "hunyuan_v1_dense",
    "glm4_moe_lite",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granite",
    "olmo2",
    "smollm3",
)


def use_fused(config: Any, dtype: torch.dtype, *_: object) -> RowOperators:
    return create_fused(config, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_give_the_same_logits(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    folder = make_model(tmp_path, family)
    batches: list[tuple[int, tuple[SequenceRows, ...]]] = [
        (7, (SequenceRows(0, 5, [2]), SequenceRows(0, 2, [1]))),
        (2, (SequenceRows(5, 1, [2]), SequenceRows(2, 1, [1]))),
    ]

    def run() -> list[Tensor]:
        ring = make_ring(folder, (2,), device=str(DEVICE) if DEVICE.type == "cpu" else "cuda:0")
        return [ring.run(random_tokens(count), rows) for count, rows in batches]

    avoid = ("compiled-rows",)
    with monkeypatch.context() as patched:
        patched.setattr(
            weight_source, "create_operators", lambda *given: create_operators(*given[:3], avoid)
        )
        usual = run()
    monkeypatch.setattr(weight_source, "create_operators", use_fused)
    for found, expected in zip(run(), usual, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


# --- launches ---------------------------------------------------------------------------------


def attend_nothing(layer: int, heads: Tensor, pool: KVPool, sinks: Tensor | None) -> Tensor:
    """Replaces attention, which isn't counted."""
    return heads.new_empty(len(heads), (heads.shape[1] - 2 * pool.kv_heads) * pool.head_dim)


#: Launches of a layer other than products and attention: (torch's, those of these kernels).
LAUNCHES = {
    ("llama", "bf16"): (10, 4),
    ("qwen3", "bf16"): (14, 4),
    ("gemma2", "bf16"): (20, 4),
    ("gemma3_text", "bf16"): (24, 4),
    ("llama", "f16"): (20, 5),
}


@pytest.mark.parametrize(("family", "dtype"), LAUNCHES)
def test_a_layer_launches_few_operators(
    make_model: MakeModel, tmp_path: Path, family: str, dtype: str
) -> None:
    folder = ModelFolder.open(make_model(tmp_path, family, dtype="bfloat16"))
    config, kind = folder.config, TORCH_DTYPES[dtype]
    pool = KVPool(config, 2, 2, 4, kind, torch.device("cpu"))
    angles = torch.zeros(3, 1, 2, config.rope.rotary_dim(config.head_dim), dtype=kind)
    context = ForwardContext(pool, torch.arange(3), (angles,) * 2, attend_nothing)
    rows = torch.zeros(3, config.hidden_size, dtype=residual_dtype(kind))
    found = []
    for fused in (False, True):
        with mock.patch.object(
            weight_source, "create_operators", use_fused if fused else torch_operators
        ):
            avoid = ("compiled-linear", "packed-linear")
            stage = Stage.load_layers(folder, (0, 2), dtype=dtype, disabled_kernels=avoid)
        counts = []
        for blocks in (stage._decoder.blocks[:1], stage._decoder.blocks):
            with torch.inference_mode(), counted_launches() as counter:
                run_blocks(blocks, rows, context)
            counts.append(counter.counts)
        # The launches of one more layer.
        counts[1].subtract(counts[0])
        assert counts[1].pop("product") == 4
        found.append(counts[1].total())
    assert tuple(found) == LAUNCHES[family, dtype]


def torch_operators(config: Any, dtype: torch.dtype, device: torch.device, _: object) -> Any:
    return create_operators(config, dtype, device, ("compiled-rows",))
