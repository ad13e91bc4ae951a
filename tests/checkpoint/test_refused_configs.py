"""Configs that contradict themselves, and variants that molink lacks, are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molink.checkpoint.tensor_layout import (
    layer_tensors,
)
from molink.errors import BrokenModel, UnsupportedModel
from tests.support.family_configs import (
    DEEPSEEK,
    DEEPSEEK_V32,
    FULL,
    GEMMA4,
    GLM_AIR,
    LINEAR,
    LISTS,
    NAMES,
    PHI4_MINI,
    SIZES,
    SLIDING,
)

#: Granite's names of recurrent layers and of others.
GRANITE = ["mamba", "attention"] * 2


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
