"""Parses each family's config into traits that the decoder implements.

Defaults are those of transformers. All functions raise ``UnsupportedModel`` for what is not
implemented, and ``BrokenModel`` for missing or invalid fields; both name the field.

A sliding window of W covers a row and the W - 1 rows before it; 0 means no window.
"""

import math
from dataclasses import replace

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.experts import (
    MAX_EXPERT_SIZE,
    deepseek_experts,
    deepseek_v2_experts,
    ernie_experts,
    gpt_oss_experts,
    granite_experts,
    hunyuan_experts,
    minimax_experts,
    mixtral_experts,
    qwen_experts,
)
from molink.checkpoint.rope import (
    RopeConfig,
    RopeDefaults,
    RopeKind,
    parse_alpha_rope,
    parse_rope,
    parse_two_ropes,
)
from molink.checkpoint.traits import (
    SWIGLU_ALPHA,
    Activation,
    FamilyTraits,
    LatentShape,
    LayerNorms,
)
from molink.errors import BrokenModel, UnsupportedModel

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SANDWICH_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_POST_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM4_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
_MAX_HEADS = 4096
#: Of dimensions of latent attention.
_MAX_LATENT = 1024
_MAX_DRAFT_LAYERS = 64


def _base_traits(
    fields: ConfigFields,
    layers: int,
    *,
    head_dim: int | None = None,
    activation: Activation | None = None,
    rope: RopeConfig | None = None,
) -> FamilyTraits:
    """Traits that all families share. ``head_dim`` defaults to hidden size over heads."""
    heads = fields.get_integer("num_attention_heads", maximum=_MAX_HEADS)
    share = max(1, fields.get_integer("hidden_size") // heads)
    head_dim = fields.get_integer("head_dim", head_dim or share)
    return FamilyTraits(
        heads=heads,
        kv_heads=fields.get_integer("num_key_value_heads", heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        windows=(0,) * layers,
        rope=rope or parse_rope(fields),
        activation=activation or _activation(fields, "hidden_act", "silu"),
        tied_embeddings=fields.get_boolean("tie_word_embeddings", False),
    )


def llama(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Llama 2 and 3.x."""
    refuse_windows(fields)
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        _base_traits(fields, layers),
        attention_bias=biased,
        output_bias=biased,
        mlp_bias=fields.get_boolean("mlp_bias", False),
    )


def granite(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Llama with factors; logits are divided, everything else is multiplied."""
    return replace(
        llama(fields, layers),
        attention_scale=fields.get_positive("attention_multiplier"),
        embedding_scale=fields.get_positive("embedding_multiplier"),
        residual_scale=fields.get_positive("residual_multiplier"),
        logit_scale=1 / fields.get_positive("logits_scaling"),
    )


def granite_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Granite with experts."""
    return replace(granite(fields, layers), experts=granite_experts(fields, layers))


def seed_oss(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Seed-OSS: biases of queries, keys and values."""
    refuse_windows(fields)
    return replace(
        _base_traits(fields, layers, head_dim=128),
        attention_bias=fields.get_boolean("attention_bias", True),
        output_bias=fields.get_boolean("attention_out_bias", False),
        mlp_bias=fields.get_boolean("mlp_bias", False),
    )


def smollm3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Llama with RoPE only in layers whose ``no_rope_layers`` is 1."""
    interval = fields.get_integer("no_rope_layer_interval", 4)
    rotated = fields.get_integers("no_rope_layers") or tuple(
        int((layer + 1) % interval != 0) for layer in range(layers)
    )
    if len(rotated) < layers:
        raise BrokenModel(
            f"{fields.where}: no_rope_layers has {len(rotated)} entries for {layers} layers"
        )
    rope = parse_rope(fields, RopeDefaults(theta=2e6))
    return replace(
        llama(fields, layers),
        rope=rope,
        unrotated_layers=frozenset(layer for layer in range(layers) if not rotated[layer]),
        tied_embeddings=fields.get_boolean("tie_word_embeddings", True),
    )


def olmo2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """OLMo 2: norms after attention and MLP only."""
    refuse_windows(fields)
    return _olmo_traits(fields, layers, parse_rope(fields))


def olmo3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """OLMo 2 with windows; RoPE scaling applies only to layers without one."""
    defaults = RopeDefaults(theta=fields.get_number("rope_theta", 500_000.0))
    rope, local_rope = parse_two_ropes(fields, defaults, defaults)
    return replace(
        _olmo_traits(fields, layers, rope),
        windows=parse_typed_windows(fields, layers, full_every=4),
        sliding_rope=local_rope,
    )


def _olmo_traits(fields: ConfigFields, layers: int, rope: RopeConfig) -> FamilyTraits:
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        _base_traits(fields, layers, rope=rope),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="all heads",
        norms=_POST_NORMS,
    )


def exaone4(fields: ConfigFields, layers: int) -> FamilyTraits:
    """EXAONE 4: norms after attention and MLP only; with windows, RoPE only in their layers."""
    has_windows = fields.get_optional_integer("sliding_window", 4096) is not None
    is_listed = fields.get_strings("layer_types") is not None
    windows = (0,) * layers
    if has_windows or is_listed:
        pattern = 4 if is_listed else fields.get_integer("sliding_window_pattern", 4)
        windows = parse_typed_windows(fields, layers, full_every=pattern)
    unrotated = (layer for layer in range(layers) if has_windows and not windows[layer])
    return replace(
        _base_traits(fields, layers),
        windows=windows,
        unrotated_layers=frozenset(unrotated),
        qk_norm="each head",
        norms=_POST_NORMS,
    )


def mistral(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Mistral: sliding window in all layers."""
    return replace(
        _base_traits(fields, layers), windows=parse_uniform_windows(fields, layers, 4096)
    )


def qwen2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen2 and 2.5: biases, windows in upper layers."""
    windows = parse_upper_windows(fields, layers)
    return replace(_base_traits(fields, layers), windows=windows, attention_bias=True)


def qwen3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen3: query and key norms."""
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        _base_traits(fields, layers, head_dim=128),
        windows=parse_upper_windows(fields, layers),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
    )


def phi3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Phi-3 to Phi-4-mini: merged projections, partial RoPE, LongRoPE."""
    aliases: dict[str, RopeKind] = {"su": "longrope", "yarn": "longrope"}
    defaults = RopeDefaults(aliases=aliases, allows_partial=True, original_context=4096)
    return replace(
        _base_traits(fields, layers, rope=parse_rope(fields, defaults)),
        windows=parse_uniform_windows(fields, layers, None),
        merged_qkv=True,
        merged_gate_up=True,
    )


def mixtral(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Mixtral: experts."""
    return replace(
        _base_traits(fields, layers, rope=parse_rope(fields, RopeDefaults(theta=1e6))),
        windows=parse_uniform_windows(fields, layers, None),
        experts=mixtral_experts(fields, layers),
    )


def qwen2_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen2-MoE: experts, one of them shared."""
    refuse_windows(fields)
    shared = fields.get_integer("shared_expert_intermediate_size", maximum=MAX_EXPERT_SIZE)
    return replace(
        _base_traits(fields, layers),
        attention_bias=fields.get_boolean("qkv_bias", True),
        experts=replace(
            qwen_experts(fields, layers),
            shared_intermediate_size=shared,
            shared="shared_expert",
            shared_gate="shared_expert_gate",
        ),
    )


def qwen3_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen3-MoE: experts."""
    biased = fields.get_boolean("attention_bias", False)
    sliding = fields.get_boolean("use_sliding_window", False)
    return replace(
        _base_traits(fields, layers),
        windows=parse_uniform_windows(fields, layers, 4096) if sliding else (0,) * layers,
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
        experts=qwen_experts(fields, layers),
    )


def gpt_oss(fields: ConfigFields, layers: int) -> FamilyTraits:
    """gpt-oss: sinks, windows in every other layer, biases everywhere."""
    _activation(fields, "hidden_act", "silu")
    biased = fields.get_boolean("attention_bias", True)
    alpha = fields.get_number("swiglu_alpha", SWIGLU_ALPHA)
    if alpha != SWIGLU_ALPHA:
        raise UnsupportedModel(
            f"{fields.where}: swiglu_alpha {alpha} is not supported ({SWIGLU_ALPHA} is)"
        )
    return replace(
        _base_traits(fields, layers, activation="clamped_swiglu"),
        windows=parse_typed_windows(fields, layers, full_every=2),
        sinks=True,
        activation_limit=fields.get_positive("swiglu_limit", 7.0),
        attention_bias=biased,
        output_bias=biased,
        experts=gpt_oss_experts(fields, layers),
    )


def glm(fields: ConfigFields, layers: int) -> FamilyTraits:
    """GLM-4 of 2024: RoPE on interleaved pairs of half of each head."""
    refuse_windows(fields)
    return replace(
        _base_traits(fields, layers, rope=parse_rope(fields, RopeDefaults(allows_partial=True))),
        interleaved_rope=True,
        attention_bias=fields.get_boolean("attention_bias", True),
        merged_gate_up=True,
    )


def glm4(fields: ConfigFields, layers: int) -> FamilyTraits:
    """GLM-4 of 2025: as GLM, with norms after attention and MLP."""
    return replace(glm(fields, layers), norms=_GLM4_NORMS)


def glm4_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """GLM-4.5 to 4.7: half of each head rotated, experts as in DeepSeek-V3."""
    refuse_windows(fields)
    return replace(
        _base_traits(fields, layers, rope=parse_rope(fields, RopeDefaults(allows_partial=True))),
        attention_bias=fields.get_boolean("attention_bias", False),
        qk_norm="each head" if fields.get_boolean("use_qk_norm", False) else "none",
        experts=deepseek_experts(fields, layers),
        unread_layers=_count_draft_layers(fields),
    )


def deepseek_v2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """DeepSeek V2: latent attention."""
    _refuse_other(fields, "scoring_func", "softmax")
    return replace(_latent_traits(fields, layers), experts=deepseek_v2_experts(fields, layers))


def deepseek_v3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """DeepSeek V3, R1, V3.1 and Kimi K2: latent attention."""
    _refuse_other(fields, "scoring_func", "sigmoid")
    _refuse_other(fields, "topk_method", "noaux_tc")
    return replace(
        _latent_traits(fields, layers),
        interleaved_rope=fields.get_boolean("rope_interleave", True),
        experts=deepseek_experts(fields, layers),
        unread_layers=_count_draft_layers(fields),
    )


def _latent_traits(fields: ConfigFields, layers: int) -> FamilyTraits:
    refuse_windows(fields)
    latent = LatentShape(
        rank=fields.get_integer("kv_lora_rank", 512, _MAX_LATENT),
        query_rank=fields.get_optional_integer("q_lora_rank", 1536) or 0,
        rope_dim=fields.get_integer("qk_rope_head_dim", 64, _MAX_LATENT),
        plain_dim=fields.get_integer("qk_nope_head_dim", 128, _MAX_LATENT),
        value_dim=fields.get_integer("v_head_dim", 128, _MAX_LATENT),
        is_split=fields.get_boolean("split_kv_b_proj", False),  # from a GGUF file
    )
    heads = fields.get_integer("num_attention_heads", maximum=_MAX_HEADS)
    biased = fields.get_boolean("attention_bias", False)
    if biased and not latent.query_rank:
        raise UnsupportedModel(f"{fields.where}: attention_bias without q_lora_rank")
    head_dim = latent.rope_dim + latent.rank
    rope = parse_rope(fields)
    scale = (latent.plain_dim + latent.rope_dim) ** -0.5
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
        activation=_activation(fields, "hidden_act", "silu"),
        attention_bias=biased,
        output_bias=biased,
        latent=latent,
        tied_embeddings=fields.get_boolean("tie_word_embeddings", False),
    )


def glm4_moe_lite(fields: ConfigFields, layers: int) -> FamilyTraits:
    """GLM-4.7-Flash: as DeepSeek V3; dense layers are listed."""
    kinds = fields.get_strings("mlp_layer_types")
    made = deepseek_v3(fields, layers)
    if kinds is None or made.experts is None:
        return made
    if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise BrokenModel(
            f"{fields.where}: mlp_layer_types must say dense or sparse for each of {layers} layers"
        )
    dense = frozenset(layer for layer in range(layers) if kinds[layer] == "dense")
    return replace(made, experts=replace(made.experts, dense_layers=dense))


def ernie4_5(fields: ConfigFields, layers: int) -> FamilyTraits:
    """ERNIE 4.5: RoPE on interleaved pairs, optional biases everywhere."""
    biased = fields.get_boolean("use_bias", False)
    return replace(_ernie_traits(fields, layers, head_dim=128), mlp_bias=biased)


def ernie4_5_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """ERNIE 4.5 with experts."""
    if fields.get_boolean("use_bias", False):
        raise UnsupportedModel(f"{fields.where}: use_bias is not supported in this architecture")
    return replace(
        _ernie_traits(fields, layers),
        experts=ernie_experts(fields, layers),
        unread_layers=_count_draft_layers(fields),
    )


def _ernie_traits(fields: ConfigFields, layers: int, head_dim: int | None = None) -> FamilyTraits:
    refuse_windows(fields)
    biased = fields.get_boolean("use_bias", False)
    rope = parse_rope(fields, RopeDefaults(theta=500_000.0))
    return replace(
        _base_traits(fields, layers, head_dim=head_dim, rope=rope),
        interleaved_rope=True,
        attention_bias=biased,
        output_bias=biased,
        tied_embeddings=fields.get_boolean("tie_word_embeddings", True),
    )


def minimax_m2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """MiniMax-M2: query and key norms over all heads, experts with sigmoid scores."""
    refuse_windows(fields)
    _refuse_other(fields, "scoring_func", "sigmoid")
    if any(kind != 1 for kind in fields.get_integers("attn_type_list")):
        raise UnsupportedModel(
            f"{fields.where}: layers with linear attention (attn_type_list) are not supported"
        )
    head_dim = fields.get_integer("head_dim", 128)
    rotary = fields.get_integer("rotary_dim", head_dim)
    defaults = RopeDefaults(theta=5e6, allows_partial=True, partial=rotary / head_dim)
    return replace(
        _base_traits(fields, layers, head_dim=128, rope=parse_rope(fields, defaults)),
        qk_norm="all heads",
        experts=minimax_experts(fields, layers),
    )


def dots1(fields: ConfigFields, layers: int) -> FamilyTraits:
    """dots.llm1: Qwen3's attention, experts as in DeepSeek-V3."""
    window = fields.get_optional_integer("sliding_window", 4096)
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        _base_traits(fields, layers),
        windows=_upper_windows(fields, layers, window, default=62),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
        experts=deepseek_experts(fields, layers),
    )


def hunyuan_dense(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Hunyuan: query and key norms after rotation."""
    refuse_windows(fields)
    if fields.get_boolean("use_cla", False):
        raise UnsupportedModel(f"{fields.where}: use_cla (shared keys and values) is not supported")
    biased = fields.get_boolean("attention_bias", False)
    made = _base_traits(fields, layers)
    return replace(
        made,
        rope=parse_alpha_rope(fields, made.head_dim),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each rotated head",
        qk_norm_names=("query_layernorm", "key_layernorm"),
    )


def hunyuan_moe(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Hunyuan with experts."""
    if fields.get_count("moe_layer_num_skipped", 0):
        raise UnsupportedModel(f"{fields.where}: moe_layer_num_skipped is not supported")
    return replace(hunyuan_dense(fields, layers), experts=hunyuan_experts(fields, layers))


def gemma2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Gemma 2: soft-capped scores and logits."""
    return replace(
        _gemma_traits(fields, layers, parse_rope(fields)),
        windows=parse_typed_windows(fields, layers, full_every=2),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        final_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def gemma3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Text model of Gemma 3. As in transformers, ``attn_logit_softcapping`` has no effect."""
    rope, local_rope = parse_two_ropes(fields, RopeDefaults(theta=1e6), RopeDefaults())
    pattern = fields.get_integer("sliding_window_pattern", 6)
    return replace(
        _gemma_traits(fields, layers, rope),
        windows=parse_typed_windows(fields, layers, full_every=pattern),
        sliding_rope=local_rope,
        final_softcap=_softcap(fields, "final_logit_softcapping", None),
        qk_norm="each head",
    )


def _gemma_traits(fields: ConfigFields, layers: int, rope: RopeConfig) -> FamilyTraits:
    scalar = fields.get_positive("query_pre_attn_scalar", 256)
    activation = _activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        _base_traits(fields, layers, head_dim=256, activation=activation, rope=rope),
        attention_scale=scalar**-0.5,
        embedding_scale=fields.get_integer("hidden_size") ** 0.5,
        attention_bias=biased,
        output_bias=biased,
        norms=_SANDWICH_NORMS,
        norm_offset=1.0,
        tied_embeddings=fields.get_boolean("tie_word_embeddings", True),
    )


def _activation(fields: ConfigFields, name: str, default: str) -> Activation:
    named = fields.get_string(name, default)
    if named not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModel(f"{fields.where}: {name} {named!r} is not supported (only {known})")
    return _ACTIVATIONS[named]


def _refuse_other(fields: ConfigFields, name: str, only: str) -> None:
    """Refuse a string field with another value than ``only``, its default."""
    found = fields.get_string(name, only)
    if found != only:
        raise UnsupportedModel(f"{fields.where}: {name} {found!r} is not supported (only {only})")


def _count_draft_layers(fields: ConfigFields) -> int:
    """Count layers after the last that only foretell tokens (DeepSeek-V3, §2.2)."""
    return fields.get_count("num_nextn_predict_layers", 0, _MAX_DRAFT_LAYERS)


def _softcap(fields: ConfigFields, name: str, default: float | None) -> float:
    bound = fields.get_optional_number(name, default)
    if bound is not None and bound <= 0:
        raise BrokenModel(f"{fields.where}: {name} must be positive or null, not {bound}")
    return bound or 0.0


_FULL, _SLIDING = "full_attention", "sliding_attention"


def parse_uniform_windows(
    fields: ConfigFields, layers: int, default: int | None
) -> tuple[int, ...]:
    """``sliding_window`` for all layers; ``null`` is none, ``default`` applies if absent."""
    return (fields.get_optional_integer("sliding_window", default) or 0,) * layers


def parse_upper_windows(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """``sliding_window`` from layer ``max_window_layers`` on, if ``use_sliding_window``.

    ``layer_types`` takes precedence (Qwen2, Qwen3).
    """
    sliding = fields.get_boolean("use_sliding_window", False)
    window = fields.get_optional_integer("sliding_window", 4096) if sliding else None
    return _upper_windows(fields, layers, window, default=28)


def _upper_windows(
    fields: ConfigFields, layers: int, window: int | None, default: int
) -> tuple[int, ...]:
    listed = fields.get_strings("layer_types")
    if listed is not None:
        return _make_windows(fields, listed, layers, window)
    first = fields.get_number("max_window_layers", default)
    return tuple((window or 0) if layer >= first else 0 for layer in range(layers))


def parse_typed_windows(fields: ConfigFields, layers: int, full_every: int) -> tuple[int, ...]:
    """``sliding_window`` in layers that ``layer_types`` names.

    Without that list, all layers but every ``full_every``-th (Gemma).
    """
    window = fields.get_optional_integer("sliding_window", 4096)
    listed = fields.get_strings("layer_types")
    if listed is None:
        listed = tuple(_SLIDING if layer % full_every else _FULL for layer in range(1, layers + 1))
    return _make_windows(fields, listed, layers, window)


def refuse_windows(fields: ConfigFields) -> None:
    """Refuse a config with windows, for families without them."""
    kinds = fields.get_strings("layer_types") or ()
    kind = next((kind for kind in kinds if kind != _FULL), None)
    if kind is None and fields.get_boolean("use_sliding_window", False):
        kind = _SLIDING
    if kind is not None:
        raise UnsupportedModel(
            f"{fields.where}: layers with {kind!r} are not supported in this architecture"
        )


def _make_windows(
    fields: ConfigFields, kinds: tuple[str, ...], layers: int, window: int | None
) -> tuple[int, ...]:
    where = fields.where
    if len(kinds) != layers:
        raise BrokenModel(f"{where}: layer_types has {len(kinds)} entries for {layers} layers")
    other = next((kind for kind in kinds if kind not in (_FULL, _SLIDING)), None)
    if other is not None:
        raise UnsupportedModel(f"{where}: layers with {other!r} are not supported")
    if window is None and _SLIDING in kinds:
        raise BrokenModel(f"{where}: layer_types has {_SLIDING!r}, but there is no sliding_window")
    return tuple((window or 0) if kind == _SLIDING else 0 for kind in kinds)
