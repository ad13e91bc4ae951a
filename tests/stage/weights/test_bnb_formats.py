"""Quantized stages give transformers' results with the weights' dequantized values."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.quantized_size import is_quantizable
from molink.errors import BrokenModel, ModelError, UnsupportedModel, UsageError
from molink.stage.batch import SequenceRows
from molink.stage.stage import Stage
from tests.support.bnb_models import as_nf4, both, rewrite, set_config
from tests.support.models import MakeModel
from tests.support.stage import Reference, Ring


def stands_for(name: str, weight: Tensor, mode: str) -> Tensor:
    """A weight's values after quantization while loading."""
    if mode == "nf4":
        return as_nf4(name, weight, double=False)[1]
    scales = weight.abs().amax(1, keepdim=True)
    return (weight * (127 / scales)).round() * scales / 127


@pytest.fixture(params=["qwen2", "llama", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, make_model: MakeModel, tmp_path: Path) -> Path:
    more: dict[str, Any] = {}
    if request.param == "qwen3_moe":
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        # Published checkpoints store experts one by one.
        pytest.importorskip("transformers.models.qwen3_moe")
    return make_model(tmp_path / "model", request.param, 0, **more)


def check_logits(
    make_ring: type[Ring],
    make_reference: type[Reference],
    given: Path,
    plain: Path,
    tokens: list[int],
    tolerance: float,
    **options: str,
) -> None:
    expected = make_reference(plain).logits(tokens)
    for splits in ((), (1,), (1, 2)):
        ring = make_ring(given, splits, **options)
        logits = ring.run(tokens, [SequenceRows(0, len(tokens), range(8))])
        off = (logits - expected).abs().amax(1) / expected.abs().max()
        # In bf16 a router may choose other experts for some rows.
        assert float(off.median() if "dtype" in options else off.max()) <= tolerance


@pytest.mark.parametrize("kind", ["int8", "single", "double"])
def test_a_quantized_checkpoint(
    folder: Path,
    tmp_path: Path,
    kind: str,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:
    quantized, plain = both(folder, tmp_path, kind)
    mode = "int8" if kind == "int8" else "nf4"
    opened = ModelFolder.open(quantized)
    assert opened.config.quantized == mode
    assert opened.placement_facts("q").quantized == mode
    tokens = random_tokens(40)
    check_logits(make_ring, make_reference, quantized, plain, tokens, 2e-3)
    check_logits(make_ring, make_reference, quantized, plain, tokens, 0.06, dtype="bf16")


@pytest.mark.parametrize("left_out", ["layers.1.", "q_proj"])
@pytest.mark.parametrize("kind", ["int8", "double"])
def test_projections_that_the_checkpoint_leaves_out(
    make_model: MakeModel,
    tmp_path: Path,
    kind: str,
    left_out: str,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:
    folder = make_model(tmp_path / "model", "qwen2", 0)
    quantized, plain = both(folder, tmp_path, kind, left_out)
    # The unquantized part of a merged projection is quantized like the rest.
    tolerance = 0.02 if left_out == "layers.1." else 0.5
    check_logits(make_ring, make_reference, quantized, plain, random_tokens(40), tolerance)


@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_quantized_while_loading(
    folder: Path,
    tmp_path: Path,
    mode: str,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:
    plain = rewrite(
        folder,
        tmp_path / "plain",
        lambda name, weight: {
            name: stands_for(name, weight, mode) if is_quantizable(name, weight.shape) else weight
        },
    )
    tokens = random_tokens(40)
    check_logits(make_ring, make_reference, folder, plain, tokens, 2e-3, quantize=mode)
    check_logits(
        make_ring, make_reference, folder, plain, tokens, 0.06, quantize=mode, dtype="bf16"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "single", "double"])
def test_a_quantized_checkpoint_on_a_gpu(
    make_model: MakeModel,
    tmp_path: Path,
    kind: str,
    make_ring: type[Ring],
    make_reference: type[Reference],
    random_tokens: Callable[..., list[int]],
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    quantized, plain = both(make_model(tmp_path / "model", "qwen2", 0), tmp_path, kind)
    tokens = random_tokens(40)
    expected = make_reference(plain).logits(tokens)
    for given, quantize in ((quantized, "none"), (tmp_path / "model", "int8")):
        for dtype, tolerance in (("f32", 0.02), ("f16", 0.03), ("bf16", 0.08)):
            if given != quantized and kind != "int8":
                continue
            ring = make_ring(given, (1,), device="cuda:0", dtype=dtype, quantize=quantize)
            logits = ring.run(tokens, [SequenceRows(0, len(tokens), range(8))]).cpu()
            off = (logits - expected).abs().amax() / expected.abs().max()
            assert float(off) <= tolerance


def test_a_stage_is_smaller(make_model: MakeModel, tmp_path: Path) -> None:
    folder = ModelFolder.open(
        make_model(tmp_path, "llama", 0, hidden_size=256, intermediate_size=512, head_dim=64)
    )
    plain, eight, four = (
        Stage.load_layers(folder, (1, 2), dtype="f32", quantize=mode).weight_bytes
        for mode in ("none", "int8", "nf4")
    )
    assert eight < 0.27 * plain
    assert four < 0.15 * plain


def test_ends_of_the_model_stay_as_they_are(make_model: MakeModel, tmp_path: Path) -> None:
    folder = ModelFolder.open(make_model(tmp_path, "llama", 0))
    whole = Stage.load_layers(folder, (0, 3), dtype="f32", quantize="nf4").weight_bytes
    inner = Stage.load_layers(folder, (1, 2), dtype="f32", quantize="nf4").weight_bytes
    vocabulary = 2 * 320 * 64 * 4
    assert whole == 3 * inner + vocabulary + 64 * 4


def test_one_quantization_is_not_put_on_another(make_model: MakeModel, tmp_path: Path) -> None:
    quantized, _ = both(make_model(tmp_path / "model", "llama", 0), tmp_path, "int8")
    opened = ModelFolder.open(quantized)
    assert Stage.load_layers(opened, (1, 2), quantize="int8").weight_bytes > 0
    with pytest.raises(UsageError, match="quantized as int8"):
        Stage.load_layers(opened, (1, 2), quantize="nf4")


def damage(folder: Path, suffix: str, value: Callable[[Tensor], Tensor | None]) -> str:
    """Change the first tensor with this suffix; returns its weight's name."""
    (path,) = folder.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    name = next(name for name in sorted(tensors) if name.endswith(suffix))
    changed = value(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    path.unlink()
    save_file(tensors, path)
    return name


def blob(**fields: object) -> Callable[[Tensor], Tensor]:
    def change(stored: Tensor) -> Tensor:
        state = json.loads(bytes(stored.tolist())) | fields
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


STATE = "quant_state.bitsandbytes__nf4"
#: Kind of checkpoint, tensor, change, error, and the message's text.
DAMAGES: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], type[ModelError], str]] = {
    "no scales": ("int8", "SCB", lambda _: None, BrokenModel, "SCB is in none"),
    "scales of another shape": ("int8", "SCB", lambda t: t[:-1], BrokenModel, "SCB has shape"),
    "scales of another type": ("int8", "SCB", lambda t: t.half(), UnsupportedModel, "SCB is F16"),
    "a scale that is NaN": ("int8", "SCB", lambda t: t * math.nan, BrokenModel, "a scale is NaN"),
    "rows of an old GPU": (
        "int8", "weight_format", lambda t: t + 1, UnsupportedModel, "weight_format 1",
    ),
    "no state": ("single", STATE, lambda _: None, BrokenModel, "nf4 is in none"),
    "an endless state": (
        "single", STATE, lambda t: t.repeat(100), BrokenModel, "nf4 has shape",
    ),
    "not (a|valid) JSON": ("single", STATE, lambda t: t[:-3], BrokenModel, "is not valid JSON"),
    "no text": ("single", STATE, lambda t: t.fill_(255), BrokenModel, "is not valid JSON"),
    "deep JSON": (
        "single", STATE, lambda _: torch.full((4000,), 91, dtype=torch.uint8), BrokenModel, "JSON",
    ),
    "no object": (
        "single", STATE, lambda _: torch.tensor([91, 93]).byte(), BrokenModel, "not a JSON object",
    ),
    "blocks of 128": ("single", STATE, blob(blocksize=128), UnsupportedModel, "blocks of 128"),
    "fp4": ("single", STATE, blob(quant_type="fp4"), UnsupportedModel, "fp4 in blocks"),
    "another shape": ("single", STATE, blob(shape=[1, 2]), BrokenModel, "shape"),
    "an infinite offset": (
        "double", STATE, blob(nested_offset=math.inf), BrokenModel, "nested_offset",
    ),
    "other values": ("single", "quant_map", lambda t: t * 0.9, UnsupportedModel, "quant_map"),
    "values that are NaN": (
        "double", "nested_quant_map", lambda t: t * math.nan, BrokenModel, "a scale is NaN",
    ),
    "no nested scales": ("double", "nested_absmax", lambda _: None, BrokenModel, "in none"),
    "a NaN among nested scales": (
        "double", "nested_absmax", lambda t: t * math.nan, BrokenModel, "a scale is NaN",
    ),
    "a packed weight that is too short": (
        "single", "q_proj.weight", lambda t: t[:-1], BrokenModel, "q_proj.weight has shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_named(make_model: MakeModel, tmp_path: Path, case: str) -> None:
    kind, suffix, change, error, message = DAMAGES[case]
    quantized, _ = both(make_model(tmp_path / "model", "qwen2", 0), tmp_path, kind)
    damage(quantized, suffix, change)
    with pytest.raises(error, match=message) as caught:
        Stage.load_layers(ModelFolder.open(quantized), (0, 3), dtype="f32")
    assert "model.layers." in str(caught.value)


def test_a_plain_config_with_quantized_weights(make_model: MakeModel, tmp_path: Path) -> None:
    quantized, _ = both(make_model(tmp_path / "model", "qwen2", 0), tmp_path, "int8")
    set_config(quantized, None)
    with pytest.raises(UnsupportedModel, match=r"proj\.weight is I8"):
        ModelFolder.open(quantized)
