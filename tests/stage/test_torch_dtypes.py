"""The type that each device computes in, and the type of rows between stages."""

import pytest
import torch

from molink.stage import torch_dtypes as dtypes
from molink.stage.torch_dtypes import (
    choose_dtype,
    choose_wire_dtype,
    cpu_supports_bf16,
    residual_dtype,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize("wanted", ["f32", "bf16", "f16"])
def test_a_requested_dtype_is_used(wanted: str) -> None:
    assert choose_dtype(wanted, "bf16", CPU) == wanted
    assert choose_wire_dtype(wanted, "bf16") == wanted


@pytest.mark.parametrize("stored", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("generation", [(7, 5), (8, 0), (8, 9), (12, 0)])
def test_cuda_computes_in_the_models_own_type_if_it_can(
    monkeypatch: pytest.MonkeyPatch, stored: str, generation: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation)
    emulated = stored == "bf16" and generation < (8, 0)
    assert choose_dtype("auto", stored, CUDA) == ("f16" if emulated else stored)


def test_float16_models_sum_in_float32() -> None:
    assert residual_dtype(torch.float16) == torch.float32
    assert residual_dtype(torch.bfloat16) == torch.bfloat16
    assert residual_dtype(torch.float32) == torch.float32


@pytest.mark.parametrize(("native", "computed"), [(True, "bf16"), (False, "f32")])
def test_a_cpu_computes_in_bf16_if_it_can(
    monkeypatch: pytest.MonkeyPatch, native: bool, computed: str
) -> None:
    monkeypatch.setattr(dtypes, "cpu_supports_bf16", lambda: native)
    assert choose_dtype("auto", "bf16", CPU) == computed
    assert choose_dtype("auto", "f16", CPU) == computed
    assert choose_dtype("auto", "f32", CPU) == "f32"


@pytest.mark.parametrize("stored", ["f32", "bf16", "f16"])
def test_rows_travel_alike_at_every_stage(stored: str) -> None:
    assert choose_wire_dtype("auto", stored) == stored


def test_a_torch_without_cpu_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOLINK_CPU_ISA", raising=False)
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert cpu_supports_bf16() is False
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    assert cpu_supports_bf16() is True
