"""Which projection a weight becomes, and that all give the same."""

import pytest
import torch
from torch.nn.functional import linear

from molink.stage.kernels.create import create_matmul
from molink.stage.linear import CompiledLinear, Linear, PackedLinear, Projections, can_pack, create

CPU = torch.device("cpu")


def compiled(dtype: torch.dtype) -> Projections:
    product = create_matmul(dtype, 1)
    if product is None:
        pytest.skip(f"this CPU has no compiled products for {dtype}")
    return Projections(dtype, product, can_pack(dtype, CPU))


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
    projection = compiled(dtype).create(weight, bias)
    assert isinstance(projection, CompiledLinear)
    assert projection.nbytes == 2 * 96 * 64 + 4 * 96
    result = projection(given)
    assert result.dtype is dtype
    within = 2**-7 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(result.float(), exact, rtol=within, atol=within)


@torch.inference_mode()
def test_shapes_and_types_that_are_not_compiled() -> None:
    narrow, wide = compiled(torch.bfloat16), compiled(torch.float32)
    other = PackedLinear if narrow.packs else Linear
    assert isinstance(narrow.create(torch.eye(33).bfloat16(), None), other)
    odd = wide.create(torch.eye(33).bfloat16(), None)
    assert isinstance(odd, Linear)
    assert odd.weight.dtype is torch.float32
    assert isinstance(wide.create(torch.eye(64), None), Linear), "nothing is rounded"
    half = wide.create(torch.eye(64).half(), None)
    assert isinstance(half, CompiledLinear)
    assert half.nbytes == 2 * 64 * 64 + 4 * 64
    assert isinstance(narrow.create(torch.eye(64).half(), None), other)


def test_a_gpu_has_projections_of_its_own() -> None:
    assert Projections.probe(torch.bfloat16, torch.device("cuda", 0)) == Projections(torch.bfloat16)


@pytest.mark.parametrize(
    ("few", "many", "chosen"),
    [(0.5, 0.9, True), (0.5, 1.05, True), (0.5, 8.0, False), (1.2, 0.9, False)],
)
def test_what_is_slower_is_not_used(
    monkeypatch: pytest.MonkeyPatch, few: float, many: float, chosen: bool
) -> None:
    if create_matmul(torch.float32, 1) is None:
        pytest.skip("this CPU has no compiled products for float32")
    monkeypatch.setattr(create, "_compare", lambda *_: (few, many))
    found = create._probe_cpu.__wrapped__(torch.float32, 1)
    assert found.holds(torch.bfloat16) is chosen
    assert found.holds(torch.float16) is chosen
    assert not found.holds(torch.float32)


def test_both_are_timed() -> None:
    usual = Projections(torch.float32)
    assert all(ratio > 0 for ratio in create._compare(usual, usual))
