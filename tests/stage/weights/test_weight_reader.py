"""Tensors are read from any shard, merged and converted; the files may then be deleted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from molink.checkpoint.model_folder import ModelFolder
from molink.errors import BrokenModel
from molink.stage.weights.weight_reader import WeightReader
from tests.support.models import MakeModel

CPU = torch.device("cpu")
NAMES = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]


@pytest.fixture
def folder(make_model: MakeModel, tmp_path: Path) -> Path:
    return make_model(tmp_path, "qwen2", 0, max_shard_size="60KB")


def test_tensors_of_several_shards_are_merged_and_converted(folder: Path) -> None:
    stored = {}
    for shard in folder.glob("*.safetensors"):
        # Cloned, since `load_file`'s results keep the file mapped, which Windows then can't
        # replace.
        stored |= {name: tensor.clone() for name, tensor in load_file(shard).items()}
    opened = ModelFolder.open(folder)
    with WeightReader(opened, torch.bfloat16, CPU) as reader:
        merged = reader.read_tensors(*NAMES)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert torch.equal(merged, torch.cat([stored[name] for name in NAMES]).bfloat16())


def test_a_file_that_changed_since_it_was_checked_is_named(folder: Path) -> None:
    opened = ModelFolder.open(folder)
    file = opened.tensors[NAMES[0]].file
    (folder / file).write_bytes(b"short")
    with (
        WeightReader(opened, torch.float32, CPU) as reader,
        pytest.raises(BrokenModel, match=rf"{file}: tensor {NAMES[0]} can't be read"),
    ):
        reader.read_tensors(*NAMES)
