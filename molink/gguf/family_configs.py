"""Translates GGUF metadata to the ``config.json`` fields that are specific to an architecture."""

from collections.abc import Callable
from typing import Any

from molink.errors import BrokenModel, UnsupportedModel
from molink.gguf.arch_metadata import ArchMetadata

#: Types of layers without and with a sliding window.
_LAYER_TYPES = ("full_attention", "sliding_attention")
#: llama.cpp's numbers of the functions that score experts.
_SOFTMAX, _SIGMOID = 1, 2
_MAVERICK_EXPERTS = 128


def _llama_config(about: ArchMetadata) -> dict[str, Any]:
    biased = {"attention_bias": about.has_query_bias}
    if not about.has_key("expert_count"):
        return {"architectures": ["LlamaForCausalLM"], **biased}
    return {
        "architectures": ["MixtralForCausalLM"],
        **_expert_counts(about, "num_local_experts"),
        "sliding_window": None,
    }


def _llama4_config(about: ArchMetadata) -> dict[str, Any]:
    """Llama 4; GGUF has no keys for values that both released models share."""
    key = "attention.sliding_window"
    if about.has_key(key) and not about.get_count(key):
        raise UnsupportedModel(
            f"{about.metadata.where}: {about.full_key(key)} 0 (no chunks) is not supported"
        )
    experts = _expert_counts(about, "num_local_experts")
    return {
        "architectures": ["Llama4ForCausalLM"],
        **experts,
        "intermediate_size": about.get_integer("expert_feed_forward_length"),
        "intermediate_size_mlp": about.get_uniform("feed_forward_length"),
        "interleave_moe_layer_step": about.get_integer("interleave_moe_layer_step"),
        # llama.cpp distinguishes Scout and Maverick in the same way.
        "use_qk_norm": experts["num_local_experts"] != _MAVERICK_EXPERTS,
    }


def _expert_counts(about: ArchMetadata, name: str) -> dict[str, Any]:
    """Read the number of experts, as field ``name``, and the number chosen per row."""
    return {
        name: about.get_integer("expert_count"),
        "num_experts_per_tok": about.get_integer("expert_used_count"),
    }


def _mistral3_config(about: ArchMetadata) -> dict[str, Any]:
    """Ministral 3, or Mistral Small 3.1 and 3.2, which older files label ``llama``."""
    if about.has_key("attention.temperature_scale"):
        return {"architectures": ["Ministral3ForCausalLM"]}
    return _llama_config(about)


def _granite_config(about: ArchMetadata) -> dict[str, Any]:
    heads = about.get_uniform("attention.head_count")
    head_dim = about.get_integer(
        "attention.key_length", about.get_integer("embedding_length") // heads
    )
    return {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": about.has_query_bias,
        "attention_multiplier": about.get_number("attention.scale", head_dim**-0.5),
        "embedding_multiplier": about.get_number("embedding_scale", 1.0),
        "residual_multiplier": about.get_number("residual_scale", 1.0),
        "logits_scaling": about.get_number("logit_scale", 1.0),
    }


def _granite_moe_config(about: ArchMetadata) -> dict[str, Any]:
    key = "expert_shared_feed_forward_length"
    if about.get_count(key):
        raise UnsupportedModel(
            f"{about.metadata.where}: {about.full_key(key)} (shared experts) is not supported"
        )
    return {
        **_granite_config(about),
        "architectures": ["GraniteMoeForCausalLM"],
        **_expert_counts(about, "num_local_experts"),
    }


def _granite_hybrid_config(about: ArchMetadata) -> dict[str, Any]:
    """Granite 4 with Mamba-2; without it, such files are those of Granite 3."""
    inner, heads = about.get_integer("ssm.inner_size"), about.get_integer("ssm.time_step_rank")
    kept, experts = about.list_numbers("attention.head_count_kv"), about.get_count("expert_count")
    width = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    return {
        **_granite_config(about),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention" if count else "mamba" for count in kept],
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, inner // heads),
        "mamba_n_groups": about.get_integer("ssm.group_count"),
        "mamba_d_state": about.get_integer("ssm.state_size"),
        "mamba_d_conv": about.get_integer("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // about.get_integer("embedding_length")),
        "mamba_conv_bias": about.has_tensors("conv1d.bias"),
        "mamba_plain_decays": True,
        "num_local_experts": experts,
        "num_experts_per_tok": about.get_integer("expert_used_count") if experts else 1,
        "shared_intermediate_size": about.get_integer(width),
        "split_shared_mlp": True,
        "position_embedding_type": "nope" if 0 in kept else "rope",
    }


def _falcon_h1_config(about: ArchMetadata) -> dict[str, Any]:
    """Falcon-H1; its factors are in the weights."""
    if "output.weight" not in about.file.tensors:
        # The embedding's factor differs from that of the logits.
        raise UnsupportedModel(
            f"{about.metadata.where}: {about.name} without output.weight is not supported"
        )
    inner, heads = about.get_integer("ssm.inner_size"), about.get_integer("ssm.time_step_rank")
    is_biased = about.has_tensors("ssm_in.bias")
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "attention_bias": about.has_query_bias,
        "mlp_bias": about.has_tensors("ffn_up.bias"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, inner // heads),
        "mamba_n_groups": about.get_integer("ssm.group_count"),
        "mamba_d_state": about.get_integer("ssm.state_size"),
        "mamba_d_conv": about.get_integer("ssm.conv_kernel"),
        "mamba_conv_bias": about.has_tensors("ssm_conv1d.bias"),
        "mamba_proj_bias": is_biased,
        "projectors_bias": is_biased,
        "mamba_rms_norm": about.has_tensors("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_plain_decays": True,
    }


def _nemotron_h_config(about: ArchMetadata) -> dict[str, Any]:
    """Nemotron-H; each layer is Mamba-2, attention, an MLP or experts."""
    inner, heads = about.get_integer("ssm.inner_size"), about.get_integer("ssm.time_step_rank")
    kept, widths = (
        about.list_numbers(key) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    kinds = [
        "attention" if count else "mlp" if width else "mamba"
        for count, width in zip(kept, widths, strict=True)
    ]
    for layer in range(about.layers):
        if f"blk.{layer}.ffn_gate_inp.weight" in about.file.tensors:
            kinds[layer] = "moe"
    return {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": max(1, inner // heads),
        "n_groups": about.get_integer("ssm.group_count"),
        "ssm_state_size": about.get_integer("ssm.state_size"),
        "conv_kernel": about.get_integer("ssm.conv_kernel"),
        "use_conv_bias": about.has_tensors("ssm_conv1d.bias"),
        "use_bias": about.has_tensors("ssm_in.bias"),
        "mlp_bias": about.has_tensors("ffn_up.bias"),
        "mamba_plain_decays": True,
        **(_nemotron_experts(about) if "moe" in kinds else {}),
    }


def _nemotron_experts(about: ArchMetadata) -> dict[str, Any]:
    width = "expert_shared_feed_forward_length"
    return {
        "moe_latent_size": about.get_count("moe_latent_size") or None,
        **_deepseek_experts(about),
        "moe_shared_expert_intermediate_size": about.get_integer(width),
    }


def _olmo2_config(about: ArchMetadata) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which has windows."""
    if not about.has_key("attention.sliding_window"):
        return {"architectures": ["Olmo2ForCausalLM"]}
    return {"architectures": ["Olmo3ForCausalLM"], **_listed_windows(about)}


def _exaone4_config(about: ArchMetadata) -> dict[str, Any]:
    """EXAONE 4; only the larger one has windows."""
    has_windows = about.has_key("attention.sliding_window")
    windows = _listed_windows(about) if has_windows else {"sliding_window": None}
    return {"architectures": ["Exaone4ForCausalLM"], **windows}


def _listed_windows(about: ArchMetadata) -> dict[str, Any]:
    """Read windows: those of the listed layers, or of all but every fourth."""
    made = {"sliding_window": about.get_integer("attention.sliding_window")}
    key = "attention.sliding_window_pattern"
    if not about.has_key(key):
        return made
    windowed = about.metadata.get_integers(about.full_key(key), about.layers)
    if not set(windowed) <= {0, 1}:
        raise BrokenModel(
            f"{about.metadata.where}: metadata {about.full_key(key)} doesn't tell each layer's "
            "window"
        )
    return {**made, "layer_types": [_LAYER_TYPES[each] for each in windowed]}


def _seed_oss_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": about.has_query_bias,
        "attention_out_bias": "blk.0.attn_output.bias" in about.file.tensors,
    }


def _gpt_oss_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": about.has_query_bias,
        **_expert_counts(about, "num_local_experts"),
        "intermediate_size": about.get_integer("expert_feed_forward_length"),
        "sliding_window": about.get_integer("attention.sliding_window"),
    }


def _glm4_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": about.has_query_bias,
    }


def _plain_config(architecture: str) -> Callable[[ArchMetadata], dict[str, Any]]:
    return lambda about: {"architectures": [architecture]}


def _qwen2_moe_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        **_shared_qwen_experts(about),
        "norm_topk_prob": False,
        "qkv_bias": about.has_query_bias,
    }


def _qwen3_vl_config(about: ArchMetadata) -> dict[str, Any]:
    """Qwen3-VL, dense or with experts; its vision tower is another file."""
    plain = {"architectures": ["Qwen3ForCausalLM"]}
    made = _qwen3_moe_config(about) if about.has_key("expert_count") else plain
    return {**made, "deepstack_layers": about.get_count("n_deepstack_layers")}


def _qwen3_moe_config(about: ArchMetadata) -> dict[str, Any]:
    return {"architectures": ["Qwen3MoeForCausalLM"], **_qwen_experts(about)}


def _qwen_experts(about: ArchMetadata) -> dict[str, Any]:
    return {
        **_expert_counts(about, "num_experts"),
        "moe_intermediate_size": about.get_integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen3_next_config(about: ArchMetadata) -> dict[str, Any]:
    """Qwen3-Next, whose older files have queries, keys, values and gates in one tensor."""
    first = next(iter(_list_recurrent(about)), 0)
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "linear_split_rows": f"blk.{first}.attn_qkv.weight" in about.file.tensors,
        **_delta_rule_config(about),
        **_shared_qwen_experts(about),
    }


def _qwen35_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_tiled_values": True,
        **_delta_rule_config(about),
    }


def _qwen35_moe_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        **_qwen35_config(about),
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **_shared_qwen_experts(about),
    }


def _delta_rule_config(about: ArchMetadata) -> dict[str, Any]:
    inner, values = about.get_integer("ssm.inner_size"), about.get_integer("ssm.time_step_rank")
    if inner % values:
        raise BrokenModel(
            f"{about.metadata.where}: {about.full_key('ssm.inner_size')} {inner} is not a multiple "
            f"of {about.full_key('ssm.time_step_rank')} {values}"
        )
    recurrent = _list_recurrent(about)
    return {
        "layer_types": [
            "linear_attention" if layer in recurrent else "full_attention"
            for layer in range(about.layers)
        ],
        "linear_conv_kernel_dim": about.get_integer("ssm.conv_kernel"),
        "linear_key_head_dim": about.get_integer("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": about.get_integer("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_plain_decays": True,
        "num_nextn_predict_layers": about.draft_layers,
    }


def _list_recurrent(about: ArchMetadata) -> list[int]:
    """List the layers without attention: as stated, or all but the last of each interval."""
    key = "attention.recurrent_layers"
    if about.has_key(key):
        return [layer for layer, mark in enumerate(about.list_numbers(key)) if mark]
    interval = about.get_integer("full_attention_interval", 4)
    return [layer for layer in range(about.layers) if (layer + 1) % interval]


def _shared_qwen_experts(about: ArchMetadata) -> dict[str, Any]:
    width = "expert_shared_feed_forward_length"
    return {**_qwen_experts(about), "shared_expert_intermediate_size": about.get_integer(width)}


def _lfm2_config(about: ArchMetadata) -> dict[str, Any]:
    """LFM2: layers without attention have no key-value heads."""
    heads = about.list_numbers("attention.head_count_kv")
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": about.get_integer("shortconv.l_cache"),
        "conv_bias": about.has_tensors(".shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe_config(about: ArchMetadata) -> dict[str, Any]:
    _check_scores(about, _SIGMOID)
    return {
        **_lfm2_config(about),
        "architectures": ["Lfm2MoeForCausalLM"],
        **_expert_counts(about, "num_experts"),
        "moe_intermediate_size": about.get_integer("expert_feed_forward_length"),
        "num_dense_layers": about.get_count("leading_dense_block_count"),
        "use_expert_bias": about.has_tensors("exp_probs_b.bias"),
        "norm_topk_prob": True,
    }


def _glm4_moe_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": about.has_query_bias,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in about.file.tensors,
        "num_nextn_predict_layers": about.draft_layers,
        **_deepseek_experts(about),
    }


def _dots1_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Dots1ForCausalLM"],
        "sliding_window": None,
        **_deepseek_experts(about),
    }


def _ernie_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Ernie4_5ForCausalLM"],
        "use_bias": about.has_query_bias,
    }


def _ernie_moe_config(about: ArchMetadata) -> dict[str, Any]:
    _check_scores(about, _SOFTMAX)
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_num_experts": about.get_integer("expert_count"),
        "moe_k": about.get_integer("expert_used_count"),
        "moe_intermediate_size": about.get_integer("expert_feed_forward_length"),
        "moe_num_shared_experts": about.get_count("expert_shared_count"),
        "moe_layer_start_index": about.get_count("leading_dense_block_count"),
        "moe_layer_interval": about.get_integer("interleave_moe_layer_step", 1),
    }


def _minimax_config(about: ArchMetadata) -> dict[str, Any]:
    _check_scores(about, _SIGMOID)
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        **_expert_counts(about, "num_local_experts"),
        "intermediate_size": about.get_integer("expert_feed_forward_length"),
    }


def _hunyuan_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "attention_bias": about.has_query_bias,
    }


def _hunyuan_moe_config(about: ArchMetadata) -> dict[str, Any]:
    _check_scores(about, _SOFTMAX)
    return {
        **_hunyuan_config(about),
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "num_experts": about.get_integer("expert_count"),
        "moe_topk": about.get_integer("expert_used_count"),
        "moe_intermediate_size": about.get_integer("expert_feed_forward_length"),
        "intermediate_size": about.get_integer("expert_shared_feed_forward_length"),
    }


def _deepseek2_config(about: ArchMetadata) -> dict[str, Any]:
    """DeepSeek V2 and V3, and GLM-4.7-Flash; only V2 lacks corrections of scores."""
    is_second = f"blk.{about.layers - 1}.exp_probs_b.bias" not in about.file.tensors
    experts = _deepseek_experts(about, _SOFTMAX if is_second else _SIGMOID)
    if is_second:
        is_grouped = experts["n_group"] > 1
        experts["topk_method"] = "group_limited_greedy" if is_grouped else "greedy"
    rotary = about.get_integer("rope.dimension_count")
    # Older files, whose key-value projection is not split, lack the metadata of latent attention.
    key, value = (
        about.get_integer(
            f"attention.{part}_length_mla", about.get_integer(f"attention.{part}_length")
        )
        for part in ("key", "value")
    )
    if key <= rotary:
        raise BrokenModel(
            f"{about.metadata.where}: {about.full_key('rope.dimension_count')} {rotary} leaves "
            f"nothing of keys of {key} dimensions"
        )
    query = "attention.q_lora_rank"
    return {
        "architectures": [f"DeepseekV{2 if is_second else 3}ForCausalLM"],
        "kv_lora_rank": about.get_integer("attention.kv_lora_rank"),
        "q_lora_rank": about.get_integer(query) if about.has_key(query) else None,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "split_kv_b_proj": "blk.0.attn_k_b.weight" in about.file.tensors,
        "num_nextn_predict_layers": about.draft_layers,
        **experts,
    }


def _deepseek_experts(about: ArchMetadata, scores: int = _SIGMOID) -> dict[str, Any]:
    """Fields of experts as in DeepSeek-V3, or in V2, which has other ``scores``."""
    _check_scores(about, scores)
    return {
        **_expert_counts(about, "n_routed_experts"),
        "moe_intermediate_size": about.get_integer("expert_feed_forward_length"),
        "n_shared_experts": about.get_count("expert_shared_count"),
        "first_k_dense_replace": about.get_count("leading_dense_block_count"),
        "n_group": about.get_integer("expert_group_count", 1),
        "topk_group": about.get_integer("expert_group_used_count", 1),
        "norm_topk_prob": about.get_boolean("expert_weights_norm", False),
        "routed_scaling_factor": about.get_number("expert_weights_scale", 1.0),
    }


def _check_scores(about: ArchMetadata, wanted: int) -> None:
    """Refuse experts that are scored in another way than the architecture's."""
    key = "expert_gating_func"
    found = about.get_integer(key, wanted)
    if found != wanted:
        raise UnsupportedModel(
            f"{about.metadata.where}: {about.full_key(key)} {found} is not supported (only "
            f"{wanted} in this architecture)"
        )


def _command_r_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["CohereForCausalLM"],
        "attention_bias": about.has_query_bias,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in about.file.tensors,
        "logit_scale": about.get_number("logit_scale"),
    }


def _cohere2_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "attention_bias": about.has_query_bias,
        "logit_scale": about.get_number("logit_scale"),
        **_listed_windows(about),
    }


def _phimoe_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        **_phi3_config(about),
        "architectures": ["PhimoeForCausalLM"],
        "attention_bias": about.has_query_bias,
        "lm_head_bias": "output.bias" in about.file.tensors,
        **_expert_counts(about, "num_local_experts"),
    }


def _phi3_config(about: ArchMetadata) -> dict[str, Any]:
    window = about.metadata.get_index(about.full_key("attention.sliding_window"))
    return {"architectures": ["Phi3ForCausalLM"], "sliding_window": window or None}


def _gemma2_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": _attention_scalar(about, largest=46),
        "sliding_window": about.get_integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": about.get_number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": about.get_number("final_logit_softcapping", 30.0),
    }


def _gemma3_config(about: ArchMetadata) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": _attention_scalar(about, largest=62),
        "sliding_window": about.get_integer("attention.sliding_window"),
        "rope_local_base_freq": about.get_number("rope.freq_base_swa", 10_000.0),
    }


def _attention_scalar(about: ArchMetadata, largest: int) -> int:
    """Return the squared divisor of attention scores; the layer count identifies 27B models."""
    heads = about.get_uniform("attention.head_count")
    share = about.get_integer("embedding_length") // heads
    is_largest = about.layers == largest
    return share if is_largest else about.get_integer("attention.key_length", share)


#: GGUF architecture → its fields.
FAMILY_CONFIGS: dict[str, Callable[[ArchMetadata], dict[str, Any]]] = {
    "llama": _llama_config,
    "llama4": _llama4_config,
    "mistral3": _mistral3_config,
    "granite": _granite_config,
    "granitemoe": _granite_moe_config,
    "granitehybrid": _granite_hybrid_config,
    "smollm3": _plain_config("SmolLM3ForCausalLM"),
    "olmo2": _olmo2_config,
    "exaone4": _exaone4_config,
    "seed_oss": _seed_oss_config,
    "glm4": _glm4_config,
    "gpt-oss": _gpt_oss_config,
    "glm4moe": _glm4_moe_config,
    "deepseek2": _deepseek2_config,
    "dots1": _dots1_config,
    "ernie4_5": _ernie_config,
    "ernie4_5-moe": _ernie_moe_config,
    "minimax-m2": _minimax_config,
    "hunyuan-dense": _hunyuan_config,
    "hunyuan-moe": _hunyuan_moe_config,
    "qwen2moe": _qwen2_moe_config,
    "qwen2": _plain_config("Qwen2ForCausalLM"),
    "qwen2vl": _plain_config("Qwen2ForCausalLM"),
    "qwen3": _plain_config("Qwen3ForCausalLM"),
    "qwen3vl": _qwen3_vl_config,
    "qwen3moe": _qwen3_moe_config,
    "qwen3vlmoe": _qwen3_vl_config,
    "qwen3next": _qwen3_next_config,
    "lfm2": _lfm2_config,
    "lfm2moe": _lfm2_moe_config,
    "qwen35": _qwen35_config,
    "qwen35moe": _qwen35_moe_config,
    "command-r": _command_r_config,
    "cohere2": _cohere2_config,
    "falcon-h1": _falcon_h1_config,
    "nemotron_h": _nemotron_h_config,
    "nemotron_h_moe": _nemotron_h_config,
    "phimoe": _phimoe_config,
    "phi3": _phi3_config,
    "gemma2": _gemma2_config,
    "gemma3": _gemma3_config,
}
