"""``config.json`` in its various forms, and which are refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from molink.checkpoint import config_fields as fields
from molink.checkpoint.config import ModelConfig
from molink.errors import BrokenModel, UnsupportedModel

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def load(
    tmp_path: Path, generation: dict[str, list[int]] | None = None, **fields: Any
) -> ModelConfig | None:
    raw = {name: value for name, value in (BASE | fields).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    if generation is not None:
        text = json.dumps(generation)
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    return ModelConfig.load_folder(tmp_path)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.family, config.kv_heads, config.head_dim, config.groups) == ("llama", 4, 16, 1)
    assert (config.norm_eps, config.tied_embeddings, config.max_model_len) == (1e-6, False, 4096)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (False, False, False)
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert (config.dtype, config.eos_ids, config.qk_norm) == ("f32", (), "none")


def test_families_differ_in_biases_and_norms(tmp_path: Path) -> None:
    biased = load(tmp_path, attention_bias=True, mlp_bias=True)
    assert (biased.attention_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)
    qwen2 = load(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, "none")
    qwen3 = load(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, "each head", 128)


def test_a_model_type_stands_in_for_architectures(tmp_path: Path) -> None:
    assert load(tmp_path, architectures=..., model_type="qwen3").family == "qwen3"


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_in_both_spellings(tmp_path: Path, field: str) -> None:
    assert load(tmp_path, **{field: "bfloat16"}).dtype == "bf16"
    assert load(tmp_path, **{field: "float16"}).dtype == "f16"


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    config = load(tmp_path, {"eos_token_id": [7, 5]}, eos_token_id=5)
    assert config.eos_ids == (5, 7)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 2048}, 4096),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            4096,
        ),
    ],
)
def test_context_with_scaling_in_both_spellings(
    tmp_path: Path, scaling: dict[str, Any], context: int
) -> None:
    old = load(tmp_path, rope_scaling=scaling, rope_theta=5e5)
    new = load(tmp_path, rope_parameters=scaling | {"rope_theta": 5e5})
    assert old == new
    assert old.max_model_len == context
    assert (old.rope.theta, old.rope.factor) == (5e5, scaling["factor"])


def test_yarn_without_a_factor_takes_the_ratio_of_lengths(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert load(tmp_path, rope_parameters=scaling).rope.factor == 4.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM.*Mistral"),
        ({"architectures": ..., "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "axial"}}, "'axial'.*longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_unsupported_variants_are_named(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(tmp_path, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 4096, not 1000000"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 8.0}},
            "low_freq_factor",
        ),
        ({"architectures": ...}, "architectures is missing"),
        ({"layer_types": 5}, "layer_types must be a list"),
        ({"layer_types": {"a": 1}}, "layer_types must be a list"),
        ({"hidden_size": 2**20}, "hidden_size must be at most"),
        ({"intermediate_size": 2**30}, "intermediate_size must be at most"),
        ({"num_attention_heads": 2**20}, "num_attention_heads must be at most"),
        ({"vocab_size": 2**30}, "vocab_size must be at most"),
        ({"max_position_embeddings": 2**30}, "max_position_embeddings must be at most"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, "factor 1e.308 makes a context"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 9e99}}, "factor 9e.99 makes a context"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": -1}}, "beta_fast"),
    ],
)
def test_impossible_fields_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BrokenModel, match=message) as caught:
        load(tmp_path, **fields)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"a": NaN'])
def test_a_config_that_is_not_an_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(BrokenModel, match=r"config\.json"):
        ModelConfig.load_folder(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize("kind", ["endless", "pipe"])
def test_a_config_that_is_not_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(BrokenModel, match=r"config\.json is not a regular file"):
        ModelConfig.load_folder(tmp_path)


def test_a_config_longer_than_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "MAX_JSON_BYTES", 100)
    (tmp_path / "config.json").write_text(" " * 200, encoding="utf-8")
    with pytest.raises(BrokenModel, match="longer than 100 bytes"):
        ModelConfig.load_folder(tmp_path)


def test_dual_chunk_attention_is_done_without(tmp_path: Path) -> None:
    dual = {"chunk_size": 128, "local_size": 8, "original_max_position_embeddings": 128}
    fields = {"max_position_embeddings": 1010, "dual_chunk_attention_config": dual}
    found = load(tmp_path, **fields)
    assert found.max_model_len == 128
    assert (
        "dual_chunk_attention_config is not supported: the context is 128 tokens"
        in (found.notes[0])
    )
    found = load(tmp_path, **{**fields, "max_position_embeddings": 100})
    assert (found.max_model_len, found.notes) == (100, ())
    with pytest.raises(BrokenModel, match=r"dual_chunk.*original_max_position_embeddings"):
        load(tmp_path, **{**fields, "dual_chunk_attention_config": {"chunk_size": 128}})
