"""Parses the config of each family with experts into traits that the decoder implements.

See :mod:`molink.checkpoint.trait_fields` for defaults and errors.
"""

import math
from dataclasses import replace

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.experts import (
    deepseek_experts,
    deepseek_v2_experts,
    ernie_experts,
    gpt_oss_experts,
    granite_experts,
    granite_hybrid_experts,
    hunyuan_experts,
    kimi_experts,
    lfm2_experts,
    llama4_experts,
    minimax_experts,
    mistral4_experts,
    mixtral_experts,
    nemotron_experts,
    phi_experts,
    qwen_experts,
    shared_qwen_experts,
)
from molink.checkpoint.family_traits import (
    delta_rule_traits,
    ernie_traits,
    granite,
    hunyuan_dense,
    lfm2,
    qwen3_5,
    qwen3_rotation,
    scale_granite,
)
from molink.checkpoint.recurrent import (
    parse_channel_delta,
    parse_kimi_layers,
    parse_mamba2,
    parse_mamba_layers,
    parse_nemotron_layers,
    parse_nemotron_mamba2,
)
from molink.checkpoint.rope import (
    QueryScaling,
    RopeDefaults,
    parse_query_scaling,
    parse_rope,
    parse_scaled_longrope,
)
from molink.checkpoint.trait_fields import (
    MAX_HEADS,
    add_mtp,
    base_traits,
    count_draft_layers,
    parse_activation,
    parse_chunks,
    parse_typed_windows,
    parse_uniform_windows,
    parse_unrotated_layers,
    parse_windows_from,
    refuse_other,
    refuse_windows,
)
from molink.checkpoint.traits import (
    SWIGLU_ALPHA,
    FamilyTraits,
    IndexShape,
    LatentShape,
    LayerNorms,
    MlpNames,
)
from molink.errors import BrokenModel, UnsupportedModel

#: Fields of later Kimi Linear configs that are not supported.
_KIMI_K3 = (
    "mla_use_output_gate",
    "attn_res_block_size",
    "routed_expert_hidden_size",
    "use_full_rank_gate",
    "gate_lower_bound",
)
#: Maximum of latent attention's dimensions.
_MAX_LATENT = 1024


def granite_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Granite with experts."""
    return replace(granite(fields, layers), experts=granite_experts(fields, layers))


def granite_hybrid(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Granite 4: Mamba-2 in most layers or in none, perhaps experts, perhaps no RoPE."""
    positions = fields.get_string("position_embedding_type", "nope")
    if positions not in ("nope", "rope"):
        raise UnsupportedModel(
            f"{fields.where}: position_embedding_type {positions!r} is not supported"
        )
    biased = fields.get_boolean("attention_bias", False)
    recurrent = parse_mamba_layers(fields, layers)
    return replace(
        scale_granite(base_traits(fields, layers), fields),
        unrotated_layers=frozenset(range(layers) if positions == "nope" else ()),
        attention_bias=biased,
        output_bias=biased,
        # A GGUF file has two tensors.
        merged_gate_up=not fields.get_boolean("split_shared_mlp", False),
        mlp_names=MlpNames("shared_mlp", down="output_linear", gate_up="input_linear"),
        experts=granite_hybrid_experts(fields, layers),
        recurrent=parse_mamba2(fields) if recurrent else None,
        recurrent_layers=recurrent,
    )


def nemotron_h(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Nemotron Nano 2 and 3: each layer is Mamba-2, attention without RoPE, an MLP or experts."""
    kinds = parse_nemotron_layers(fields, layers)

    def having(*wanted: str) -> frozenset[int]:
        return frozenset(layer for layer in range(layers) if kinds[layer] in wanted)

    recurrent, experts = having("mamba"), having("moe")
    biased = fields.get_boolean("mlp_bias", False)
    if experts and biased:
        raise UnsupportedModel(f"{fields.where}: mlp_bias of experts is not supported")
    activation = parse_activation(fields, "mlp_hidden_act", "relu2", is_gated=False)
    refuse_other(fields, "mamba_hidden_act", "silu")
    return replace(
        base_traits(fields, layers, head_dim=128, activation=activation),
        windows=parse_uniform_windows(fields, layers, None),
        unrotated_layers=frozenset(range(layers)),
        mlp_bias=biased,
        norms=LayerNorms(before_attention="norm", before_mlp=None),
        experts=nemotron_experts(fields, layers, experts) if experts else None,
        recurrent=parse_nemotron_mamba2(fields) if recurrent else None,
        recurrent_layers=recurrent,
        mlp_layers=having("mlp", "moe"),
        # As in transformers, which ignores tie_word_embeddings.
        tied_embeddings=False,
    )


def mixtral(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Mixtral: experts."""
    return replace(
        base_traits(fields, layers, rope=parse_rope(fields, RopeDefaults(theta=1e6))),
        windows=parse_uniform_windows(fields, layers, None),
        experts=mixtral_experts(fields, layers),
    )


def llama4(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Llama 4: chunked attention in layers with RoPE, experts in some or all layers."""
    unrotated = parse_unrotated_layers(fields, layers)
    biased = fields.get_boolean("attention_bias", False)
    scaling = QueryScaling(
        fields.get_positive("attn_scale", 0.1),
        fields.get_integer("floor_scale", 8192),
        offset=1,
        unrotated_only=True,
    )
    rope = parse_rope(fields, RopeDefaults(theta=500_000.0))
    return replace(
        base_traits(fields, layers, head_dim=128, rope=rope),
        windows=parse_chunks(fields, layers, unrotated),
        chunked_windows=True,
        unrotated_layers=unrotated,
        interleaved_rope=True,
        query_scaling=scaling if fields.get_boolean("attn_temperature_tuning", True) else None,
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each unweighted head" if fields.get_boolean("use_qk_norm", True) else "none",
        mlp_names=MlpNames("feed_forward"),
        experts=llama4_experts(fields, layers),
    )


def phimoe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Phi-3.5-MoE: LayerNorm with biases, experts that are chosen one after the other."""
    biased = fields.get_boolean("attention_bias", False)
    rope = parse_scaled_longrope(fields, RopeDefaults(theta=1e6))
    return replace(
        base_traits(fields, layers, rope=rope),
        windows=parse_uniform_windows(fields, layers, None),
        attention_bias=biased,
        output_bias=biased,
        head_bias=fields.get_boolean("lm_head_bias", False),
        norm_kind="biased layer",
        experts=phi_experts(fields, layers),
    )


def qwen2_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen2-MoE: experts, one of them shared."""
    refuse_windows(fields)
    return replace(
        base_traits(fields, layers),
        attention_bias=fields.get_boolean("qkv_bias", True),
        experts=shared_qwen_experts(fields, layers),
    )


def qwen3_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen3-MoE: experts."""
    biased = fields.get_boolean("attention_bias", False)
    sliding = fields.get_boolean("use_sliding_window", False)
    return replace(
        qwen3_rotation(fields, base_traits(fields, layers)),
        windows=parse_uniform_windows(fields, layers, 4096) if sliding else (0,) * layers,
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
        experts=qwen_experts(fields, layers),
    )


def qwen3_next(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen3-Next: gated delta rule in most layers, experts, one of them shared."""
    return replace(
        delta_rule_traits(fields, layers, is_grouped=True),
        experts=shared_qwen_experts(fields, layers),
    )


def qwen3_5_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen3.5 with the experts of Qwen3-Next."""
    return replace(qwen3_5(fields, layers), experts=shared_qwen_experts(fields, layers))


def lfm2_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """LFM2 with experts in all layers but the first ones."""
    return replace(lfm2(fields, layers), experts=lfm2_experts(fields, layers))


def gpt_oss(fields: ConfigFields, layers: int) -> FamilyTraits:
    """gpt-oss: sinks, windows in every other layer, biases everywhere."""
    parse_activation(fields, "hidden_act", "silu")
    biased = fields.get_boolean("attention_bias", True)
    alpha = fields.get_number("swiglu_alpha", SWIGLU_ALPHA)
    if alpha != SWIGLU_ALPHA:
        raise UnsupportedModel(
            f"{fields.where}: swiglu_alpha {alpha} is not supported ({SWIGLU_ALPHA} is)"
        )
    return replace(
        base_traits(fields, layers, activation="clamped_swiglu"),
        windows=parse_typed_windows(fields, layers, full_every=2),
        sinks=True,
        activation_limit=fields.get_positive("swiglu_limit", 7.0),
        attention_bias=biased,
        output_bias=biased,
        experts=gpt_oss_experts(fields, layers),
    )


def glm4_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """GLM-4.5 to 4.7: half of each head rotated, experts as in DeepSeek-V3."""
    refuse_windows(fields)
    made = replace(
        base_traits(fields, layers, rope=parse_rope(fields, RopeDefaults(allows_partial=True))),
        attention_bias=fields.get_boolean("attention_bias", False),
        qk_norm="each head" if fields.get_boolean("use_qk_norm", False) else "none",
        experts=deepseek_experts(fields, layers),
    )
    return add_mtp(made, fields)


def dots1(fields: ConfigFields, layers: int) -> FamilyTraits:
    """dots.llm1: Qwen3's attention, experts as in DeepSeek-V3."""
    window = fields.get_optional_integer("sliding_window", 4096)
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        base_traits(fields, layers),
        windows=parse_windows_from(fields, layers, window, default=62),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
        experts=deepseek_experts(fields, layers),
    )


def minimax_m2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """MiniMax-M2: query and key norms over all heads, experts with sigmoid scores."""
    refuse_windows(fields)
    refuse_other(fields, "scoring_func", "sigmoid")
    if any(kind != 1 for kind in fields.get_integers("attn_type_list")):
        raise UnsupportedModel(
            f"{fields.where}: layers with linear attention (attn_type_list) are not supported"
        )
    head_dim = fields.get_integer("head_dim", 128)
    rotary = fields.get_integer("rotary_dim", head_dim)
    defaults = RopeDefaults(theta=5e6, allows_partial=True, partial=rotary / head_dim)
    return replace(
        base_traits(fields, layers, head_dim=128, rope=parse_rope(fields, defaults)),
        qk_norm="all heads",
        experts=minimax_experts(fields, layers),
    )


def ernie4_5_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """ERNIE 4.5 with experts."""
    if fields.get_boolean("use_bias", False):
        raise UnsupportedModel(f"{fields.where}: use_bias is not supported in this architecture")
    return replace(
        ernie_traits(fields, layers),
        experts=ernie_experts(fields, layers),
        draft_layers=count_draft_layers(fields),
    )


def hunyuan_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Hunyuan with experts."""
    if fields.get_count("moe_layer_num_skipped", 0):
        raise UnsupportedModel(f"{fields.where}: moe_layer_num_skipped is not supported")
    return replace(hunyuan_dense(fields, layers), experts=hunyuan_experts(fields, layers))


def deepseek_v2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """DeepSeek V2: latent attention."""
    refuse_other(fields, "scoring_func", "softmax")
    refuse_windows(fields)
    return replace(_latent_traits(fields, layers), experts=deepseek_v2_experts(fields, layers))


def deepseek_v3(fields: ConfigFields, layers: int, index: IndexShape | None = None) -> FamilyTraits:
    """DeepSeek V3, R1, V3.1 and Kimi K2: latent attention."""
    refuse_other(fields, "scoring_func", "sigmoid")
    refuse_other(fields, "topk_method", "noaux_tc")
    refuse_windows(fields, "full_attention" if index is None else "indexed_attention")
    made = replace(
        _latent_traits(fields, layers, index=index),
        interleaved_rope=fields.get_boolean("rope_interleave", True),
        experts=deepseek_experts(fields, layers),
        draft_layers=count_draft_layers(fields),
    )
    # MTP layers with sparse attention are not implemented yet.
    return add_mtp(made, fields) if index is None else made


def deepseek_v32(fields: ConfigFields, layers: int) -> FamilyTraits:
    """DeepSeek V3.2: as V3, but rows attend to selected positions only."""
    return _list_dense_layers(fields, deepseek_v3(fields, layers, _parse_index(fields, 64, False)))


def glm_moe_dsa(fields: ConfigFields, layers: int) -> FamilyTraits:
    """GLM-5: as DeepSeek V3.2; index queries use the same rotation as the other queries."""
    kinds = fields.get_strings("indexer_types") or ()
    pattern = fields.get_value("index_topk_pattern")
    if fields.get_integer("index_topk_freq", 1) != 1 or pattern or set(kinds) - {"full"}:
        raise UnsupportedModel(
            f"{fields.where}: layers that share the choice of another (indexer_types, "
            "index_topk_freq, index_topk_pattern) are not supported"
        )
    return _list_dense_layers(fields, deepseek_v3(fields, layers, _parse_index(fields, 32, True)))


def kimi_linear(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Kimi Linear: the delta rule in most layers, latent attention without RoPE in the others."""
    refuse_other(fields, "moe_router_activation_func", "sigmoid")
    # The convolution has the same activation.
    refuse_other(fields, "hidden_act", "silu")
    inner = fields.get_object("linear_attn_config")
    set_fields = [name for name in _KIMI_K3 if fields.get_value(name) or inner.get(name)]
    unset = [
        name for name in ("mla_use_nope", "use_grouped_topk") if not fields.get_boolean(name, True)
    ]
    if fields.get_integer("moe_layer_freq", 1) != 1:
        set_fields.append("moe_layer_freq")
    if set_fields or unset:
        raise UnsupportedModel(
            f"{fields.where}: {', '.join(set_fields + unset)} is not supported as it is"
        )
    made = replace(
        _latent_traits(fields, layers),
        unrotated_layers=frozenset(range(layers)),
        experts=kimi_experts(fields, layers),
        recurrent=parse_channel_delta(fields),
        recurrent_layers=parse_kimi_layers(fields, layers),
    )
    return _list_dense_layers(fields, made)


def _parse_index(fields: ConfigFields, heads: int, interleaved: bool) -> IndexShape:
    shape = IndexShape(
        heads=fields.get_integer("index_n_heads", heads, MAX_HEADS),
        dim=fields.get_integer("index_head_dim", 128, _MAX_LATENT),
        top_k=fields.get_integer("index_topk", 2048),
        interleaved=interleaved,
    )
    rotated = fields.get_integer("qk_rope_head_dim", 64, _MAX_LATENT)
    if shape.dim < rotated:
        raise BrokenModel(
            f"{fields.where}: index_head_dim {shape.dim} is below qk_rope_head_dim {rotated}"
        )
    if fields.get_optional_integer("q_lora_rank", 1536) is None:
        raise UnsupportedModel(f"{fields.where}: index_topk without q_lora_rank is not supported")
    return shape


def mistral4(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Mistral 4: latent attention, queries scaled by position."""
    refuse_windows(fields)
    made = _latent_traits(fields, layers, states_rotated=True)
    return replace(
        made,
        interleaved_rope=fields.get_boolean("rope_interleave", True),
        query_scaling=parse_query_scaling(fields, made.rope),
        experts=mistral4_experts(fields, layers),
    )


def _latent_traits(
    fields: ConfigFields,
    layers: int,
    *,
    states_rotated: bool = False,
    index: IndexShape | None = None,
) -> FamilyTraits:
    """Parse latent attention; with ``states_rotated`` the config states the rotated part."""
    latent = LatentShape(
        rank=fields.get_integer("kv_lora_rank", 512, _MAX_LATENT),
        query_rank=fields.get_optional_integer("q_lora_rank", 1536) or 0,
        rope_dim=fields.get_integer("qk_rope_head_dim", 64, _MAX_LATENT),
        plain_dim=fields.get_integer("qk_nope_head_dim", 128, _MAX_LATENT),
        value_dim=fields.get_integer("v_head_dim", 128, _MAX_LATENT),
        is_split=fields.get_boolean("split_kv_b_proj", False),  # from a GGUF file
        index=index,
    )
    heads = fields.get_integer("num_attention_heads", maximum=MAX_HEADS)
    biased = fields.get_boolean("attention_bias", False)
    if biased and not latent.query_rank:
        raise UnsupportedModel(f"{fields.where}: attention_bias without q_lora_rank")
    head_dim = latent.head_dim
    whole = latent.plain_dim + latent.rope_dim
    part = latent.rope_dim / whole
    rope = parse_rope(
        fields, RopeDefaults(allows_partial=True, partial=part) if states_rotated else None
    )
    if states_rotated and rope.rotary_dim(whole) != latent.rope_dim:
        raise BrokenModel(
            f"{fields.where}: partial_rotary_factor {rope.partial_rotary_factor} of {whole} "
            f"dimensions is not qk_rope_head_dim {latent.rope_dim}"
        )
    scale = whole**-0.5
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return FamilyTraits(
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        attention_scale=scale,
        windows=(0,) * layers,
        rope=replace(rope, partial_rotary_factor=latent.rope_dim / head_dim),
        interleaved_rope=True,
        activation=parse_activation(fields, "hidden_act", "silu"),
        attention_bias=biased,
        output_bias=biased,
        latent=latent,
        tied_embeddings=fields.get_boolean("tie_word_embeddings", False),
    )


def glm4_moe_lite(fields: ConfigFields, layers: int) -> FamilyTraits:
    """GLM-4.7-Flash: as DeepSeek V3."""
    return _list_dense_layers(fields, deepseek_v3(fields, layers))


def _list_dense_layers(fields: ConfigFields, made: FamilyTraits) -> FamilyTraits:
    """Return ``traits`` with the dense layers that ``mlp_layer_types`` lists, if present."""
    kinds, layers = fields.get_strings("mlp_layer_types"), len(made.windows)
    if kinds is None or made.experts is None:
        return made
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise BrokenModel(
            f"{fields.where}: mlp_layer_types must say dense or sparse for each of {layers} layers"
        )
    dense = frozenset(layer for layer in range(layers) if kinds[layer] == "dense")
    return replace(made, experts=replace(made.experts, dense_layers=dense))
