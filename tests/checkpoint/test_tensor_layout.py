"""The layout contains exactly the tensors that transformers writes."""

from pathlib import Path

import pytest

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.families import ARCHITECTURES
from molink.checkpoint.model_folder import scan_tensors
from molink.checkpoint.prequantized import required_tensors
from molink.checkpoint.tensor_layout import layer_tensors, stage_tensors
from tests.support.models import MakeModel

#: Transformers has Mistral 4 as a text model of Mistral 3 only; see tests/stage/test_families.py.
FAMILIES = sorted({*ARCHITECTURES.values()} - {"mistral4"})


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_a_checkpoint(
    make_model: MakeModel, tmp_path: Path, family: str
) -> None:
    folder = make_model(tmp_path, family)
    found = scan_tensors(folder)
    config = ModelConfig.load_folder(folder).drop_absent_mtp(found)
    wanted = required_tensors(stage_tensors(config, 0, config.layers), "none", found)
    stored = {name: span.shape for name, span in found.items()}
    assert {name: one.shape for name, one in wanted.items()} == stored


def test_layers_with_and_without_experts(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3_moe", mlp_only_layers=[1])
    config = ModelConfig.load_folder(folder)
    assert "model.layers.1.mlp.gate_proj.weight" in layer_tensors(config, 1)
    tensors = layer_tensors(config, 2)
    assert tensors["model.layers.2.mlp.gate.weight"] == (8, 64)
    assert tensors["model.layers.2.mlp.experts.7.down_proj.weight"] == (64, 32)
    assert not any("layers.1" in name for name in tensors)
