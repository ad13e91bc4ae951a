"""Projections with a second copy of their weights."""

import pytest
import torch
from torch.nn.functional import linear

from molink.stage.linear import Linear, PackedLinear, can_pack, create_projection
from molink.stage.linear.twin import FEW_ROWS, TwinLinear, can_twin, twin_pays

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not can_pack(torch.bfloat16, CPU) or "fbgemm" not in torch.backends.quantized.supported_engines,
    reason="this torch or CPU has no oneDNN bf16 or no FBGEMM",
)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 20])
@torch.inference_mode()
def test_both_copies_multiply_alike(rows, biased):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    bias = torch.randn(96, generator=generator).bfloat16() if biased else None
    given = torch.randn(rows, 64, generator=generator).bfloat16()
    exact = linear(given.float(), weight.float(), None if bias is None else bias.float())
    result = create_projection(weight, bias, "twin")(given)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.float(), exact, rtol=2**-7, atol=2**-7)


def test_it_takes_the_memory_of_two():
    weight = torch.randn(96, 64).bfloat16()
    twin = create_projection(weight, None, "twin")
    assert isinstance(twin, TwinLinear)
    assert twin.nbytes == 2 * create_projection(weight, None, "packed").nbytes


def test_weights_beyond_fp16_are_kept_once():
    weight = torch.eye(32).bfloat16()
    weight[3, 4] = 1e6
    assert not can_twin(weight)
    assert isinstance(create_projection(weight, None, "twin"), PackedLinear)
    assert isinstance(create_projection(weight, None, "plain"), Linear)


def test_a_torch_without_the_kernels_keeps_one_copy(monkeypatch):
    def missing(*_):
        raise RuntimeError("no engine")

    monkeypatch.setattr(TwinLinear, "__init__", missing)
    assert not twin_pays()


def test_a_copy_that_is_not_faster_is_not_worth_it(monkeypatch):
    monkeypatch.setattr("molink.stage.linear.twin._WORTH", 0.0)
    assert not twin_pays()
