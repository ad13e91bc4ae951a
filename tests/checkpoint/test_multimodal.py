"""Folders of multimodal models: the text model alone is found, under either spelling."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.model_folder import INDEX_FILE, ModelFolder, read_weight_map
from molink.checkpoint.multimodal import rename_tensors
from molink.errors import BrokenModel, UnsupportedModel
from molink.swarm.artifacts.fetch_plan import group_tensors, plan_group
from molink.text.tokenizer import Tokenizer
from molinkd.peer.artifacts.model_repository import ModelRepository
from tests.support.models import MakeModel

#: The config of google/gemma-3-4b-it, which leaves out many defaults.
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "mm_tokens_per_image": 256,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


@pytest.fixture
def seeing(make_model: MakeModel, tmp_path: Path) -> Path:
    """A small Mistral 3."""
    return make_model(tmp_path / "model", "mistral3")


def test_hub_configs_are_parsed() -> None:
    config = ModelConfig.parse_config(GEMMA3_4B, "config.json")
    assert (config.family, config.is_multimodal, config.layers) == ("gemma3_text", True, 34)
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_model_len, config.tied_embeddings) == (
        262208,
        131072,
        True,
    )
    assert (config.dtype, config.eos_ids) == ("bf16", (1, 106))
    assert [rope.factor for rope in config.rope_configs] == [8.0, 1.0]
    assert config.windows[:6] == (1024,) * 5 + (0,)


def test_a_text_model_beside_draft_layers(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3_5")
    file = folder / "model.safetensors"
    stored = load(file.read_bytes())
    assert any(name.startswith("model.visual.") for name in stored)
    drafts = {"mtp.layers.0.input_layernorm.weight": torch.zeros(64)}
    save_file(stored | drafts, file, {"format": "pt"})
    opened = ModelFolder.open(folder)
    assert (opened.config.family, opened.config.is_text_only) == ("qwen3_5_text", True)
    assert {*opened.tensors} == {*opened.stage_tensors(0, 4), *drafts}
    shapes = {name: span.shape for name, span in opened.tensors.items()}
    assert shapes["model.layers.0.linear_attn.A_log"] == (6,)


def test_a_contradicting_state_is_refused(
    make_model: MakeModel, tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = make_model(tmp_path / "model", "qwen3_5_text")
    edit_json(folder / "config.json", linear_value_head_dim=24)
    with pytest.raises(BrokenModel, match=r"linear_attn\S+ has shape .* but config.json demands"):
        ModelFolder.open(folder)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"text_config": None}, BrokenModel, "text_config is missing"),
        ({"text_config": 3}, BrokenModel, "text_config must be an object"),
        ({"text_config": {"model_type": "ministral9"}}, UnsupportedModel, "ministral9"),
        (
            {"architectures": ["LlavaForConditionalGeneration"]},
            UnsupportedModel,
            "Llava.*Mistral3ForConditionalGeneration",
        ),
    ],
)
def test_unsupported_models_are_refused(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ModelConfig.parse_config(GEMMA3_4B | change, "config.json")


def test_both_spellings_and_only_the_text_model(seeing: Path) -> None:
    file = seeing / "model.safetensors"
    stored = load(file.read_bytes())
    assert any(name.startswith("vision_tower.") for name in stored)
    opened = ModelFolder.open(seeing)
    assert {*opened.tensors} == {*opened.stage_tensors(0, 3)}
    renamed = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head.", "lm_head.")
        .replace("vision_tower.", "model.vision_tower."): tensor
        for name, tensor in stored.items()
    }
    save_file(renamed, file)
    assert {*ModelFolder.open(seeing).tensors} == {*opened.tensors}


def test_an_index_is_read_by_the_same_names(seeing: Path) -> None:
    names = load_file(seeing / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (seeing / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    mapped = {name for name in read_weight_map(seeing) if not name.startswith("vision")}
    assert mapped == ModelFolder.open(seeing).tensors.keys()


def test_two_spellings_at_once_are_refused() -> None:
    names = ("model.norm.weight", "language_model.model.norm.weight")
    with pytest.raises(BrokenModel, match=r"f: tensor model\.norm\.weight exists under two"):
        rename_tensors(dict.fromkeys(names, 0), "f")


def test_an_unknown_tensor_is_named_among_multimodal_ones(seeing: Path) -> None:
    extra = {"language_model.model.layers.0.mlp.extra.weight": torch.zeros(4)}
    save_file(extra, seeing / "more.safetensors")
    with pytest.raises(BrokenModel, match=r"model\.layers\.0\.mlp\.extra\.weight does not fit"):
        ModelFolder.open(seeing)


def test_the_manifest_has_the_text_model_only(seeing: Path, tmp_path: Path) -> None:
    holding = ModelRepository().add_model("m", seeing)
    config = ModelConfig.load_folder(seeing)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in holding.manifest.files:
        (copy / name).write_bytes((seeing / name).read_bytes())
    fetched = 0
    for group, shapes in group_tensors(config, 0, 3).items():
        plan = plan_group(group, shapes, holding.manifest.tensors)
        pieces = [holding.read_chunk(piece.part.name, piece.index) for piece in plan.chunk_runs()]
        (copy / plan.file).write_bytes(plan.header + b"".join(pieces))
        fetched += len(plan.parts)
    assert fetched == len(holding.manifest.tensors)
    one, other = (ModelFolder.open(path) for path in (seeing, copy))
    assert one.tensors.keys() == other.tensors.keys()
    stored = load_file(copy / "final.safetensors")["lm_head.weight"]
    original = load_file(seeing / "model.safetensors")["language_model.lm_head.weight"]
    assert torch.equal(stored, original)


def test_ids_are_bounded_by_the_text_model(seeing: Path, edit_json: Callable[..., None]) -> None:
    text = json.loads((seeing / "config.json").read_text(encoding="utf-8"))["text_config"]
    edit_json(seeing / "config.json", text_config=text | {"vocab_size": 300})
    assert Tokenizer.open(seeing).vocab_size == 300
