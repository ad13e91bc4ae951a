"""Norms in the rows' type and, for 16-bit rows, in float32."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.stage.decoder import operators
from molink.stage.decoder.norm import CompiledRmsNorm, Float32RmsNorm, RmsNorm
from molink.stage.decoder.operators import create_operators
from molink.stage.torch_dtypes import TORCH_DTYPES
from molink.stage.weights.weight_reader import WeightReader
from tests.support.kernels import NOT_COMPILED
from tests.support.models import MakeModel

NAME = "model.layers.0.input_layernorm.weight"


def load(folder: Path, dtype: str) -> tuple[CompiledRmsNorm | RmsNorm | Float32RmsNorm, Tensor]:
    opened, kind, cpu = ModelFolder.open(folder), TORCH_DTYPES[dtype], torch.device("cpu")
    norm = create_operators(opened.config, kind, cpu).norm
    with WeightReader(opened, kind, cpu) as reader:
        return norm(reader.read_tensors(NAME)), reader.read_tensors(NAME)


@pytest.mark.parametrize(
    ("family", "dtype", "kind", "kept"),
    [
        ("llama", "f32", RmsNorm, torch.float32),
        ("llama", "bf16", RmsNorm, torch.bfloat16),
        ("llama", "f16", Float32RmsNorm, torch.float32),
        ("gemma2", "f32", RmsNorm, torch.float32),
        ("gemma2", "bf16", Float32RmsNorm, torch.float32),
        ("gemma2", "f16", Float32RmsNorm, torch.float32),
    ],
)
def test_weights_are_offset_in_full_precision(
    make_model: MakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: str,
    kind: type[RmsNorm] | type[Float32RmsNorm],
    kept: torch.dtype,
) -> None:
    monkeypatch.setattr(operators, "create_rowwise", lambda *_: None)
    norm, stored = load(make_model(tmp_path, family), dtype)
    assert isinstance(norm, kind)
    assert norm.weight.dtype == kept
    assert torch.equal(norm.weight.float(), stored.float() + (family == "gemma2"))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_norms_equal_float32_norms(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    folder = make_model(tmp_path, family, head_dim=32)
    compiled, _ = load(folder, dtype)
    if not isinstance(compiled, CompiledRmsNorm):
        pytest.skip(NOT_COMPILED[dtype])
    monkeypatch.setattr(operators, "create_rowwise", lambda *_: None)
    usual, stored = load(folder, dtype)
    assert torch.equal(compiled.weight, stored.float() + (family == "gemma2"))
    rows = torch.randn(5, len(stored)).to(TORCH_DTYPES[dtype])
    within = 2**-6 if dtype == "bf16" else 1e-5
    torch.testing.assert_close(compiled(rows), usual(rows), rtol=within, atol=1e-5)


def test_16_bit_rows_are_rounded_once() -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.linspace(0.9, 1.1, 64)
    wide = rows.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    normed = Float32RmsNorm(weight, 1e-6, rows.dtype)(rows)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.double(), exact, atol=0, rtol=2**-8)
