"""Profiles of real folders have the bytes of their facts."""

from pathlib import Path
from typing import Any

import pytest

from molink.errors import ModelError
from molink.sim.model_description import ModelDescription
from molink.sim.profiles import load_device
from molink.sim.roofline import Roofline

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2_moe": {},
    "glm4_moe": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folders_roofline_weighs_what_its_facts_say(
    make_model: Any, tmp_path: Any, family: str
) -> None:
    made = make_model(tmp_path, family, dtype="bfloat16", **FAMILIES[family])
    found = ModelDescription.from_folder(made)
    for is_last in (False, True):
        stage = Roofline(load_device("rtx4090"), found.shape, 2, is_last=is_last)
        head = found.facts.last_bytes * is_last
        assert stage.weight_bytes == pytest.approx(2 * found.facts.layer_bytes + head, rel=0.01)


def test_experts_count_wherever_their_layers_are(make_model: Any, tmp_path: Path) -> None:
    kinds = ["linear_attention", "mlp", "moe", "full_attention"]
    made = make_model(tmp_path, "nemotron_h", dtype="bfloat16", layers_block_type=kinds)
    shape = ModelDescription.from_folder(made).shape
    assert (shape.intermediate, shape.chosen_share) == (3 * 32 + 48, 3 / 8)


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    for name in ("missing.gguf", "missing", "notes.txt"):
        (tmp_path / "notes.txt").write_text("", encoding="utf-8")
        with pytest.raises(ModelError, match=name):
            ModelDescription.from_folder(tmp_path / name)


def test_a_row_reads_its_experts_and_what_is_shared(make_model: Any, tmp_path: Any) -> None:
    made = make_model(tmp_path, "glm4_moe", dtype="bfloat16", n_shared_experts=2)
    shape = ModelDescription.from_folder(made).shape
    assert shape.intermediate == (3 + 2) * 32
    assert shape.chosen_share == 3 / 8
    expert, attention = 3 * 32 * 64, 2 * 64 * 64 + 2 * 32 * 64 + 64 + 2 * 32
    rest = attention + 2 * expert + 8 * 64 + 8 + 2 * 64
    assert shape.expert_share == pytest.approx(8 * expert / (8 * expert + rest))
    read = (3 * expert + rest) / (8 * expert + rest)
    assert shape.read_share(1) == pytest.approx(read)
    assert shape.read_share(100) == pytest.approx(1.0)
