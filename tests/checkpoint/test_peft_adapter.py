"""Adapters in PEFT's format: which are read, and which are refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.peft_adapter import PeftAdapter
from molink.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from tests.support.adapters import write_adapter
from tests.support.models import MakeModel

EditJson = Callable[..., None]
_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture
def adapter(pristine: Path, tmp_path: Path) -> Path:
    """An adapter of queries and values."""
    return write_adapter(tmp_path / "adapter", pristine, ("q_proj", "v_proj"))


@pytest.fixture
def config(pristine: Path) -> ModelConfig:
    """The base model's config."""
    return ModelConfig.load_folder(pristine)


def _edit_tensors(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load, save_file

    tensors = load((folder / "adapter_model.safetensors").read_bytes())
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_modules_with_their_ranks_scales_and_layers(
    pristine: Path, tmp_path: Path, config: ModelConfig
) -> None:
    made = write_adapter(
        tmp_path / "adapter",
        pristine,
        ("q_proj", "v_proj"),
        layers=(0, 2),
        rank_pattern={"self_attn.v_proj": 2},
        alpha_pattern={"layers.2.self_attn.q_proj": 16, "v_proj": 1},
    )
    found = PeftAdapter.open(made, "tuned", config)
    assert found.adapter.name == "tuned"
    assert {(m.module, m.rank, m.scale, m.layers) for m in found.adapter.modules} == {
        ("self_attn.q_proj", 4, 2.0, (0,)),
        ("self_attn.q_proj", 4, 4.0, (2,)),
        ("self_attn.v_proj", 2, 0.5, (0, 2)),
    }
    assert {*found.matrices} == {
        (layer, f"self_attn.{name}_proj") for layer in (0, 2) for name in "qv"
    }


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4'"),
        ({"rank_pattern": {"(a+)+b": 2}}, "a regular expression"),
        ({"alpha_pattern": {r".*\d": 2}}, "a regular expression"),
    ],
)
def test_unsupported_features(
    adapter: Path, config: ModelConfig, edit_json: EditJson, fields: dict[str, Any], named: str
) -> None:
    edit_json(adapter / "adapter_config.json", **fields)
    with pytest.raises(UnsupportedModel) as raised:
        PeftAdapter.open(adapter, "tuned", config)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 0},
        {"r": 100_000},
        {"r": "8"},
        {"lora_alpha": "big"},
        {"lora_alpha": 1e30},
        {"lora_alpha": True},
        {"use_rslora": 1},
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
        {"target_modules": [1]},
        {"target_modules": ["q_proj"] * 1025},
        {"rank_pattern": {f"q{n}": 4 for n in range(4097)}},
        {"rank_pattern": {"q_proj": -1}},
        {"rank_pattern": []},
        {"alpha_pattern": {"q_proj": None}},
        {"r": 5},
    ],
)
def test_invalid_fields(
    adapter: Path, config: ModelConfig, edit_json: EditJson, fields: dict[str, Any]
) -> None:
    edit_json(adapter / "adapter_config.json", **fields)
    with pytest.raises(BrokenModel) as raised:
        PeftAdapter.open(adapter, "tuned", config)
    assert "\n" not in str(raised.value)


def test_not_a_number_in_the_config(adapter: Path, config: ModelConfig) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"lora_alpha": 8', '"lora_alpha": NaN')
    )
    with pytest.raises(BrokenModel, match="lora_alpha must be a finite number"):
        PeftAdapter.open(adapter, "tuned", config)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.input_layernorm.weight",
        "base_model.model.model.layers.99999.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ],
)
def test_other_tensors(adapter: Path, config: ModelConfig, name: str) -> None:
    import torch

    _edit_tensors(adapter, lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    with pytest.raises(UnsupportedModel, match="tensor") as raised:
        PeftAdapter.open(adapter, "tuned", config)
    assert name in str(raised.value)


def test_unknown_projection(pristine: Path, tmp_path: Path, config: ModelConfig) -> None:
    import torch

    made = write_adapter(tmp_path / "adapter", pristine, ("q_proj",))

    def rename(tensors: dict[str, Any]) -> None:
        for part, shape in (("A", (4, 64)), ("B", (64, 4))):
            name = f"base_model.model.model.layers.0.self_attn.query_key_value.lora_{part}.weight"
            tensors[name] = torch.zeros(shape)

    _edit_tensors(made, rename)
    with pytest.raises(UnsupportedModel, match=r"changes self_attn\.query_key_value of layer 1"):
        PeftAdapter.open(made, "tuned", config)


def test_half_a_pair(adapter: Path, config: ModelConfig) -> None:
    _edit_tensors(adapter, lambda tensors: tensors.pop(_B))
    with pytest.raises(BrokenModel, match=r"lora_B of self_attn\.q_proj of layer 1 is missing"):
        PeftAdapter.open(adapter, "tuned", config)


@pytest.mark.parametrize(
    ("name", "shape"), [(_A, (4, 63)), (_B, (65, 4)), (_A, (3, 64)), (_A, (4,))]
)
def test_wrong_shapes(
    adapter: Path, config: ModelConfig, name: str, shape: tuple[int, ...]
) -> None:
    import torch

    _edit_tensors(adapter, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(BrokenModel, match="the adapter is of another model"):
        PeftAdapter.open(adapter, "tuned", config)


def test_other_dtypes(adapter: Path, config: ModelConfig) -> None:
    import torch

    _edit_tensors(adapter, lambda tensors: tensors.update({_A: torch.zeros(4, 64).double()}))
    with pytest.raises(UnsupportedModel, match="is F64"):
        PeftAdapter.open(adapter, "tuned", config)


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("qwen2", {"num_hidden_layers": 2}, "changes layer 3, this model has 2"),
        ("qwen2", {"num_attention_heads": 2}, "the adapter is of another model"),
        ("phi3", {}, r"changes self_attn.q_proj of layer 1; .* adapts self_attn.qkv_proj"),
        ("deepseek_v3", {}, r"changes self_attn.q_proj"),
        ("lfm2", {}, r"changes self_attn.q_proj of layer 1; .* adapts feed_forward.w1"),
    ],
)
def test_adapter_of_another_model(
    adapter: Path, make_model: MakeModel, tmp_path: Path, family: str, fields: dict[str, Any],
    said: str,
) -> None:  # fmt: skip
    other = ModelConfig.load_folder(make_model(tmp_path / "other", family, 0, **fields))
    with pytest.raises(ModelError, match=said):
        PeftAdapter.open(adapter, "tuned", other)


def test_experts_are_not_adapted(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe", 0)
    made = write_adapter(tmp_path / "adapter", model, ("q_proj", "gate"))
    with pytest.raises(UnsupportedModel, match=r"changes mlp\.gate of layer 1"):
        PeftAdapter.open(made, "tuned", ModelConfig.load_folder(model))


def test_missing_files(adapter: Path, tmp_path: Path, config: ModelConfig) -> None:
    with pytest.raises(ModelNotFound, match="is not a folder"):
        PeftAdapter.open(tmp_path / "nothing", "tuned", config)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(BrokenModel, match=r"has no adapter_model\.safetensors"):
        PeftAdapter.open(adapter, "tuned", config)


@pytest.mark.parametrize("keep", [0, 7, 100, 3000])
def test_truncated_tensors(adapter: Path, config: ModelConfig, keep: int) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BrokenModel, match="truncated"):
        PeftAdapter.open(adapter, "tuned", config)


def test_config_that_is_not_an_object(adapter: Path, config: ModelConfig) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(BrokenModel, match="expected a JSON object"):
        PeftAdapter.open(adapter, "tuned", config)


_FIELDS = (
    "peft_type", "r", "lora_alpha", "target_modules", "bias", "use_rslora", "rank_pattern",
    "alpha_pattern", "init_lora_weights", "use_dora", "modules_to_save", "layer_replication",
    "fan_in_fan_out", "something_new",
)  # fmt: skip
_ODD = (
    "null", "true", "false", "-1", "0", "1e999", "-1e999", "1e308", "NaN", "9" * 400, '"x"',
    '"\\u0000"', '"\\ud800"', "[]", "{}", "[[[]]]", '[""]', '{"": 1}', '{"q_proj": "a"}',
    '{"q_proj": 1e999}', '{"v_proj": 3}', '{"x": {"y": []}}', '["q_proj", "v_proj"]',
)  # fmt: skip


@pytest.mark.parametrize("field", _FIELDS)
def test_odd_values_are_refused_in_one_line_or_read(
    adapter: Path, config: ModelConfig, field: str
) -> None:
    path = adapter / "adapter_config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw.pop(field, None)
    start = json.dumps(raw)[:-1]
    refusals = []
    for odd in _ODD:
        path.write_text(f'{start}, "{field}": {odd}}}', encoding="utf-8")
        try:
            found = PeftAdapter.open(adapter, "tuned", config)
        except ModelError as error:
            refusals.append(str(error))
        else:
            assert all(abs(module.scale) <= 1e4 for module in found.adapter.modules)
    assert all("\n" not in text and len(text) < 1000 for text in refusals)
    assert bool(refusals) is (field != "something_new")
