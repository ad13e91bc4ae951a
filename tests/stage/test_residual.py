"""In float16 the residual stream is float32, since those of bf16 models exceed float16."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from molink.checkpoint.model_folder import ModelFolder
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from tests.support.models import MakeModel
from tests.support.stage import Ring

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    return request.param


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite", "olmo2", "gpt_oss"])
def test_logits_stay_close(
    make_model: MakeModel,
    tmp_path: Path,
    make_ring: type[Ring],
    random_tokens: Callable[..., list[int]],
    family: str,
    device: str,
) -> None:
    folder = make_model(tmp_path, family, 4, dtype="bfloat16")
    tokens, table = random_tokens(50), range(7)
    expected = make_ring(folder).run(tokens, [SequenceRows(0, 50, table)])
    ring = make_ring(folder, (1, 2), dtype="f16", device=device)
    logits = ring.run(tokens[:40], [SequenceRows(0, 40, table)])
    later = ring.run(tokens[40:], [SequenceRows(40, 10, table)])
    found = torch.cat([logits, later]).cpu()
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.02 * expected.std()


def test_rows_beyond_the_range_of_float16_pass(
    make_model: MakeModel, tmp_path: Path, device: str
) -> None:
    opened = ModelFolder.open(make_model(tmp_path, "qwen3", 4, dtype="bfloat16"))
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    hidden[:, 3] = 3e5
    results = []
    for dtype, place in (("f32", "cpu"), ("f16", device)):
        stage = Stage.load_layers(opened, (1, 2), place, dtype)
        stage.wire_dtype, stage._wire_dtype = "f32", torch.float32
        stage.allocate_kv_pool(4, 8)
        rows = stage.forward(StageInput(None, hidden, (SequenceRows(0, 6, (2,)),)))
        results.append(rows.cpu())
    assert results[1].isfinite().all()
    torch.testing.assert_close(results[1], results[0], atol=0.02, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_products_beyond_the_range_of_float16_pass(
    make_model: MakeModel, tmp_path: Path, device: str, family: str, factor: float
) -> None:
    """As in the MLPs of models trained in bf16, on a GPU without bf16."""
    folder = make_model(tmp_path, family, 4, dtype="bfloat16")
    path = folder / "model.safetensors"
    weights = load(path.read_bytes())  # Windows can't replace a file that is mapped
    for name, weight in weights.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight", ".w1.weight", ".w3.weight")):
            weights[name] = weight * factor
    path.write_bytes(save(weights, {"format": "pt"}))
    opened = ModelFolder.open(folder)
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).mul(5)
    results = []
    for dtype, place in (("f32", "cpu"), ("f16", device)):
        stage = Stage.load_layers(opened, (1, 2), place, dtype)
        stage.wire_dtype, stage._wire_dtype = "f32", torch.float32
        stage.allocate_kv_pool(4, 8)
        rows = stage.forward(StageInput(None, hidden, (SequenceRows(0, 6, (2,)),)))
        results.append(rows.cpu())
    assert results[1].isfinite().all()
    # What a layer adds to rows far exceeds float16, or is as usual.
    largest = float(results[0].abs().max())
    assert (largest > 1e5) == (factor > 1 and family != "gemma2")
    assert float((results[1] - results[0]).abs().max()) < 2e-3 * largest
