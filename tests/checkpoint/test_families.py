"""Facts from configs of every family, in the form published on the hub."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.families import ARCHITECTURES
from molink.checkpoint.quantized_size import is_quantizable
from molink.checkpoint.rope import QueryScaling
from molink.checkpoint.tensor_layout import (
    adaptable_projections,
    last_stage_tensors,
    layer_tensors,
)
from molink.checkpoint.traits import HeadShape
from molink.errors import BrokenModel, UnsupportedModel

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
#: Granite's names of recurrent layers and of others.
GRANITE = ["mamba", "attention"] * 2
LISTS = {"short_factor": [1.0] * 9, "long_factor": [4.0] * 9}
PHI4_MINI = {
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "longrope", **LISTS},
}
NAMES = {family: architecture for architecture, family in ARCHITECTURES.items()}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """``load(family, **fields)``; ``...`` removes a field."""

    def make(family: str, **fields: Any) -> ModelConfig | None:
        raw = SIZES | {"architectures": [NAMES[family]]} | fields
        raw = {name: value for name, value in raw.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        return ModelConfig.load_folder(tmp_path)

    return make


def test_mistral_has_a_window_unless_told_otherwise(load: Callable[..., Any]) -> None:
    assert load("mistral").windows == (4096,) * 4
    assert load("mistral", sliding_window=None).windows == (0,) * 4
    assert load("mistral", sliding_window=8).windows == (8,) * 4


def test_granite_has_factors(load: Callable[..., Any]) -> None:
    fields = {
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 16.0,
    }
    config = load("granite", **fields)
    assert (config.attention_scale, config.embedding_scale) == (0.0078125, 12.0)
    assert (config.residual_scale, config.logit_scale) == (0.22, 0.0625)
    silent = load("granite")
    assert (silent.attention_scale, silent.residual_scale, silent.logit_scale) == (1.0, 1.0, 1.0)


def test_smollm3_has_layers_without_rope(load: Callable[..., Any]) -> None:
    config = load("smollm3", num_hidden_layers=8)
    assert [config.rope_index(layer) for layer in range(8)] == [0, 0, 0, None] * 2
    assert (config.rope.theta, config.tied_embeddings) == (2e6, True)
    listed = load("smollm3", no_rope_layers=[0, 1, 1, 1], rope_theta=5e6)
    assert [listed.rope_index(layer) for layer in range(4)] == [None, 0, 0, 0]
    assert listed.rope.theta == 5e6


#: Llama 4 Scout's text model as released, shrunk.
LLAMA4 = {
    "attention_chunk_size": 8192,
    "intermediate_size_mlp": 256,
    "interleave_moe_layer_step": 1,
    "no_rope_layers": [],
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "use_qk_norm": True,
}


def test_llama4_has_chunks_where_it_rotates(load: Callable[..., Any]) -> None:
    config = load("llama4_text", **LLAMA4)
    assert (config.windows, config.chunked_windows) == ((8192, 8192, 8192, 0), True)
    assert [config.rope_index(layer) for layer in range(4)] == [0, 0, 0, None]
    assert [config.scales_queries(layer) for layer in range(4)] == [False, False, False, True]
    assert config.query_scaling == QueryScaling(0.1, 8192, offset=1, unrotated_only=True)
    assert (config.rope.kind, config.head_dim, config.interleaved_rope) == ("llama3", 128, True)
    shapes = layer_tensors(config, 0)
    assert shapes["model.layers.0.feed_forward.router.weight"] == (16, 96)
    assert shapes["model.layers.0.feed_forward.experts.15.gate_proj.weight"] == (128, 96)
    assert shapes["model.layers.0.feed_forward.shared_expert.down_proj.weight"] == (96, 128)
    assert not any("q_norm" in name for name in shapes)
    plain = load("llama4_text", **LLAMA4 | {"attn_temperature_tuning": False, "use_qk_norm": False})
    assert (plain.query_scaling, plain.qk_norm) == (None, "none")


def test_llama4_has_experts_in_some_layers(load: Callable[..., Any]) -> None:
    config = load("llama4_text", **LLAMA4 | {"interleave_moe_layer_step": 2})
    assert config.experts is not None
    assert config.experts.dense_layers == {0, 2}
    dense = layer_tensors(config, 2)
    assert dense["model.layers.2.feed_forward.down_proj.weight"] == (96, 256)
    listed = load("llama4_text", **LLAMA4 | {"moe_layers": [0]})
    assert listed.experts is not None
    assert listed.experts.dense_layers == {1, 2, 3}
    assert load("llama4_text", **LLAMA4 | {"moe_layers": []}).experts is None


#: DeepSeek V3.2 as released, shrunk.
DEEPSEEK_V32 = {
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 3,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}


def test_deepseek_v32_keeps_index_keys_between_rotated_numbers_and_latents(
    load: Callable[..., Any],
) -> None:
    config = load("deepseek_v32", **DEEPSEEK_V32)
    assert (config.kv_kinds, config.kv_heads, config.head_dim) == (1, 1, 64 + 128 + 512)
    assert config.rope.rotary_dim(config.head_dim) == 64
    index = config.latent.index
    assert (index.heads, index.dim, index.top_k, index.interleaved) == (64, 128, 2048, False)
    shapes = layer_tensors(config, 3)
    found = {
        name.partition("indexer.")[2]: shape for name, shape in shapes.items() if "indexer" in name
    }
    assert found == {
        "wq_b.weight": (64 * 128, 1536),
        "wk.weight": (128, 96),
        "k_norm.weight": (128,),
        "k_norm.bias": (128,),
        "weights_proj.weight": (64, 96),
    }
    assert (config.experts.dense_layers, config.draft_layers) == ({0, 1, 2}, 1)


def test_glm5_rotates_index_queries_as_others(load: Callable[..., Any]) -> None:
    given = DEEPSEEK_V32 | {"index_n_heads": 32, "layer_types": ["indexed_attention"] * 4}
    config = load("glm_moe_dsa", **given, mlp_layer_types=["dense"] + ["sparse"] * 3)
    assert (config.latent.index.heads, config.latent.index.interleaved) == (32, True)
    assert config.experts.dense_layers == {0}


#: Gemma 4's larger models as released, shrunk.
GEMMA4 = {
    "attention_k_eq_v": True,
    "global_head_dim": 64,
    "head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "use_bidirectional_attention": "vision",
}


def test_gemma4_has_other_heads_without_windows(load: Callable[..., Any]) -> None:
    config = load("gemma4_text", **GEMMA4)
    assert config.windows == (1024, 1024, 1024, 0)
    assert [config.head_shape(layer) for layer in (2, 3)] == [HeadShape(2, 32), HeadShape(1, 64)]
    assert [rope.kind for rope in config.rope_configs] == ["proportional", "default"]
    assert config.rope_head_dims == (64, 32)
    assert (config.rope.rotary_dim(64), config.rope.partial_rotary_factor) == (64, 0.25)
    sliding, full = (layer_tensors(config, layer) for layer in (2, 3))
    assert sliding["model.layers.2.self_attn.v_proj.weight"] == (64, 96)
    assert "model.layers.3.self_attn.v_proj.weight" not in full
    assert full["model.layers.3.self_attn.q_proj.weight"] == (4 * 64, 96)
    assert full["model.layers.3.self_attn.k_norm.weight"] == (64,)
    assert full["model.layers.3.layer_scalar"] == (1,)
    # As transformers 5 saves it.
    heads = {"head_dim": 64, "num_key_value_heads": 1}
    saved = {name: value for name, value in GEMMA4.items() if "global" not in name}
    assert load("gemma4_text", **saved, per_layer_config={"3": heads}) == config


def test_gemma4_has_experts_beside_each_mlp(load: Callable[..., Any]) -> None:
    mixture = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
    config = load("gemma4_text", **GEMMA4, **mixture, moe_intermediate_size=32)
    shapes = layer_tensors(config, 0)
    found = {name.removeprefix("model.layers.0."): shape for name, shape in shapes.items()}
    assert found["mlp.gate_proj.weight"] == (128, 96)
    assert found["mlp.experts.7.down_proj.weight"] == (96, 32)
    assert found["mlp.router.proj.weight"] == (8, 96)
    assert found["mlp.router.scale"] == (96,)
    assert found["mlp.router.per_expert_scale"] == (8,)
    assert found["post_feedforward_layernorm_2.weight"] == (96,)


def test_olmo2_has_norms_after_only(load: Callable[..., Any]) -> None:
    config = load("olmo2", rms_norm_eps=...)
    shapes = layer_tensors(config, 0)
    norms = {name for name in shapes if "norm" in name}
    assert norms == {
        f"model.layers.0.{name}.weight"
        for name in (
            "post_attention_layernorm",
            "post_feedforward_layernorm",
            "self_attn.q_norm",
            "self_attn.k_norm",
        )
    }
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (96,)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (48,)


def test_olmo3_scales_layers_without_a_window(load: Callable[..., Any]) -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 8.0,
        "attention_factor": 1.2,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    fields = {"max_position_embeddings": 65536, "sliding_window": 4096}
    config = load("olmo3", rope_theta=500000, rope_scaling=scaling, **fields)
    assert config.windows == (4096, 4096, 4096, 0)
    assert [rope.kind for rope in config.rope_configs] == ["yarn", "default"]
    assert [rope.theta for rope in config.rope_configs] == [5e5, 5e5]
    assert config.max_model_len == 65536
    new = {FULL: scaling | {"rope_theta": 5e5}, SLIDING: {"rope_theta": 5e5}}
    assert load("olmo3", rope_parameters=new, **fields) == config


def test_exaone4_rotates_layers_with_windows(load: Callable[..., Any]) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    fields = {"rope_theta": 1000000, "rope_scaling": scaling, "sliding_window": 4096}
    listed = [SLIDING] * 3 + [FULL]
    config = load("exaone4", layer_types=listed, sliding_window_pattern="LLLG", **fields)
    assert (config.windows, config.qk_norm) == ((4096, 4096, 4096, 0), "each head")
    assert [config.rope_index(layer) for layer in range(4)] == [0, 0, 0, None]
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("llama3", 16.0, 1e6)
    assert load("exaone4", **fields) == config
    small = load("exaone4", sliding_window=None, layer_types=[FULL] * 4)
    assert (small.windows, small.unrotated_layers) == ((0,) * 4, frozenset())
    assert small == load("exaone4", sliding_window=None)
    assert config.norms.present_names == ("post_attention_layernorm", "post_feedforward_layernorm")


def test_seed_oss_is_biased(load: Callable[..., Any]) -> None:
    config = load("seed_oss", rope_theta=1e7, rope_scaling={"rope_type": "default"})
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, False, False)
    assert (config.head_dim, config.rope.theta) == (128, 1e7)


def test_qwen_has_windows_in_its_upper_layers(load: Callable[..., Any]) -> None:
    for family in ("qwen2", "qwen3"):
        asked = {"use_sliding_window": True, "sliding_window": 64}
        assert load(family, **asked, max_window_layers=3).windows == (0, 0, 0, 64)
        assert load(family, **asked, max_window_layers=-(2**31)).windows == (64,) * 4
        assert load(family, **asked).windows == (0,) * 4
        assert load(family, sliding_window=64, max_window_layers=0).windows == (0,) * 4
        listed = [FULL, SLIDING, FULL, SLIDING]
        assert load(family, **asked, layer_types=listed).windows == (0, 64, 0, 64)


def test_phi3_is_merged_and_may_scale(load: Callable[..., Any]) -> None:
    plain = load("phi3")
    assert (plain.merged_qkv, plain.windows, plain.rope.kind) == (True, (0,) * 4, "default")
    assert plain.rope.rotary_dim(plain.head_dim) == 24
    mini = load("phi3", **PHI4_MINI)
    assert (mini.tied_embeddings, mini.windows, mini.max_model_len) == (True, (262144,) * 4, 131072)
    assert mini.rope.rotary_dim(mini.head_dim) == 18
    assert (mini.rope.kind, mini.rope.factor, mini.rope.original_context) == ("longrope", 32, 4096)
    assert mini.rope.long_factor == (4.0,) * 9


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_calls_longrope_by_many_names(load: Callable[..., Any], kind: str) -> None:
    old = load("phi3", **PHI4_MINI | {"rope_scaling": {"type": kind, **LISTS}})
    new = load(
        "phi3",
        **PHI4_MINI | {"rope_scaling": ..., "partial_rotary_factor": ...},
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            **LISTS,
        },
    )
    assert old == new == load("phi3", **PHI4_MINI)


def test_mixtral_has_experts_everywhere(load: Callable[..., Any]) -> None:
    config = load("mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.top_k) == (8, 2)
    assert (config.experts.intermediate_size, config.experts.renormalize) == (128, True)
    assert all(config.layer_experts(layer) for layer in range(4))
    assert (config.rope.theta, config.windows) == (1e6, (0,) * 4)


def test_granitemoe_as_on_the_hub(load: Callable[..., Any]) -> None:
    factors = {"attention_multiplier": 0.015625, "residual_multiplier": 0.22}
    config = load("granitemoe", num_local_experts=40, num_experts_per_tok=8, **factors)
    assert (config.attention_scale, config.residual_scale) == (0.015625, 0.22)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.top_k, config.experts.renormalize) == (
        40,
        8,
        True,
    )
    shapes = layer_tensors(config, 0)
    assert shapes["model.layers.0.block_sparse_moe.router.layer.weight"] == (40, 96)
    assert shapes["model.layers.0.block_sparse_moe.experts.39.up_proj.weight"] == (128, 96)


def test_qwen3_moe_has_experts_in_some_layers(load: Callable[..., Any]) -> None:
    fields = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = load("qwen3_moe", num_experts=16, **fields)
    assert config == load("qwen3_moe", num_local_experts=16, **fields)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.intermediate_size) == (16, 32)
    assert (config.experts.renormalize, config.qk_norm, config.head_dim) == (True, "each head", 24)
    assert all(config.layer_experts(layer) for layer in range(4))
    some = load("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1], **fields)
    assert [some.layer_experts(layer) is not None for layer in range(4)] == [
        False,
        False,
        False,
        True,
    ]
    windowed = load("qwen3_moe", use_sliding_window=True, sliding_window=7)
    assert windowed.windows == (7,) * 4


def test_qwen2_moe_has_a_shared_expert(load: Callable[..., Any]) -> None:
    config = load("qwen2_moe")
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.top_k, config.experts.intermediate_size) == (
        60,
        4,
        1408,
    )
    assert (config.experts.shared_intermediate_size, config.experts.renormalize) == (5632, False)
    assert (config.attention_bias, config.output_bias) == (True, False)
    shapes = layer_tensors(config, 0)
    assert shapes["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 96)
    assert shapes["model.layers.0.mlp.shared_expert.down_proj.weight"] == (96, 5632)


@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_glm_rotates_neighbours_in_half_of_a_head(load: Callable[..., Any], family: str) -> None:
    config = load(family, rms_norm_eps=...)
    assert (config.head_dim, config.rope.rotary_dim(128), config.interleaved_rope) == (
        128,
        64,
        True,
    )
    assert (config.norm_eps, config.merged_qkv, config.merged_gate_up) == (1.5625e-7, False, True)
    assert (config.attention_bias, config.output_bias) == (True, False)
    assert config.eos_ids == (151329, 151336, 151338)
    assert len(config.norms.present_names) == (4 if family == "glm4" else 2)


#: Expert settings of GLM-4.5-Air.
GLM_AIR = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}


def test_glm4_moe_as_on_the_hub(load: Callable[..., Any]) -> None:
    others = {"partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None}
    config = load("glm4_moe", attention_bias=True, use_qk_norm=False, head_dim=128, **GLM_AIR)
    assert (config.attention_bias, config.output_bias, config.qk_norm) == (True, False, "none")
    assert (config.rope.rotary_dim(128), config.interleaved_rope) == (64, False)
    assert load("glm4_moe", **GLM_AIR, **others).rope.theta == 1e6
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (128, 8, 1408)
    assert (experts.scoring, experts.is_corrected, experts.renormalize) == ("sigmoid", True, True)
    assert (experts.groups, experts.top_groups, experts.scale) == (1, 1, 1.0)
    assert [config.layer_experts(layer) is not None for layer in range(4)] == [False] + 3 * [True]
    assert (config.layers, config.draft_layers) == (4, 1)
    assert layer_tensors(config, 0)["model.layers.0.mlp.down_proj.weight"] == (96, 128)
    shapes = layer_tensors(config, 1)
    mlp = "model.layers.1.mlp."
    assert shapes[f"{mlp}gate.weight"] == (128, 96)
    assert shapes[f"{mlp}gate.e_score_correction_bias"] == (128,)
    assert shapes[f"{mlp}experts.127.gate_proj.weight"] == (1408, 96)
    assert shapes[f"{mlp}shared_experts.down_proj.weight"] == (96, 1408)
    assert not any("shared_expert_gate" in name for name in shapes)
    largest = {"n_routed_experts": 160, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    whole = load("glm4_moe", use_qk_norm=True, **GLM_AIR | largest)
    assert (whole.qk_norm, whole.experts.scale) == ("each head", 2.5)
    assert whole.experts.dense_layers == {0, 1, 2}


#: Attention settings of DeepSeek-V3.
DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}


def test_deepseek_v3_as_on_the_hub(load: Callable[..., Any]) -> None:
    grouped = {"n_group": 8, "topk_group": 4, "n_routed_experts": 256}
    config = load("deepseek_v3", **GLM_AIR | grouped | DEEPSEEK)
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 1, 576)
    assert (config.rope.rotary_dim(576), config.interleaved_rope) == (64, True)
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert (config.max_model_len, config.draft_layers) == (163840, 1)
    experts = config.experts
    assert experts is not None
    assert (experts.groups, experts.top_groups) == (8, 4)
    shapes, attention = layer_tensors(config, 1), "model.layers.1.self_attn."
    assert shapes[f"{attention}q_a_proj.weight"] == (1536, 96)
    assert shapes[f"{attention}q_b_proj.weight"] == (4 * 192, 1536)
    assert shapes[f"{attention}kv_a_proj_with_mqa.weight"] == (576, 96)
    assert shapes[f"{attention}kv_b_proj.weight"] == (4 * 256, 512)
    assert shapes[f"{attention}kv_a_layernorm.weight"] == (512,)
    direct = load("deepseek_v3", **GLM_AIR | DEEPSEEK | {"q_lora_rank": None})
    assert layer_tensors(direct, 1)[f"{attention}q_proj.weight"] == (4 * 192, 96)
    second = {"scoring_func": "softmax", "topk_method": "group_limited_greedy"}
    older = load("deepseek_v2", **GLM_AIR | DEEPSEEK | grouped | second | {"norm_topk_prob": False})
    assert (older.experts.scoring, older.experts.is_corrected) == ("softmax", False)
    assert (older.experts.groups, older.experts.group_voters, older.experts.renormalize) == (
        8,
        1,
        False,
    )
    kinds = ["dense", "dense", "sparse", "sparse"]
    flash = load("glm4_moe_lite", mlp_layer_types=kinds)
    assert (flash.experts.dense_layers, flash.latent.value_dim) == ({0, 1}, 256)
    assert load("glm4_moe_lite").experts.dense_layers == {0}


def test_dots1_as_on_the_hub(load: Callable[..., Any]) -> None:
    fields = {
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 6,
        "max_window_layers": 62,
        "sliding_window": None,
    }
    config = load("dots1", **GLM_AIR | fields)
    assert (config.windows, config.qk_norm, config.attention_bias) == ((0,) * 4, "each head", False)
    experts = config.experts
    assert experts is not None
    assert (experts.top_k, experts.scale, experts.shared_intermediate_size) == (6, 2.5, 2816)
    silent = load("dots1", n_routed_experts=8, num_experts_per_tok=2)
    assert (silent.windows, silent.experts.renormalize) == ((0,) * 4, False)
    assert load("dots1", max_window_layers=3, **GLM_AIR).windows == (0, 0, 0, 4096)


def test_ernie_as_on_the_hub(load: Callable[..., Any]) -> None:
    fields = {
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "num_nextn_predict_layers": 1,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    }
    config = load("ernie4_5_moe", rope_scaling=None, **fields)
    assert (config.interleaved_rope, config.rope.theta, config.draft_layers) == (True, 5e5, 1)
    experts = config.experts
    assert experts is not None
    assert (experts.scoring, experts.is_corrected, experts.min_sum) == ("softmax", True, 1e-12)
    assert (experts.num_experts, experts.top_k, experts.dense_layers) == (64, 6, {0})
    shapes, mlp = layer_tensors(config, 1), "model.layers.1.mlp."
    assert shapes[f"{mlp}moe_statics.e_score_correction_bias"] == (1, 64)
    assert shapes[f"{mlp}shared_experts.gate_proj.weight"] == (3072, 96)
    silent = load("ernie4_5_moe", moe_layer_interval=2, moe_layer_start_index=2)
    assert silent.experts.dense_layers == {0, 1, 2}
    small = load("ernie4_5", head_dim=128, use_bias=True)
    assert (small.attention_bias, small.output_bias, small.mlp_bias) == (True,) * 3
    assert (small.tied_embeddings, small.norm_eps, small.rope.theta) == (True, 1e-5, 5e5)


def test_minimax_m2_as_on_the_hub(load: Callable[..., Any]) -> None:
    fields = {
        "attn_type_list": [1] * 4,
        "head_dim": 128,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }
    config = load("minimax_m2", **fields)
    assert (config.qk_norm, config.rope.theta, config.rope.rotary_dim(128)) == (
        "all heads",
        5e6,
        64,
    )
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (256, 8, 128)
    assert (experts.scoring, experts.is_corrected, experts.shared_intermediate_size) == (
        "sigmoid",
        True,
        0,
    )
    shapes, mlp = layer_tensors(config, 1), "model.layers.1.block_sparse_moe."
    assert shapes[f"{mlp}e_score_correction_bias"] == (256,)
    assert shapes[f"{mlp}experts.255.w2.weight"] == (96, 128)
    assert shapes["model.layers.1.self_attn.q_norm.weight"] == (512,)


#: RoPE settings of Hunyuan.
HUNYUAN_ROPE = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "dynamic",
}


def test_hunyuan_as_on_the_hub(load: Callable[..., Any]) -> None:
    fields = {"rope_theta": 10000.0, "rope_scaling": HUNYUAN_ROPE, "head_dim": 128}
    config = load("hunyuan_v1_dense", attention_bias=False, use_cla=False, **fields)
    assert (config.qk_norm, config.rope.kind) == ("each rotated head", "default")
    assert config.rope.theta == pytest.approx(11158839.9, abs=0.1)  # as in llama.cpp's converter
    assert not config.keys_depend_on_length
    assert layer_tensors(config, 0)["model.layers.0.self_attn.query_layernorm.weight"] == (128,)
    plain = load("hunyuan_v1_dense", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (plain.rope.kind, plain.rope.factor) == ("dynamic", 2.0)
    fields |= {
        "intermediate_size": 3072,
        "moe_intermediate_size": [3072] * 4,
        "moe_topk": [8] * 4,
        "num_experts": 64,
        "num_shared_expert": [1] * 4,
        "moe_layer_num_skipped": 0,
    }
    config = load("hunyuan_v1_moe", **fields)
    experts = config.experts
    assert experts is not None
    assert (experts.num_experts, experts.top_k, experts.scoring) == (64, 8, "softmax")
    shapes, mlp = layer_tensors(config, 1), "model.layers.1.mlp."
    assert shapes[f"{mlp}gate.wg.weight"] == (64, 96)
    assert shapes[f"{mlp}experts.63.down_proj.weight"] == (96, 3072)
    assert shapes[f"{mlp}shared_mlp.down_proj.weight"] == (96, 3072)


def test_cohere_has_one_norm_of_attention_and_mlp(load: Callable[..., Any]) -> None:
    config = load("cohere", use_qk_norm=True, logit_scale=0.8333, rope_theta=75e6)
    shapes = layer_tensors(config, 0)
    assert {name: shape for name, shape in shapes.items() if "norm" in name} == {
        "model.layers.0.input_layernorm.weight": (96,),
        "model.layers.0.self_attn.q_norm.weight": (4, 24),
        "model.layers.0.self_attn.k_norm.weight": (2, 24),
    }
    assert (config.parallel_mlp, config.norm_kind, config.norm_eps) == (True, "layer", 1e-5)
    assert (config.logit_scale, config.tied_embeddings, config.interleaved_rope) == (
        0.8333,
        True,
        True,
    )
    windowed = load("cohere2", sliding_window=4096, layer_norm_eps=1e-6)
    assert windowed.windows == (4096, 4096, 4096, 0)
    assert [windowed.rope_index(layer) for layer in range(4)] == [0, 0, 0, None]
    assert (windowed.logit_scale, windowed.norm_eps) == (0.0625, 1e-6)


def test_ministral3_scales_queries(load: Callable[..., Any]) -> None:
    silent = load("ministral3", max_position_embeddings=262144)
    assert (silent.head_dim, silent.rope.theta, silent.rope.factor) == (128, 1e6, 16.0)
    assert silent.query_scaling == QueryScaling(0.1, 16384)
    assert silent.max_model_len == 262144
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100}
    assert load("ministral3", rope_parameters=rope).query_scaling is None
    latent = load("mistral4", num_key_value_heads=4)
    assert latent.query_scaling == QueryScaling(0.1, 8192)
    assert (latent.experts.scoring, latent.experts.is_corrected) == ("softmax", False)
    assert latent.rope.rotary_dim(latent.head_dim) == 64


def test_ministral_has_windows_where_listed(load: Callable[..., Any]) -> None:
    listed = load("ministral", layer_types=[FULL, SLIDING] * 2, sliding_window=32768)
    assert listed.windows == (0, 32768) * 2
    assert load("ministral").windows == (4096,) * 4


def test_internlm3_tells_biases_apart(load: Callable[..., Any]) -> None:
    config = load("internlm3", qkv_bias=True, bias=False)
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (True, False, False)
    assert (config.head_dim, config.norm_eps) == (128, 1e-5)
    assert load("internlm3", attention_bias=True, mlp_bias=True, head_dim=64).output_bias


def test_phimoe_as_on_the_hub(load: Callable[..., Any]) -> None:
    lists = {"short_factor": [1.0] * 12, "long_factor": [4.0] * 12}
    scaling = {"type": "longrope", **lists, "short_mscale": 1.25, "long_mscale": 1.25}
    scaling |= {"original_max_position_embeddings": 4096}
    fields = {"rope_scaling": scaling, "lm_head_bias": True, "attention_bias": True}
    config = load("phimoe", architectures=["PhiMoEForCausalLM"], **fields)
    assert (config.rope.kind, config.rope.attention_factor) == ("longrope", 1.25)
    assert (config.experts.scoring, config.experts.jitter) == ("sparsemixer", 0.01)
    assert (config.experts.num_experts, config.experts.top_k) == (16, 2)
    assert last_stage_tensors(config) == {
        "model.norm.weight": (96,),
        "model.norm.bias": (96,),
        "lm_head.weight": (1000, 96),
        "lm_head.bias": (1000,),
    }
    assert layer_tensors(config, 0)["model.layers.0.input_layernorm.bias"] == (96,)


def test_nemotron_h_as_on_the_hub(load: Callable[..., Any]) -> None:
    config = load("nemotron_h", hybrid_override_pattern="ME*-", mamba_num_heads=8, head_dim=24)
    assert (config.recurrent_layers, config.mlp_layers) == ({0}, {1, 3})
    assert (config.count_attention((0, 4)), config.count_recurrent((0, 4))) == (1, 1)
    assert config == load(
        "nemotron_h",
        layers_block_type=["mamba", "moe", "attention", "mlp"],
        num_hidden_layers=...,
        mamba_num_heads=8,
        head_dim=24,
    )
    assert [config.rope_index(layer) for layer in range(4)] == [None] * 4
    assert (config.activation, config.norm_eps) == ("relu2", 1e-5)
    names = [
        {name.removeprefix(f"model.layers.{layer}.") for name in layer_tensors(config, layer)}
        for layer in range(4)
    ]
    assert {"norm.weight", "mamba.A_log", "mamba.in_proj.weight"} <= names[0]
    assert {"mlp.experts.7.up_proj.weight", "mlp.shared_experts.up_proj.weight"} <= names[1]
    assert names[2] == {"norm.weight", *(f"self_attn.{one}_proj.weight" for one in "qkvo")}
    assert names[3] == {"norm.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}
    assert layer_tensors(config, 3)["model.layers.3.mlp.up_proj.weight"] == (128, 96)


def test_olmo_hybrid_has_norms_by_kind(load: Callable[..., Any]) -> None:
    config = load("olmo_hybrid", rope_parameters={"rope_theta": None})
    assert (config.recurrent_layers, config.rope_index(3)) == ({0, 1, 2}, None)
    shapes = layer_tensors(config, 0)
    found = {name.removeprefix("model.layers.0."): shape for name, shape in shapes.items()}
    assert {name for name in found if "layernorm" in name} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
    # Keys of 0.75 * 96 / 4 dimensions, and values of twice as many.
    assert found["linear_attn.q_conv1d.weight"] == (72, 1, 4)
    assert found["linear_attn.v_conv1d.weight"] == (144, 1, 4)
    assert found["linear_attn.g_proj.weight"] == (144, 96)
    assert found["linear_attn.o_norm.weight"] == (36,)
    assert "model.layers.3.post_feedforward_layernorm.weight" in layer_tensors(config, 3)
    assert load("olmo_hybrid", rope_theta=5e5).rope_index(3) == 0
    assert load("olmo_hybrid", linear_allow_neg_eigval=False).recurrent.rate_scale == 1.0


def test_kimi_linear_as_on_the_hub(load: Callable[..., Any]) -> None:
    config = load(
        "kimi_linear",
        model_max_length=1048576,
        num_experts=8,
        num_experts_per_token=4,
        num_shared_experts=2,
        num_expert_group=2,
        topk_group=1,
        moe_renormalize=False,
        moe_intermediate_size=32,
        mla_use_nope=True,
        q_lora_rank=None,
        linear_attn_config={
            "full_attn_layers": [3],
            "kda_layers": [1, 2, 4],
            "head_dim": 16,
            "num_heads": 6,
            "short_conv_kernel_size": 3,
        },
    )
    assert (config.recurrent_layers, config.rope_index(2)) == ({0, 1, 3}, None)
    assert config.max_model_len == 1048576
    experts = config.experts
    assert (experts.num_experts, experts.top_k, experts.groups) == (8, 4, 2)
    assert (experts.renormalize, experts.scale, experts.dense_layers) == (False, 2.446, {0})
    assert experts.shared_intermediate_size == 64
    shapes = layer_tensors(config, 1)
    found = {name.removeprefix("model.layers.1."): shape for name, shape in shapes.items()}
    assert found["self_attn.k_conv1d.weight"] == (96, 1, 3)
    assert found["self_attn.A_log"] == (1, 1, 6, 1)
    assert found["self_attn.f_b_proj.weight"] == found["self_attn.g_b_proj.weight"] == (96, 16)
    assert found["self_attn.b_proj.weight"] == (6, 96)
    assert found["block_sparse_moe.experts.7.w2.weight"] == (96, 32)
    assert found["block_sparse_moe.shared_experts.up_proj.weight"] == (64, 96)
    assert "model.layers.0.mlp.up_proj.weight" in layer_tensors(config, 0)
    kept = [name for name, shape in shapes.items() if not is_quantizable(name, shape)]
    assert {f"model.layers.1.self_attn.{one}_proj.weight" for one in ("b", "f_a", "f_b")} < {*kept}
    assert "model.layers.1.self_attn.g_b_proj.weight" not in kept
    listed = {"layer_types": [LINEAR, FULL] * 2, "linear_num_heads": 2}
    assert load("kimi_linear", **listed).recurrent_layers == {0, 2}
    assert load("kimi_linear", **listed).recurrent.memory_shape == (2, 128, 128)


def test_falcon_h1_has_attention_beside_mamba(load: Callable[..., Any]) -> None:
    fields = {"mamba_d_ssm": 192, "mamba_n_heads": 6, "mamba_d_state": 16}
    config = load(
        "falcon_h1",
        **fields,
        key_multiplier=0.5,
        attention_out_multiplier=0.25,
        mlp_multipliers=[0.75, 2.0],
        ssm_multipliers=[1.0, 2.0, 3.0, 4.0, 5.0],
        ssm_in_multiplier=0.5,
    )
    factors = config.output_factors
    assert (factors.heads, factors.gate_up) == ((1.0, 0.5, 0.25), (0.75, 2.0))
    assert factors.recurrent == (0.5, 1.0, 1.5, 2.0, 2.5)
    assert (config.count_attention((0, 4)), config.count_recurrent((0, 4))) == (4, 4)
    names = {name.removeprefix("model.layers.1.") for name in layer_tensors(config, 1)}
    assert {"mamba.in_proj.weight", "self_attn.q_proj.weight", "pre_ff_layernorm.weight"} <= names
    assert {"feed_forward.gate_proj.weight", "input_layernorm.weight"} <= names
    assert "mamba.norm.weight" not in names
    assert adaptable_projections(config, 1) == {}


def test_gpt_oss_as_on_the_hub(load: Callable[..., Any]) -> None:
    config = load(
        "gpt_oss",
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        experts_per_token=4,
        intermediate_size=2880,
        swiglu_limit=7.0,
        layer_types=[SLIDING, FULL] * 2,
        sliding_window=128,
        rope_theta=150000,
        max_position_embeddings=131072,
        initial_context_length=4096,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        quantization_config={"quant_method": "mxfp4"},
    )
    assert (config.windows, config.sinks, config.max_model_len) == ((128, 0) * 2, True, 131072)
    assert (config.attention_bias, config.output_bias, config.quantized) == (True, True, "none")
    assert (config.activation, config.activation_limit) == ("clamped_swiglu", 7.0)
    assert (config.rope.kind, config.rope.theta, config.rope.truncate) == ("yarn", 150000, False)
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.top_k, config.experts.has_bias) == (
        32,
        4,
        True,
    )
    shapes = layer_tensors(config, 1)
    assert shapes["model.layers.1.self_attn.sinks"] == (4,)
    assert shapes["model.layers.1.mlp.router.bias"] == (32,)
    assert shapes["model.layers.1.mlp.experts.31.gate_up_proj.weight"] == (5760, 96)
    silent = load("gpt_oss", intermediate_size=2880)
    assert (silent.rope, silent.windows, silent.head_dim) == (config.rope, config.windows, 64)


def test_qwen3_next_has_recurrent_layers(load: Callable[..., Any]) -> None:
    config = load("qwen3_next", num_hidden_layers=8, full_attention_interval=4)
    assert config.recurrent_layers == {0, 1, 2, 4, 5, 6}
    assert config == load(
        "qwen3_next", num_hidden_layers=8, layer_types=([LINEAR] * 3 + [FULL]) * 2
    )
    assert [config.count_attention(layers) for layers in ((0, 3), (3, 4), (0, 8))] == [0, 1, 2]
    assert (config.keeps_states, config.head_dim, config.gated_heads) == (True, 256, True)
    assert (config.norm_offset, config.rope.rotary_dim(config.head_dim)) == (1.0, 64)
    recurrent = layer_tensors(config, 0)
    assert not any("self_attn" in name for name in recurrent)
    assert recurrent["model.layers.0.linear_attn.in_proj_qkvz.weight"] == (2 * 6144, 96)
    assert recurrent["model.layers.0.linear_attn.in_proj_ba.weight"] == (64, 96)
    assert recurrent["model.layers.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert recurrent["model.layers.0.linear_attn.out_proj.weight"] == (96, 4096)
    attended = layer_tensors(config, 3)
    assert not any("linear_attn" in name for name in attended)
    assert attended["model.layers.3.self_attn.q_proj.weight"] == (2 * 4 * 256, 96)
    assert attended["model.layers.3.self_attn.o_proj.weight"] == (96, 4 * 256)


def test_qwen3_5_has_projections_by_kind(load: Callable[..., Any]) -> None:
    shapes = layer_tensors(load("qwen3_5_text"), 0)
    sizes = {"qkv": 8192, "z": 4096, "b": 32, "a": 32}
    for name, size in sizes.items():
        assert shapes[f"model.layers.0.linear_attn.in_proj_{name}.weight"] == (size, 96)
    assert load("qwen3_5_text").experts is None
    experts = load("qwen3_5_moe_text", intermediate_size=...).experts
    assert (experts.num_experts, experts.top_k, experts.renormalize) == (256, 8, True)
    assert (experts.intermediate_size, experts.shared_intermediate_size) == (512, 512)


def test_lfm2_has_short_convolutions(load: Callable[..., Any]) -> None:
    fields = {"full_attn_idxs": [1, 3], "norm_eps": 3e-5, "rms_norm_eps": ...}
    config = load("lfm2", block_ff_dim=12288, **fields)
    assert (config.recurrent_layers, config.norm_eps) == ({0, 2}, 3e-5)
    assert (config.intermediate_size, config.tied_embeddings, config.rope.theta) == (
        8192,
        True,
        1e6,
    )
    shapes = layer_tensors(config, 0)
    assert shapes["model.layers.0.conv.conv.weight"] == (96, 1, 3)
    assert shapes["model.layers.0.conv.in_proj.weight"] == (3 * 96, 96)
    assert shapes["model.layers.0.feed_forward.w2.weight"] == (96, 8192)
    assert layer_tensors(config, 1)["model.layers.1.self_attn.out_proj.weight"] == (96, 96)
    # As released: no intermediate_size.
    assert load("lfm2", block_ff_dim=12288, intermediate_size=..., **fields) == config
    plain = load("lfm2", block_auto_adjust_ff_dim=False, tie_embedding=False)
    assert (plain.intermediate_size, plain.tied_embeddings, plain.keeps_states) == (
        128,
        False,
        False,
    )
    listed = ["conv", FULL, "conv", FULL]
    experts = load("lfm2_moe", layer_types=listed, num_experts=8).experts
    assert (experts.dense_layers, experts.scoring, experts.is_corrected) == (
        {0, 1},
        "sigmoid",
        True,
    )


def test_granite_4_has_mamba_or_attention(load: Callable[..., Any]) -> None:
    fields = {"mamba_n_heads": 6, "mamba_d_state": 16, "mamba_n_groups": 2}
    listed = ["mamba", "mamba", "attention", "mamba"]
    config = load("granitemoehybrid", layer_types=listed, **fields)
    assert config == load(
        "granitemoehybrid",
        layer_types=[LINEAR, LINEAR, FULL, LINEAR],
        time_step_limit=[0.0, {"__float__": "Infinity"}],
        mamba_d_head=32,
        **fields,
    )
    assert (config.recurrent_layers, config.rope_index(2)) == ({0, 1, 3}, None)
    shapes = layer_tensors(config, 0)
    assert shapes["model.layers.0.mamba.in_proj.weight"] == (2 * 192 + 2 * 2 * 16 + 6, 96)
    assert shapes["model.layers.0.mamba.conv1d.bias"] == (256,)
    assert shapes["model.layers.0.shared_mlp.input_linear.weight"] == (2048, 96)
    dense = load(
        "granitemoehybrid",
        layer_types=[FULL] * 4,
        num_local_experts=0,
        shared_intermediate_size=200,
        position_embedding_type="rope",
    )
    assert (dense.experts, dense.recurrent, dense.intermediate_size) == (None, None, 200)
    assert dense.rope_index(0) == 0
    found = layer_tensors(dense, 3)
    assert found["model.layers.3.shared_mlp.output_linear.weight"] == (96, 200)


def test_gemma2(load: Callable[..., Any]) -> None:
    config = load("gemma2", hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=144)
    assert (config.head_dim, config.attention_scale) == (256, 1 / 12)
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)
    assert (config.activation, config.tied_embeddings) == ("gelu_tanh", True)
    assert config.windows == (4096, 0, 4096, 0)
    assert (len(config.norms.present_names), config.norm_offset, config.sliding_rope) == (
        4,
        1.0,
        None,
    )
    assert config.embedding_scale == pytest.approx(96**0.5)
    free = load("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (free.attention_softcap, free.final_softcap) == (0.0, 0.0)


def test_gemma3_in_both_spellings(load: Callable[..., Any]) -> None:
    fields = {"num_hidden_layers": 7, "sliding_window": 512}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = load(
        "gemma3_text",
        **fields,
        rope_theta=1e6,
        rope_local_base_freq=10000,
        sliding_window_pattern=6,
        rope_scaling=scaling,
    )
    new = load(
        "gemma3_text",
        **fields,
        layer_types=[SLIDING] * 5 + [FULL, SLIDING],
        rope_parameters={
            FULL: {"rope_theta": 1e6, **scaling},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    assert old == new
    assert old.windows == (512,) * 5 + (0, 512)
    assert [old.rope_index(layer) for layer in range(7)] == [1] * 5 + [0, 1]
    assert [rope.theta for rope in old.rope_configs] == [1e6, 1e4]
    assert [rope.factor for rope in old.rope_configs] == [8.0, 1.0]
    silent = load("gemma3_text", **fields)
    assert [rope.theta for rope in silent.rope_configs] == [1e6, 1e4]
    assert (silent.windows, silent.qk_norm, silent.final_softcap) == (old.windows, "each head", 0.0)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
        ("mistral", {"sliding_window": -1}, "sliding_window"),
        ("gemma2", {"sliding_window": 0}, "sliding_window"),
        ("gemma2", {"sliding_window": None}, "no sliding_window"),
        ("gemma2", {"layer_types": [FULL]}, "layer_types has 1 entries for 4 layers"),
        ("gemma2", {"layer_types": [1, 2, 3, 4]}, "layer_types must be a list"),
        ("qwen2", {"layer_types": [SLIDING] * 4}, "no sliding_window"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ("gemma3_text", {"final_logit_softcapping": -2}, "final_logit_softcapping"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3_text", {"rope_parameters": {FULL: 3}}, "full_attention must be an object"),
        ("gemma3_text", {"rope_local_base_freq": 1}, "rope_theta"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier must be positive"),
        ("granite", {"logits_scaling": "x"}, "logits_scaling"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4 layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        (
            "ministral3",
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta 0.1 must be positive, with original_max_position_embeddings",
        ),
        (
            "mistral4",
            {"rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.25 of 128 dimensions is not qk_rope_head_dim 64",
        ),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers has 1 entries, not 2"),
        ("falcon_h1", {"ssm_multipliers": "x"}, "ssm_multipliers"),
        (
            "falcon_h1",
            {"mamba_d_ssm": 100, "mamba_n_heads": 6},
            "mamba_n_heads 6 of mamba_d_head 16 are not mamba_d_ssm, 100",
        ),
        ("olmo_hybrid", {"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a mult"),
        ("kimi_linear", {"linear_attn_config": {"num_heads": 0}}, "linear_attn_config: num_heads"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*-"},
            "hybrid_override_pattern has 3 entries",
        ),
        ("nemotron_h", {}, "hybrid_override_pattern is missing"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*-E", "mamba_num_heads": 12},
            "mamba_num_heads 12 is not a multiple of n_groups 8",
        ),
        ("phimoe", {"router_jitter_noise": 0}, "router_jitter_noise must be positive"),
        ("cohere", {"logit_scale": 0}, "logit_scale must be positive"),
        ("cohere2", {"layer_norm_eps": -1}, "layer_norm_eps -1.* must be positive"),
        ("cohere2", {"sliding_window": None}, "no sliding_window"),
        ("gpt_oss", {"swiglu_limit": -7}, "swiglu_limit must be positive"),
        ("gpt_oss", {"num_local_experts": 2}, "num_experts_per_tok 4 exceeds the 2"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("mixtral", {"num_local_experts": 10**6}, "num_local_experts must be at most"),
        ("mixtral", {"num_local_experts": 1024, "num_hidden_layers": 4096}, "over 65536 experts"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ("qwen3_moe", {"moe_intermediate_size": 2**30}, "moe_intermediate_size"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 2**30}, "shared_expert_intermediate"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers"),
        (
            "exaone4",
            {"sliding_window_pattern": "LLLG"},
            "sliding_window_pattern must be a positive",
        ),
        ("exaone4", {"sliding_window": None, "layer_types": [SLIDING] * 4}, "no sliding_window"),
        ("exaone4", {"layer_types": [FULL] * 3}, "layer_types has 3 entries for 4 layers"),
        ("qwen3_next", {"layer_types": [LINEAR, FULL]}, "layer_types has 2 entries for 4 layers"),
        (
            "qwen3_next",
            {"linear_num_value_heads": 24},
            "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16",
        ),
        ("qwen3_next", {"linear_conv_kernel_dim": 10**6}, "linear_conv_kernel_dim must be at most"),
        ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval"),
        ("lfm2", {"layer_types": ["conv", FULL]}, "layer_types has 2 entries for 4 layers"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache"),
        (
            "granitemoehybrid",
            {"layer_types": GRANITE, "mamba_n_heads": 7},
            "mamba_n_heads 7 of mamba_d_head 27 are not mamba_expand times hidden_size, 192",
        ),
        (
            "granitemoehybrid",
            {"layer_types": GRANITE, "mamba_n_heads": 6, "mamba_n_groups": 4},
            "mamba_n_heads 6 is not a multiple of mamba_n_groups 4",
        ),
        ("lfm2", {"block_multiple_of": 2**30}, "block_multiple_of"),
        ("lfm2", {"block_ffn_dim_multiplier": -1}, "block_ffn_dim_multiplier must be positive"),
        ("lfm2", {"block_ffn_dim_multiplier": 10**9}, "intermediate_size"),
        ("lfm2_moe", {"num_experts_per_tok": 33}, "num_experts_per_tok 33 exceeds the 32"),
        ("gemma4_text", GEMMA4 | {"global_head_dim": 2048}, "head_dim 2048 must be even"),
        ("gemma4_text", GEMMA4 | {"num_global_key_value_heads": 3}, "num_key_value_heads 3"),
        ("gemma4_text", GEMMA4 | {"per_layer_config": {"3": 5}}, "unknown fields"),
        ("gemma4_text", GEMMA4 | {"per_layer_config": {"3": {"x": 1}}}, "unknown fields"),
        ("deepseek_v32", {"index_head_dim": 32}, "index_head_dim 32 is below qk_rope_head_dim 64"),
        ("llama4_text", {"attention_chunk_size": None}, "there is no attention_chunk_size"),
        ("llama4_text", {"attn_scale": -1}, "attn_scale must be positive"),
        ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
        ("glm4_moe", {"n_routed_experts": 9, "n_group": 2}, "9 experts can't be divided into"),
        ("glm4_moe", {"n_routed_experts": 8, "n_group": 8}, "groups of 2 or more"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group 3 exceeds n_group 2"),
        ("glm4_moe", {"n_group": 64, "topk_group": 1}, "exceeds the experts of topk_group 1"),
        ("glm4_moe", {"n_routed_experts": 4}, "num_experts_per_tok 8 exceeds the 4"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer"),
        ("glm4_moe", {"n_shared_experts": 10**6}, "n_shared_experts must be an integer from 0"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor must be positive"),
        ("glm4_moe", {"num_nextn_predict_layers": 65}, "num_nextn_predict_layers"),
        ("llama", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, "head_dim 2"),
        ("phi3", {"head_dim": 15}, "head_dim 15"),
        ("phi3", {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("phi3", {"partial_rotary_factor": 0.7, "head_dim": 30}, "partial_rotary_factor"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "short_factor is missing"),
        ("phi3", {"rope_scaling": {"type": "su", **LISTS}}, "short_factor has 9 entries, not 12"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1] * 12, "long_factor": [1] * 11}},
            "long_factor has 11 entries, not 12",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1] * 12, "long_factor": [0] * 12}},
            "entries of long_factor must be positive",
        ),
        ("phi3", {"rope_scaling": {"type": "su", **LISTS, "long_factor": "x"}}, "long_factor"),
        ("phi3", {"rope_scaling": {"type": "su", **LISTS, "long_factor": [None]}}, "long_factor"),
    ],
)
def test_impossible_fields_are_named(
    load: Callable[..., Any], family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(BrokenModel, match=message) as caught:
        load(family, **fields)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2_moe", {"use_sliding_window": True}, "sliding_attention"),
        ("cohere", {"layer_types": [SLIDING] * 4}, "sliding_attention"),
        (
            "phimoe",
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.1, "long_mscale": 1.2}},
            "short_mscale 1.1 and long_mscale 1.2 differ",
        ),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate"),
        ("falcon_h1", {"projectors_bias": True}, "mamba_proj_bias and projectors_bias differ"),
        (
            "falcon_h1",
            {"attention_bias": True, "attention_in_multiplier": 2.0},
            "biases beside multipliers",
        ),
        ("nemotron_h", {"hybrid_override_pattern": "M*-X"}, "layers with 'X'"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M-"}, "without full_attention"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*-E", "mlp_bias": True},
            "mlp_bias of experts",
        ),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "M*-M", "mlp_hidden_act": "silu"},
            "mlp_hidden_act 'silu' is not supported .only relu2",
        ),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm"),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input .Gemma 4 E2B and E4B",
        ),
        ("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ("gemma4_text", GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional"),
        (
            "gemma4_text",
            GEMMA4 | {"per_layer_config": {"0": {"head_dim": 64}}},
            "per_layer_config of other layers",
        ),
        ("glm_moe_dsa", {"index_topk_freq": 4}, "share the choice of another"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is not supported as it is"),
        ("kimi_linear", {"mla_use_output_gate": True}, "mla_use_output_gate is not supported"),
        (
            "kimi_linear",
            {"linear_attn_config": {"gate_lower_bound": -5.0}},
            "gate_lower_bound is not supported",
        ),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared"] * 2}, "share the choice of another"),
        ("deepseek_v32", {"q_lora_rank": None}, "index_topk without q_lora_rank"),
        ("deepseek_v32", {"layer_types": [FULL] * 4}, "layers with 'full_attention'"),
        ("llama4_text", {"num_experts_per_tok": 2}, "only 1 is supported as num_experts_per_tok"),
        ("llama4_text", {"layer_types": [SLIDING] * 4}, "layers with 'sliding_attention'"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}, "sliding_attention"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("lfm2", {"layer_types": [LINEAR] * 4}, "layers with 'linear_attention'"),
        ("granitemoehybrid", {}, "a model without full_attention"),
        (
            "granitemoehybrid",
            {"layer_types": GRANITE, "mamba_n_heads": 6, "time_step_limit": [0.1, 2.0]},
            r"time_step_limit \[0.1, 2.0\]",
        ),
        (
            "granitemoehybrid",
            {"layer_types": [FULL] * 4, "position_embedding_type": "alibi"},
            "position_embedding_type 'alibi'",
        ),
        ("qwen3_next", {"layer_types": ["conv"] * 4}, "layers with 'conv' are not supported"),
        ("qwen3_next", {"layer_types": ["x" * 99] * 4}, "layers with 'x{40}' are not supported"),
        ("qwen3_next", {"layer_types": [LINEAR] * 4}, "without full_attention"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is not supported"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek_v2", {"topk_method": "x", "num_experts_per_tok": 2}, "topk_method 'x'"),
        ("deepseek_v2", {"norm_topk_prob": True, "num_experts_per_tok": 2}, "norm_topk_prob"),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}, "without q_lora_rank"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2, 1, 1]}, "moe_topk differs between layers"),
        ("hunyuan_v1_moe", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
    ],
)
def test_unsupported_variants_are_named(
    load: Callable[..., Any], family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load(family, **fields)


FIELDS = (
    *SIZES,
    *PHI4_MINI,
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "layer_types",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
    "norm_topk_prob",
    "rope_theta",
    "rope_parameters",
    "rope_local_base_freq",
    "attention_multiplier",
    "logits_scaling",
    "no_rope_layers",
    "attention_chunk_size",
    "moe_layers",
    "interleave_moe_layer_step",
    "shared_expert_intermediate_size",
    "qkv_bias",
    "swiglu_limit",
    *GLM_AIR,
    "moe_num_experts",
    "moe_k",
    "moe_layer_start_index",
    "moe_layer_end_index",
    "moe_layer_interval",
    "moe_num_shared_experts",
    *DEEPSEEK,
    *(name for name in DEEPSEEK_V32 if name.startswith("index")),
    *GEMMA4,
    "per_layer_config",
    "enable_moe_block",
    "mlp_layer_types",
    "rotary_dim",
    "moe_topk",
    "num_shared_expert",
    "rope_scaling",
    "use_bias",
    "hybrid_override_pattern",
    "layers_block_type",
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40) | st.integers(-3, 12) | st.just(10**400),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["silu", "longrope", "yarn", "dynamic", "llama3", SLIDING, FULL, ""]),
)
ROPES = ("rope_type", "factor", "alpha", "short_factor", "long_factor", "rope_theta", SLIDING, FULL)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=13) | st.dictionaries(st.sampled_from(ROPES), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    family=st.sampled_from(list(NAMES)),
    fields=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4),
)
def test_any_config_is_understood_or_refused(
    load: Callable[..., Any], family: str, fields: dict[str, Any]
) -> None:
    try:
        config = load(family, **fields)
    except (BrokenModel, UnsupportedModel):
        return
    assert len(config.windows) == config.layers
    assert all(window >= 0 for window in config.windows)
    assert config.heads % config.kv_heads == 0
    assert layer_tensors(config, config.layers - 1)
