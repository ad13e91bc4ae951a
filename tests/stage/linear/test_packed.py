"""Prepacked projections give the results of plain ones."""

import pytest
import torch

from molink.stage.linear import PackedLinear, PlainLinear, can_pack

CPU = torch.device("cpu")
NOT_PACKED = "oneDNN packs bf16 for AVX-512 (or AMX) only: without it rows are float32"


def test_only_bf16_on_a_cpu_is_packed() -> None:
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda:0"))


def test_operators_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not can_pack(torch.bfloat16, CPU)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
@torch.inference_mode()
def test_packed_equals_plain(rows: int, biased: bool) -> None:
    if not can_pack(torch.bfloat16, CPU):
        pytest.skip(NOT_PACKED)
    weight = torch.randn(96, 64).bfloat16()
    bias = torch.randn(96).bfloat16() if biased else None
    given = torch.randn(rows, 64).bfloat16()
    plain = PlainLinear(weight, bias)
    packed = PackedLinear.pack_weight(weight, bias)
    assert packed.nbytes == plain.nbytes
    torch.testing.assert_close(packed(given), plain(given), atol=0.05, rtol=0.02)


@torch.inference_mode()
def test_strided_rows() -> None:
    if not can_pack(torch.bfloat16, CPU):
        pytest.skip(NOT_PACKED)
    packed = PackedLinear.pack_weight(torch.randn(96, 64).bfloat16(), None)
    wide = torch.randn(5, 128).bfloat16()
    torch.testing.assert_close(packed(wide[:, 64:]), packed(wide[:, 64:].contiguous()))
