"""Parses the config of each family without experts into traits that the decoder implements.

See :mod:`molink.checkpoint.trait_fields` for defaults and errors.
"""

from dataclasses import replace

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.recurrent import (
    parse_conv_layers,
    parse_delta_rule,
    parse_falcon_mamba2,
    parse_linear_layers,
    parse_olmo_delta_rule,
    parse_short_conv,
)
from molink.checkpoint.rope import (
    RopeConfig,
    RopeDefaults,
    RopeKind,
    parse_alpha_rope,
    parse_axes,
    parse_query_scaling,
    parse_rope,
    parse_two_ropes,
)
from molink.checkpoint.trait_fields import (
    add_qwen_mtp,
    base_traits,
    count_draft_layers,
    parse_activation,
    parse_softcap,
    parse_typed_windows,
    parse_uniform_windows,
    parse_unrotated_layers,
    parse_upper_windows,
    refuse_other,
    refuse_windows,
)
from molink.checkpoint.traits import (
    FamilyTraits,
    LayerNorms,
    MlpNames,
    MtpShape,
    OutputFactors,
)
from molink.errors import BrokenModel, UnsupportedModel

_SANDWICH_NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_POST_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM4_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def llama(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Llama 2 and 3.x."""
    refuse_windows(fields)
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        base_traits(fields, layers),
        attention_bias=biased,
        output_bias=biased,
        mlp_bias=fields.get_boolean("mlp_bias", False),
    )


def internlm3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """InternLM 3: Llama with ``qkv_bias`` for queries, keys and values."""
    refuse_windows(fields)
    biased = fields.get_boolean("bias", fields.get_boolean("mlp_bias", False))
    queries = fields.get_boolean("attention_bias", False)
    return replace(
        base_traits(fields, layers, head_dim=128),
        attention_bias=fields.get_boolean("qkv_bias", queries),
        output_bias=biased,
        mlp_bias=biased,
    )


def granite(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Llama with factors."""
    return scale_granite(llama(fields, layers), fields)


def scale_granite(made: FamilyTraits, fields: ConfigFields) -> FamilyTraits:
    """Add Granite's factors; logits are divided, everything else is multiplied."""
    return replace(
        made,
        attention_scale=fields.get_positive("attention_multiplier"),
        embedding_scale=fields.get_positive("embedding_multiplier"),
        residual_scale=fields.get_positive("residual_multiplier"),
        logit_scale=1 / fields.get_positive("logits_scaling"),
    )


def seed_oss(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Seed-OSS: biases of queries, keys and values."""
    refuse_windows(fields)
    return replace(
        base_traits(fields, layers, head_dim=128),
        attention_bias=fields.get_boolean("attention_bias", True),
        output_bias=fields.get_boolean("attention_out_bias", False),
        mlp_bias=fields.get_boolean("mlp_bias", False),
    )


def smollm3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Llama with RoPE only in layers whose ``no_rope_layers`` is 1."""
    rope = parse_rope(fields, RopeDefaults(theta=2e6))
    return replace(
        llama(fields, layers),
        rope=rope,
        unrotated_layers=parse_unrotated_layers(fields, layers),
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
        base_traits(fields, layers, rope=rope),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="all heads",
        norms=_POST_NORMS,
    )


def olmo_hybrid(fields: ConfigFields, layers: int) -> FamilyTraits:
    """OLMo Hybrid: OLMo 2 with the gated delta rule, and norms before it, in most layers.

    It has RoPE only if the config states its base.
    """
    stated = fields.get_object("rope_parameters").get("rope_theta", fields.get_value("rope_theta"))
    # The convolution has the same activation.
    refuse_other(fields, "hidden_act", "silu")
    return replace(
        _olmo_traits(fields, layers, parse_rope(fields)),
        unrotated_layers=frozenset(range(layers) if stated is None else ()),
        recurrent=parse_olmo_delta_rule(fields),
        recurrent_layers=parse_linear_layers(fields, layers),
        recurrent_norms=LayerNorms(),
    )


def falcon_h1(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Falcon-H1: attention in parallel to Mamba-2 in each layer, factors everywhere."""
    refuse_other(fields, "hidden_act", "silu")
    queries, outputs = (
        fields.get_positive(f"attention_{part}_multiplier", 1.0) for part in ("in", "out")
    )
    rows = fields.get_positive("ssm_in_multiplier", 1.0)
    gate, down = _parse_factors(fields, "mlp_multipliers", 2)
    biased = fields.get_boolean("attention_bias", False)
    mlp_bias, shape = fields.get_boolean("mlp_bias", False), parse_falcon_mamba2(fields)
    if (biased and (queries, outputs) != (1.0, 1.0)) or (mlp_bias and down != 1.0):
        raise UnsupportedModel(f"{fields.where}: biases beside multipliers are not supported")
    if shape.is_biased and rows != 1.0:
        raise UnsupportedModel(f"{fields.where}: mamba_proj_bias beside ssm_in_multiplier")
    return replace(
        base_traits(fields, layers),
        embedding_scale=fields.get_positive("embedding_multiplier", 1.0),
        logit_scale=fields.get_positive("lm_head_multiplier", 1.0),
        attention_bias=biased,
        output_bias=biased,
        mlp_bias=mlp_bias,
        norms=LayerNorms(before_mlp="pre_ff_layernorm"),
        mlp_names=MlpNames("feed_forward"),
        recurrent=shape,
        recurrent_layers=frozenset(range(layers)),
        parallel_states=True,
        output_factors=OutputFactors(
            heads=(
                queries,
                queries * fields.get_positive("key_multiplier", 1.0),
                queries * outputs,
            ),
            gate_up=(gate, down),
            recurrent=tuple(rows * one for one in _parse_factors(fields, "ssm_multipliers", 5)),
            recurrent_output=fields.get_positive("ssm_out_multiplier", 1.0),
        ),
    )


def _parse_factors(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """Parse a list of ``count`` numbers; all are 1 by default."""
    if fields.get_value(name) is None:
        return (1.0,) * count
    found = fields.get_numbers(name)
    if len(found) != count:
        raise BrokenModel(f"{fields.where}: {name} has {len(found)} entries, not {count}")
    return found


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
        base_traits(fields, layers),
        windows=windows,
        unrotated_layers=frozenset(unrotated),
        qk_norm="each head",
        norms=_POST_NORMS,
    )


def mistral(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Mistral: sliding window in all layers."""
    return replace(base_traits(fields, layers), windows=parse_uniform_windows(fields, layers, 4096))


def ministral(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Ministral of 2024: Mistral with windows in listed layers."""
    if fields.get_strings("layer_types") is None:
        return mistral(fields, layers)
    windows = parse_typed_windows(fields, layers, full_every=1)
    return replace(base_traits(fields, layers), windows=windows)


def ministral3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Ministral 3: queries scaled by position."""
    refuse_windows(fields)
    made = base_traits(fields, layers)
    return replace(
        made,
        windows=parse_uniform_windows(fields, layers, None),
        query_scaling=parse_query_scaling(fields, made.rope),
    )


def qwen2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen2 and 2.5, and the text models of their VL variants: biases, windows in upper layers."""
    rope = parse_rope(fields, RopeDefaults(aliases={"mrope": "default"}))
    traits = base_traits(fields, layers, rope=rope)
    return replace(
        traits,
        rope=replace(rope, axes=parse_axes(fields, traits.head_dim)),
        windows=parse_upper_windows(fields, layers),
        attention_bias=True,
    )


def mimo(fields: ConfigFields, layers: int) -> FamilyTraits:
    """MiMo: Qwen2 with MTP layers of other names."""
    mtp = MtpShape(
        prefix="model.mtp_layers.0.",
        token_norm="token_layernorm",
        row_norm="hidden_layernorm",
        projection="input_proj",
        output_norm="final_layernorm",
        row_first=True,
    )
    count = count_draft_layers(fields)
    return replace(qwen2(fields, layers), draft_layers=count, mtp=mtp if count else None)


def qwen3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen3: query and key norms."""
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        qwen3_rotation(fields, base_traits(fields, layers, head_dim=128)),
        windows=parse_upper_windows(fields, layers),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
    )


def qwen3_rotation(fields: ConfigFields, traits: FamilyTraits) -> FamilyTraits:
    """Return the traits with a rope that rotates image rows as in Qwen3-VL's text models."""
    dims = traits.rope.rotary_dim(traits.head_dim)
    axes = parse_axes(fields, dims, interleaved=True)
    return replace(traits, rope=replace(traits.rope, axes=axes))


def qwen3_5(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Qwen3.5: gated delta rule in most layers."""
    return delta_rule_traits(fields, layers, is_grouped=False)


def delta_rule_traits(fields: ConfigFields, layers: int, *, is_grouped: bool) -> FamilyTraits:
    """Traits that Qwen3-Next and Qwen3.5 share; ``is_grouped`` as in their projections."""
    # The convolution has the same activation.
    refuse_other(fields, "hidden_act", "silu")
    if not fields.get_boolean("attn_output_gate", True):
        raise UnsupportedModel(f"{fields.where}: attn_output_gate false is not supported")
    biased = fields.get_boolean("attention_bias", False)
    rope = parse_rope(fields, RopeDefaults(allows_partial=True, partial=0.25))
    made = replace(
        qwen3_rotation(fields, base_traits(fields, layers, head_dim=256, rope=rope)),
        attention_bias=biased,
        output_bias=biased,
        gated_heads=True,
        qk_norm="each head",
        norm_offset=1.0,
        recurrent=parse_delta_rule(fields, is_grouped=is_grouped),
        recurrent_layers=parse_linear_layers(fields, layers),
    )
    return add_qwen_mtp(made, fields)


def lfm2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """LFM2: short convolutions in most layers."""
    tied = fields.get_boolean("tie_word_embeddings", True)
    return replace(
        base_traits(fields, layers, rope=parse_rope(fields, RopeDefaults(theta=1e6))),
        qk_norm="each head",
        qk_norm_names=("q_layernorm", "k_layernorm"),
        norms=LayerNorms(before_attention="operator_norm", before_mlp="ffn_norm"),
        output_name="out_proj",
        mlp_names=MlpNames("feed_forward", "w1", "w3", "w2"),
        recurrent=parse_short_conv(fields),
        recurrent_layers=parse_conv_layers(fields, layers),
        tied_embeddings=fields.get_boolean("tie_embedding", tied),
    )


def phi3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Phi-3 to Phi-4-mini: merged projections, partial RoPE, LongRoPE."""
    aliases: dict[str, RopeKind] = {"su": "longrope", "yarn": "longrope"}
    defaults = RopeDefaults(aliases=aliases, allows_partial=True, original_context=4096)
    return replace(
        base_traits(fields, layers, rope=parse_rope(fields, defaults)),
        windows=parse_uniform_windows(fields, layers, None),
        merged_qkv=True,
        merged_gate_up=True,
    )


def glm(fields: ConfigFields, layers: int) -> FamilyTraits:
    """GLM-4 of 2024: RoPE on interleaved pairs of half of each head."""
    refuse_windows(fields)
    return replace(
        base_traits(fields, layers, rope=parse_rope(fields, RopeDefaults(allows_partial=True))),
        interleaved_rope=True,
        attention_bias=fields.get_boolean("attention_bias", True),
        merged_gate_up=True,
    )


def glm4(fields: ConfigFields, layers: int) -> FamilyTraits:
    """GLM-4 of 2025: as GLM, with norms after attention and MLP."""
    return replace(glm(fields, layers), norms=_GLM4_NORMS)


def ernie4_5(fields: ConfigFields, layers: int) -> FamilyTraits:
    """ERNIE 4.5: RoPE on interleaved pairs, optional biases everywhere."""
    made = ernie_traits(fields, layers, head_dim=128)
    return replace(made, mlp_bias=made.attention_bias)


def ernie_traits(fields: ConfigFields, layers: int, head_dim: int | None = None) -> FamilyTraits:
    """Traits that ERNIE 4.5 with and without experts share."""
    refuse_windows(fields)
    biased = fields.get_boolean("use_bias", False)
    rope = parse_rope(fields, RopeDefaults(theta=500_000.0))
    return replace(
        base_traits(fields, layers, head_dim=head_dim, rope=rope),
        interleaved_rope=True,
        attention_bias=biased,
        output_bias=biased,
        tied_embeddings=fields.get_boolean("tie_word_embeddings", True),
    )


def hunyuan_dense(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Hunyuan: query and key norms after rotation."""
    refuse_windows(fields)
    if fields.get_boolean("use_cla", False):
        raise UnsupportedModel(f"{fields.where}: use_cla (shared keys and values) is not supported")
    biased = fields.get_boolean("attention_bias", False)
    made = base_traits(fields, layers)
    return replace(
        made,
        rope=parse_alpha_rope(fields, made.head_dim),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each rotated head",
        qk_norm_names=("query_layernorm", "key_layernorm"),
    )


def cohere(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Command R and R+, Aya: attention and MLP in parallel, LayerNorm."""
    refuse_windows(fields)
    normed = fields.get_boolean("use_qk_norm", False)
    return replace(
        _cohere_traits(fields, layers, RopeDefaults(theta=500_000.0)),
        qk_norm="each centered head" if normed else "none",
    )


def cohere2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Command R7B and A: as Command R, with windows; RoPE in their layers only."""
    if fields.get_boolean("use_qk_norm", False):
        raise UnsupportedModel(f"{fields.where}: use_qk_norm is not supported in this architecture")
    pattern = fields.get_integer("sliding_window_pattern", 4)
    windows = parse_typed_windows(fields, layers, full_every=pattern)
    return replace(
        _cohere_traits(fields, layers, RopeDefaults()),
        windows=windows,
        unrotated_layers=frozenset(layer for layer in range(layers) if not windows[layer]),
    )


def _cohere_traits(fields: ConfigFields, layers: int, defaults: RopeDefaults) -> FamilyTraits:
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        base_traits(fields, layers, rope=parse_rope(fields, defaults)),
        interleaved_rope=True,
        attention_bias=biased,
        output_bias=biased,
        norms=LayerNorms(before_mlp=None),
        norm_kind="layer",
        parallel_mlp=True,
        logit_scale=fields.get_positive("logit_scale", 0.0625),
        tied_embeddings=fields.get_boolean("tie_word_embeddings", True),
    )


def gemma2(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Gemma 2: soft-capped scores and logits."""
    return replace(
        _gemma_traits(fields, layers, parse_rope(fields)),
        windows=parse_typed_windows(fields, layers, full_every=2),
        attention_softcap=parse_softcap(fields, "attn_logit_softcapping", 50.0),
        final_softcap=parse_softcap(fields, "final_logit_softcapping", 30.0),
    )


def gemma3(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Text model of Gemma 3. As in transformers, ``attn_logit_softcapping`` has no effect."""
    rope, local_rope = parse_two_ropes(fields, RopeDefaults(theta=1e6), RopeDefaults())
    pattern = fields.get_integer("sliding_window_pattern", 6)
    return replace(
        _gemma_traits(fields, layers, rope),
        windows=parse_typed_windows(fields, layers, full_every=pattern),
        sliding_rope=local_rope,
        final_softcap=parse_softcap(fields, "final_logit_softcapping", None),
        qk_norm="each head",
    )


def _gemma_traits(fields: ConfigFields, layers: int, rope: RopeConfig) -> FamilyTraits:
    scalar = fields.get_positive("query_pre_attn_scalar", 256)
    activation = parse_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    biased = fields.get_boolean("attention_bias", False)
    return replace(
        base_traits(fields, layers, head_dim=256, activation=activation, rope=rope),
        attention_scale=scalar**-0.5,
        embedding_scale=fields.get_integer("hidden_size") ** 0.5,
        attention_bias=biased,
        output_bias=biased,
        norms=_SANDWICH_NORMS,
        norm_offset=1.0,
        tied_embeddings=fields.get_boolean("tie_word_embeddings", True),
    )
