"""A model folder is checked before anything starts, for all layers or for those of one stage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from molink.checkpoint.model_folder import INDEX_FILE, METADATA_FILES, REQUIRED_FILES, ModelFolder
from molink.errors import BrokenModel, ModelNotFound, UnsupportedModel, UsageError
from tests.support.models import MakeModel


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def shard_of(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
    return folder / index["weight_map"][tensor]


def change(path: Path, tensor: str, value: Tensor | None) -> None:
    tensors = load(path.read_bytes())  # Windows can't replace a file that is mapped
    del tensors[tensor]
    if value is not None:
        tensors[tensor] = value
    save_file(tensors, path)


def test_a_sharded_folder(folder: Path) -> None:
    assert len(shards(folder)) > 2
    opened = ModelFolder.open(folder)
    assert opened.config.family == "qwen2"
    names = [name for bounds in ((0, 1), (1, 2), (2, 3)) for name in opened.stage_tensors(*bounds)]
    assert sorted(names) == sorted(opened.tensors)
    assert len(opened.stage_tensors(1, 2)) == 12
    assert set(REQUIRED_FILES) < set(METADATA_FILES)


def test_facts_add_up(folder: Path) -> None:
    opened = ModelFolder.open(folder)
    facts = opened.placement_facts("tiny")
    total = facts.first_bytes + 3 * facts.layer_bytes + facts.last_bytes
    assert total == sum(span.nbytes for span in opened.tensors.values())
    assert (facts.name, facts.layers, facts.max_model_len, facts.element_bytes) == (
        "tiny",
        3,
        512,
        4,
    )
    assert facts.kv_bytes == 2 * 2 * 16 * 4


def test_a_tied_model_counts_its_embedding_at_both_ends(
    make_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_model(tmp_path, "qwen2", 0, tie_word_embeddings=True, dtype="bfloat16")
    opened = ModelFolder.open(folder)
    facts = opened.placement_facts("tied")
    assert facts.last_bytes == facts.first_bytes + 64 * 2
    assert "model.embed_tokens.weight" in opened.stage_tensors(2, 3)
    assert opened.config.dtype == "bf16"


def test_the_dtype_is_found_in_the_weights_if_the_config_has_none(
    make_model: MakeModel, tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = make_model(tmp_path, "llama", 0, dtype="bfloat16")
    edit_json(folder / "config.json", dtype=None, torch_dtype=None)
    assert ModelFolder.open(folder).config.dtype == "bf16"


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        ModelFolder.open(tmp_path / "nowhere")


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(BrokenModel, match=f"{name} is missing"):
        ModelFolder.open(folder)


def test_a_damaged_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("not json", encoding="utf-8")
    with pytest.raises(BrokenModel, match=r"tokenizer\.json: not valid JSON"):
        ModelFolder.open(folder)


def test_no_weights(folder: Path) -> None:
    for shard in shards(folder):
        shard.unlink()
    with pytest.raises(BrokenModel, match=r"no \*\.safetensors file\)"):
        ModelFolder.open(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(BrokenModel, match=r"pytorch_model\.bin"):
        ModelFolder.open(folder)


def test_a_missing_shard_is_named_with_what_it_held(folder: Path) -> None:
    shard = shard_of(folder, "lm_head.weight")
    shard.unlink()
    with pytest.raises(BrokenModel, match=rf"{shard.name} is missing: .* lm_head"):
        ModelFolder.open(folder)


def test_a_stage_needs_only_its_own_shards(folder: Path) -> None:
    shard_of(folder, "model.embed_tokens.weight").unlink()
    shard_of(folder, "lm_head.weight").unlink()
    last = shard_of(folder, "model.layers.2.mlp.down_proj.weight")
    last.unlink(missing_ok=True)
    missing = {name for bound in ((0, 1), (2, 3)) for name in stage_missing(folder, bound)}
    assert missing
    ModelFolder.open(folder, (1, 2))


def stage_missing(folder: Path, bounds: tuple[int, int]) -> list[str]:
    with pytest.raises(BrokenModel) as caught:
        ModelFolder.open(folder, bounds)
    return [str(caught.value)]


def test_a_truncated_shard_is_named(folder: Path) -> None:
    shard = shards(folder)[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BrokenModel, match=rf"{shard.name}: tensor .* truncated"):
        ModelFolder.open(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.bias"
    change(shard_of(folder, name), name, None)
    with pytest.raises(BrokenModel, match=f"lacks it: .*{name}"):
        ModelFolder.open(folder)
    (folder / INDEX_FILE).unlink()
    with pytest.raises(BrokenModel, match=f"tensor {name} is in none"):
        ModelFolder.open(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    change(shard_of(folder, name), name, torch.zeros(95, 64))
    with pytest.raises(BrokenModel, match=rf"{name} has shape \[95, 64\].*\[96, 64\]"):
        ModelFolder.open(folder)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.int8, "I8"), (torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3")],
)
def test_a_wrong_dtype_is_named(folder: Path, dtype: torch.dtype, stored: str) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    change(shard_of(folder, name), name, torch.zeros(96, 64).to(dtype))
    with pytest.raises(UnsupportedModel, match=f"{name} is {stored}; supported here: F32, BF16"):
        ModelFolder.open(folder)


def test_an_unsupported_architecture_is_named(folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(folder / "config.json", architectures=["GemmaForCausalLM"])
    with pytest.raises(UnsupportedModel, match="GemmaForCausalLM"):
        ModelFolder.open(folder)


def test_a_damaged_index_is_named(folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(folder / INDEX_FILE, weight_map={"model.norm.weight": "../../x.safetensors"})
    with pytest.raises(BrokenModel, match=r"weight_map has '\.\./\.\./x.*leads out of its folder"):
        ModelFolder.open(folder)
    edit_json(folder / INDEX_FILE, weight_map=[1])
    with pytest.raises(BrokenModel, match="weight_map"):
        ModelFolder.open(folder)


def test_a_tensor_in_two_files(folder: Path) -> None:
    name, other = "model.norm.weight", folder / "a-other.safetensors"
    save_file({name: torch.zeros(64)}, other)
    assert ModelFolder.open(folder).tensors[name].file == shard_of(folder, name).name
    (folder / INDEX_FILE).unlink()
    save_file({name: torch.zeros(63)}, other)
    with pytest.raises(BrokenModel, match=rf"{name} differs in {other.name} and"):
        ModelFolder.open(folder)


@pytest.mark.parametrize("layers", [(0, 4), (2, 2), (-1, 2), (3, 1)])
def test_layers_that_the_model_does_not_have(folder: Path, layers: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="layers 1-3"):
        ModelFolder.open(folder, layers)
