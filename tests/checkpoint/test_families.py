"""Facts from configs of dense families, in the form published on the hub."""

from collections.abc import Callable
from typing import Any

import pytest

from molink.checkpoint.rope import QueryScaling
from molink.checkpoint.tensor_layout import (
    layer_tensors,
)
from molink.checkpoint.traits import HeadShape
from tests.support.family_configs import DEEPSEEK_V32, FULL, GEMMA4, LISTS, PHI4_MINI, SLIDING


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
