"""What people mistake for a model is named, with advice."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel, ModelError, UnsupportedModel

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
    with pytest.raises(UnsupportedModel, match=r"adapter of meta-llama/Llama-3\.2-1B.*--adapter"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "tekken.json"])
def test_a_tokenizer_in_another_file_alone(folder: Path, name: str) -> None:
    (folder / name).write_text("{}", encoding="utf-8")
    ModelFolder.open(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=rf"{name}, but no tokenizer\.json.*AutoTokenizer"):
        ModelFolder.open(folder)


def test_an_adapter_beside_the_config_of_its_model(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    save_file({"lora_A.weight": torch.zeros(4)}, folder / "adapter_model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"is an adapter, not a whole model: serve"):
        ModelFolder.open(folder)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["tokenizer.model"], r"has only a tokenizer \(tokenizer\.model\)"),
        (["params.json", "consolidated.00.pth", "tokenizer.model"], r"own layout \(params\.json\)"),
        (["consolidated.safetensors", "tekken.json"], r"own layout \(consolidated\.safetensors\)"),
        (["model.onnx"], r"config\.json is missing in the model folder .*: a model folder has"),
        ([], r"config\.json is missing in the model folder"),
    ],
)
def test_no_config(tmp_path: Path, names: list[str], said: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=said) as raised:
        ModelFolder.open(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pytorch_model.bin", r"AutoModelForCausalLM.*save_pretrained"),
        ("weights.npz", "take the model's bf16 or fp16 files"),
    ],
)
def test_weights_of_other_kinds(folder: Path, name: str, hint: str) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(BrokenModel, match=r"no weights .* fetch the complete model"):
        ModelFolder.open(folder)
    (folder / name).write_bytes(b"x")
    with pytest.raises(BrokenModel, match=rf"\({name} is of a kind .*{hint}"):
        ModelFolder.open(folder)


def test_biases_of_old_autogptq(folder: Path) -> None:
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
