"""The projection that each kind of weight becomes; all give the same results."""

import pytest
import torch
from torch.nn.functional import linear

from molink.facts.kernels import INTEGER_KERNELS
from molink.gguf.block_formats import BLOCK_FORMATS
from molink.stage.cpu_kernels.block_integers import IntegerBlockMatMul
from molink.stage.cpu_kernels.block_matmul import BlockMatMul
from molink.stage.cpu_kernels.create import create_integer_matmul, create_matmul
from molink.stage.linear import (
    CompiledLinear,
    PackedLinear,
    PlainLinear,
    ProjectionFactory,
    can_pack,
    create,
    timing,
)
from molink.stage.torch_dtypes import DTYPE_NAMES
from tests.support.kernels import NOT_COMPILED

CPU = torch.device("cpu")


def compiled(dtype: torch.dtype) -> ProjectionFactory:
    product = create_matmul(dtype, 1)
    if product is None:
        pytest.skip(NOT_COMPILED[DTYPE_NAMES[dtype]])
    return ProjectionFactory(dtype, product, can_pack(dtype, CPU))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 20])
@torch.inference_mode()
def test_compiled_projections_multiply_as_others_do(
    rows: int, biased: bool, dtype: torch.dtype
) -> None:
    weight = torch.randn(96, 64).bfloat16()
    bias = torch.randn(96).to(dtype) if biased else None
    given = torch.randn(rows, 64).to(dtype)
    exact = linear(given.float(), weight.float(), None if bias is None else bias.float())
    projection = compiled(dtype).create_projection(weight, bias)
    assert isinstance(projection, CompiledLinear)
    assert projection.nbytes == 2 * 96 * 64 + 4 * 96
    result = projection(given)
    assert result.dtype is dtype
    within = 2**-7 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(result.float(), exact, rtol=within, atol=within)


@torch.inference_mode()
def test_shapes_and_types_that_are_not_compiled() -> None:
    wide = compiled(torch.float32)
    odd = wide.create_projection(torch.eye(33).bfloat16(), None)
    assert isinstance(odd, PlainLinear)
    assert odd.weight.dtype is torch.float32
    assert isinstance(wide.create_projection(torch.eye(64), None), PlainLinear), (
        "nothing is rounded"
    )
    half = wide.create_projection(torch.eye(64).half(), None)
    assert isinstance(half, CompiledLinear)
    assert half.nbytes == 2 * 64 * 64 + 4 * 64


@torch.inference_mode()
def test_bf16_rows_of_odd_shapes_and_types_are_not_compiled() -> None:
    narrow = compiled(torch.bfloat16)
    other = PackedLinear if narrow.packs_onednn else PlainLinear
    assert isinstance(narrow.create_projection(torch.eye(33).bfloat16(), None), other)
    assert isinstance(narrow.create_projection(torch.eye(64).half(), None), other)


def test_gpus_use_their_own_projections() -> None:
    assert ProjectionFactory.probe_device(
        torch.bfloat16, torch.device("cuda", 0)
    ) == ProjectionFactory(torch.bfloat16)


@pytest.mark.parametrize(
    ("few", "many", "chosen"),
    [(0.5, 0.9, True), (0.5, 1.05, True), (0.5, 8.0, False), (1.2, 0.9, False)],
)
def test_slower_kernels_are_not_used(
    monkeypatch: pytest.MonkeyPatch, few: float, many: float, chosen: bool
) -> None:
    if create_matmul(torch.float32, 1) is None:
        pytest.skip(NOT_COMPILED["f32"])
    monkeypatch.setattr(timing, "time_sides", lambda *_: (few, many))
    disabled = create.slow_kernels.__wrapped__(torch.float32, CPU)
    found = ProjectionFactory.probe_device(torch.float32, CPU, disabled)
    assert found.keeps_dtype(torch.bfloat16) is chosen
    assert found.keeps_dtype(torch.float16) is chosen
    assert not found.keeps_dtype(torch.float32)


def test_one_lost_trial_disables_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if create_matmul(torch.float32, 1) is None:
        pytest.skip(NOT_COMPILED["f32"])
    times = iter([(3.0, 3.0), (0.5, 0.5)])
    monkeypatch.setattr(timing, "time_sides", lambda *_: next(times))
    assert create.slow_kernels.__wrapped__(torch.float32, CPU) == ()


def test_both_are_timed() -> None:
    assert set(create.slow_kernels.__wrapped__(torch.float32, CPU)) <= {"compiled-linear"}
    usual = [PlainLinear(torch.ones(timing.COLUMNS, timing.DEPTH))] * timing.TRIED
    assert all(ratio > 0 for ratio in timing.time_sides([usual, usual], torch.float32))


@pytest.mark.parametrize(
    ("times", "slow"),
    [([(0.5, 0.5)], False), ([(1.2, 0.5)] * 3, True), ([(0.5, 1.2)] * 3, True)],
)
def test_integers_must_be_faster(
    monkeypatch: pytest.MonkeyPatch, times: list[tuple[float, float]], slow: bool
) -> None:
    require_integers()
    left = iter(times)
    monkeypatch.setattr(timing, "time_sides", lambda *_: next(left))
    assert create.has_slow_integers.__wrapped__(torch.float32, "int8-rows") is slow
    assert next(left, None) is None


def test_a_cpu_without_integers_has_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "create_integer_matmul", lambda *_: None)
    assert create.has_slow_integers.__wrapped__(torch.float32, "int8-rows")


def test_integers_are_timed() -> None:
    require_integers()
    for kernel in INTEGER_KERNELS:
        assert create.has_slow_integers.__wrapped__(torch.float32, kernel) in (True, False)


def test_rows_are_rounded_only_where_they_may_be() -> None:
    require_integers()

    def product(name: str, *disabled: str) -> object:
        factory = ProjectionFactory.probe_device(torch.float32, CPU, disabled)
        return factory._find_block_product(BLOCK_FORMATS[name])

    for name, kernel, other in (
        ("q4_k", "int8-rows", "int8-rows-8bit"),
        ("q8_0", "int8-rows-8bit", "int8-rows"),
        ("iq4_xs", "int8-rows-codebook", "int8-rows"),
    ):
        assert isinstance(product(name, other), IntegerBlockMatMul)
        assert isinstance(product(name, kernel), BlockMatMul)


def require_integers() -> None:
    if create_integer_matmul(BLOCK_FORMATS["q4_k"], torch.float32, torch.get_num_threads()) is None:
        pytest.skip("this CPU has no product of integers")
