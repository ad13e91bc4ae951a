"""What people take for a model is named, with what to do."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from molink.checkpoint.folder import ModelFolder
from molink.errors import BrokenModel, UnsupportedModel

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00002-of-00002.safetensors"])
def test_a_pointer_of_git_lfs(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER, encoding="utf-8")
    with pytest.raises(BrokenModel, match=rf"{name} is a git-lfs pointer.*git lfs pull"):
        ModelFolder.open(folder)


def test_an_adapter(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "meta-llama/Llama-3.2-1B", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {"base_model.x.lora_A.weight": torch.zeros(4)}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(UnsupportedModel, match=r"adapter of meta-llama/Llama-3\.2-1B.*merge"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_a_tokenizer_in_another_file_alone(folder: Path, name: str) -> None:
    (folder / name).write_text("{}", encoding="utf-8")
    ModelFolder.open(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=rf"{name}, but no tokenizer\.json.*AutoTokenizer"):
        ModelFolder.open(folder)


def test_what_auto_gptq_left(folder: Path) -> None:
    (folder / "quantize_config.json").write_text('{"bits": 4}', encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=r'old layout.*"quant_method": "gptq", or take'):
        ModelFolder.open(folder)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.layers.0.mlp.up_proj.qweight", "GPTQ or AWQ"),
        ("model.layers.0.mlp.up_proj.weight_scale", "fp8"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "fp8"),
        ("model.layers.0.mlp.up_proj.weight_packed", "compressed-tensors"),
        ("model.layers.0.mlp.up_proj.scales", "MLX"),
        ("v_head.summary.weight", "value head"),
    ],
)
def test_tensors_of_other_kinds(folder: Path, name: str, what: str) -> None:
    save_file({name: torch.zeros(4)}, folder / "more.safetensors")
    with pytest.raises(UnsupportedModel, match=rf"more\.safetensors: tensor {name} .*{what}"):
        ModelFolder.open(folder)
