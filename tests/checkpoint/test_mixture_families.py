"""Facts from configs of mixtures of experts, in the form published on the hub."""

from collections.abc import Callable
from typing import Any

import pytest

from molink.checkpoint.tensor_layout import (
    last_stage_tensors,
    layer_tensors,
)
from tests.support.family_configs import DEEPSEEK, FULL, GLM_AIR, SLIDING


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
