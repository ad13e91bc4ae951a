"""A model's task, according to sentence-transformers' files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_task import GENERATE, ModelTask, read_task
from molink.errors import BrokenModel, UnsupportedModel
from tests.support.models import write_modules, write_plain_model

LAST = {"1_Pooling": {"word_embedding_dimension": 16, "pooling_mode_lasttoken": True}}
SCORE = {"1_LogitScore": {"true_token_id": 9693, "false_token_id": 2152}}
POOLS = ("Transformer", "Pooling", "Normalize")


@pytest.mark.parametrize(
    ("names", "configs", "task"),
    [
        (("Transformer",), {}, GENERATE),
        (POOLS, LAST, ModelTask("embed")),
        (POOLS, {"1_Pooling": {"pooling_mode": "lasttoken"}}, ModelTask("embed")),
        (("Transformer", "LogitScore"), SCORE, ModelTask("rerank", 9693, 2152)),
    ],
)
def test_tasks(
    tmp_path: Path, names: Sequence[str], configs: Mapping[str, dict[str, Any]], task: ModelTask
) -> None:
    assert read_task(tmp_path) == GENERATE
    assert read_task(write_modules(tmp_path, names, configs)) == task


@pytest.mark.parametrize(
    ("names", "configs", "error", "reason"),
    [
        ((*POOLS, "Dense"), LAST, UnsupportedModel, "pass through 'Dense'"),
        (POOLS, {"1_Pooling": {"pooling_mode_mean_tokens": True}}, UnsupportedModel, "mean_tokens"),
        (POOLS, {"1_Pooling": {}}, UnsupportedModel, "by nothing"),
        (POOLS, {"1_Pooling": {"pooling_mode": {"a": 1}}}, UnsupportedModel, "pooling by"),
        (POOLS, {}, BrokenModel, "config.json is missing"),
        (("Pooling",), {}, UnsupportedModel, "not in '1_Pooling'"),
        (
            ("Transformer", "LogitScore"),
            {"1_LogitScore": {"true_token_id": 5, "false_token_id": None}},
            UnsupportedModel,
            "one token's logit",
        ),
        (
            ("Transformer", "LogitScore"),
            {"1_LogitScore": {"true_token_id": "yes", "false_token_id": 3}},
            BrokenModel,
            "true_token_id",
        ),
    ],
)
def test_refusals(
    tmp_path: Path,
    names: Sequence[str],
    configs: Mapping[str, dict[str, Any]],
    error: type[Exception],
    reason: str,
) -> None:
    write_modules(tmp_path, names, configs)
    with pytest.raises(error, match=reason):
        read_task(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[5]", '[{"path": "x"}]', "[" * 5000])
def test_broken_lists(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text, encoding="utf-8")
    with pytest.raises(BrokenModel, match=r"modules\.json"):
        read_task(tmp_path)


def test_an_embedding_model_has_no_output_head(
    tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = write_plain_model(tmp_path / "model")
    names = ModelFolder.open(folder).stage_tensors(3, 4)
    assert "lm_head.weight" in names
    last = ModelFolder.open(folder).placement_facts("m").last_bytes
    write_modules(folder, POOLS, LAST)
    opened = ModelFolder.open(folder)
    assert "lm_head.weight" not in opened.stage_tensors(3, 4)
    assert not opened.config.has_output_head
    assert opened.placement_facts("m").last_bytes < last
    # Such models are often saved as the inner model of a generating one.
    edit_json(folder / "config.json", architectures=["LlamaModel"])
    assert ModelConfig.load_folder(folder).family == "llama"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"auto_map": {"AutoModel": "modeling.X"}}, "auto_map"),
    ],
)
def test_other_attention_is_refused(
    tmp_path: Path, edit_json: Callable[..., None], fields: dict[str, Any], reason: str
) -> None:
    folder = write_modules(write_plain_model(tmp_path / "model"), POOLS, LAST)
    edit_json(folder / "config.json", **fields)
    with pytest.raises(UnsupportedModel, match=reason):
        ModelConfig.load_folder(folder)
