"""Tensors that the config doesn't explain are refused, unless they have no effect."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from molink.checkpoint.model_folder import INDEX_FILE, ModelFolder
from molink.errors import BrokenModel
from tests.support.models import MakeModel, add_draft_layer, name_qwen_drafts


def add(folder: Path, file: str, *names: str) -> None:
    save_file({name: torch.zeros(4) for name in names}, folder / file)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.1.self_attn.o_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.0.mlp.up_proj.SCB",
        "lm_head.bias",
    ],
)
def test_an_unknown_tensor_is_named(folder: Path, name: str) -> None:
    add(folder, "more.safetensors", name)
    with pytest.raises(BrokenModel, match=rf"more\.safetensors: tensor {name} does not fit"):
        ModelFolder.open(folder)
    with pytest.raises(BrokenModel, match=name):
        ModelFolder.open(folder, (1, 2))


def test_fewer_layers_in_the_config_than_in_the_files(
    folder: Path, edit_json: Callable[..., None]
) -> None:
    edit_json(folder / "config.json", num_hidden_layers=2, layer_types=None)
    with pytest.raises(BrokenModel, match=r"model\.layers\.2\.\S+ and 11 more does not fit"):
        ModelFolder.open(folder)


def test_biases_that_the_config_has_not(
    make_model: MakeModel, tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = make_model(tmp_path, "llama", 0, attention_bias=True)
    ModelFolder.open(folder)
    edit_json(folder / "config.json", attention_bias=False)
    with pytest.raises(BrokenModel, match=r"k_proj\.bias and 11 more does not fit"):
        ModelFolder.open(folder)


def test_the_last_stage_has_the_mtp_layer(
    make_model: MakeModel, tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = add_draft_layer(make_model(tmp_path, "glm4_moe", 0))
    opened = ModelFolder.open(folder)
    assert opened.config.layers == 3
    names = {last: opened.stage_tensors(last - 1, last) for last in (2, 3)}
    assert not any(".layers.3." in name for name in names[2])
    assert {"model.layers.3.eh_proj.weight", "model.embed_tokens.weight"} < {*names[3]}
    # The MTP layer's copies of the embedding and the output head are not read.
    assert not any(
        name.startswith("model.layers.3.") and name.endswith(("embed_tokens.weight", "head.weight"))
        for name in names[3]
    )
    for layers, drafting, refusal in (
        (3, 0, r"model\.layers\.3\.\S+ and \d+ more does not fit"),
        (2, 1, r"model\.layers\.2\.\S+ and \d+ more does not fit"),
        (2, 2, r"model\.layers\.2\.\S+ and \d+ more does not fit"),
        (3, 2, "num_nextn_predict_layers is 2, but the safetensors files have 1 such layers"),
    ):
        fields = {"num_hidden_layers": layers, "num_nextn_predict_layers": drafting}
        edit_json(folder / "config.json", **fields)
        with pytest.raises(BrokenModel, match=refusal):
            ModelFolder.open(folder)


def test_qwen_has_the_mtp_layer_that_its_config_need_not_mention(
    make_model: MakeModel, tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = name_qwen_drafts(add_draft_layer(make_model(tmp_path, "qwen3_next", 0)))
    names = ModelFolder.open(folder).stage_tensors(3, 4)
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} < {*names}
    for fields, has_mtp in (
        ({"mtp_num_hidden_layers": 1}, True),
        ({"mtp_num_hidden_layers": 0}, False),
        ({"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True}, False),
    ):
        edit_json(folder / "config.json", **fields)
        assert (ModelFolder.open(folder).config.mtp is not None) == has_mtp
    edit_json(folder / "config.json", mtp_num_hidden_layers=2, mtp_use_dedicated_embeddings=False)
    with pytest.raises(BrokenModel, match=r"mtp_num_hidden_layers is 2, but .* have 1"):
        ModelFolder.open(folder)


def test_mtp_layers_that_contradict_the_config(make_model: MakeModel, tmp_path: Path) -> None:
    folder = add_draft_layer(make_model(tmp_path, "glm4_moe", 0))
    path = folder / "model.safetensors"
    tensors = load(path.read_bytes())
    projection, norm = "model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight"
    wrong = {
        r"eh_proj\.weight has shape \[64, 64\], but config\.json demands \[64, 128\]": tensors
        | {projection: tensors[projection][:, :64].contiguous()},
        r"enorm\.weight is in none of the safetensors files": {
            name: tensor for name, tensor in tensors.items() if name != norm
        },
        r"model\.layers\.3\.\S+ and \d+ more does not fit": {
            name: tensor for name, tensor in tensors.items() if name != projection
        },
    }
    for refusal, content in wrong.items():
        save_file(content, path, {"format": "pt"})
        with pytest.raises(BrokenModel, match=refusal):
            ModelFolder.open(folder)


def test_ernies_draft_layers_are_left_unread(
    make_model: MakeModel, tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = make_model(tmp_path, "ernie4_5_moe", 0)
    add(
        folder,
        "more.safetensors",
        "model.mtp_block.0.mlp.up_proj.weight",
        "model.mtp_emb_norm.0.weight",
    )
    with pytest.raises(BrokenModel, match=r"model\.mtp_block\.\S+ and 1 more does not fit"):
        ModelFolder.open(folder)
    edit_json(folder / "config.json", num_nextn_predict_layers=1)
    ModelFolder.open(folder)


@pytest.mark.parametrize(
    "names",
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
        ("layers.0.attention.wk.weight", "tok_embeddings.weight"),
        ("base_model.model.layers.0.self_attn.q_proj.lora_A.weight",),
    ],
)
def test_known_leftovers_and_foreign_files_are_accepted(
    folder: Path, names: tuple[str, ...]
) -> None:
    add(folder, "consolidated.safetensors", *names)
    assert ModelFolder.open(folder).config.layers == 3


def test_foreign_tensors_are_refused(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    add(folder, "zz.safetensors", "score.weight")
    ModelFolder.open(folder)
    save_file(
        {"model.norm.weight": torch.ones(64), "score.weight": torch.ones(4)},
        folder / "zz.safetensors",
    )
    # Under this name the other file's norm is the one that is used.
    shutil.move(folder / "zz.safetensors", folder / "aa.safetensors")
    with pytest.raises(BrokenModel, match=r"score\.weight"):
        ModelFolder.open(folder)


def test_the_output_head_of_a_tied_model_is_ignored(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", 0, tie_word_embeddings=True)
    add(folder, "more.safetensors", "lm_head.weight")
    assert ModelFolder.open(folder).config.tied_embeddings
