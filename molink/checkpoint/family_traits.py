"""What a config of each family says, as facts that the decoder can obey.

A function for each family; :mod:`molink.checkpoint.families` knows which is for which. Defaults are
those of transformers. All raise ``UnsupportedModel`` for what is not implemented, ``BrokenModel``
for a field that is missing, of the wrong type or impossible; both name it.
"""

from dataclasses import replace

from molink.checkpoint.experts import MAX_INNER, gpt_oss_experts, mixtral_experts, qwen_experts
from molink.checkpoint.fields import Fields
from molink.checkpoint.rope import (
    RopeConfig,
    RopeHabits,
    RopeKind,
    parse_rope,
    parse_two_ropes,
)
from molink.checkpoint.traits import SWIGLU_ALPHA, Activation, LayerNorms, Traits
from molink.checkpoint.windows import (
    refuse_windows,
    same_window,
    windows_of_kinds,
    windows_of_upper_layers,
)
from molink.errors import BrokenModel, UnsupportedModel

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SANDWICH = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_NORMS_AFTER = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GLM4_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
_MAX_HEADS = 4096


def _base(
    fields: Fields,
    layers: int,
    *,
    head_dim: int | None = None,
    activation: Activation | None = None,
    rope: RopeConfig | None = None,
) -> Traits:
    """What all families have. Without ``head_dim`` its default is the heads' share of a row."""
    heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
    share = max(1, fields.integer("hidden_size") // heads)
    head_dim = fields.integer("head_dim", head_dim or share)
    return Traits(
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        windows=(0,) * layers,
        rope=rope or parse_rope(fields),
        activation=activation or _activation(fields, "hidden_act", "silu"),
        tied=fields.boolean("tie_word_embeddings", False),
    )


def llama(fields: Fields, layers: int) -> Traits:
    """Llama 2 and 3.x."""
    refuse_windows(fields)
    biased = fields.boolean("attention_bias", False)
    return replace(
        _base(fields, layers),
        attention_bias=biased,
        output_bias=biased,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def granite(fields: Fields, layers: int) -> Traits:
    """Llama with factors. Logits are divided, all else is multiplied."""
    return replace(
        llama(fields, layers),
        attention_scale=_factor(fields, "attention_multiplier"),
        embedding_scale=_factor(fields, "embedding_multiplier"),
        residual_scale=_factor(fields, "residual_multiplier"),
        logit_scale=1 / _factor(fields, "logits_scaling"),
    )


def smollm3(fields: Fields, layers: int) -> Traits:
    """Llama with a rope in some layers only: those for which ``no_rope_layers`` is 1."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.integers("no_rope_layers") or tuple(
        int((layer + 1) % interval != 0) for layer in range(layers)
    )
    if len(rotated) < layers:
        raise BrokenModel(
            f"{fields.where}: no_rope_layers has {len(rotated)} entries for {layers} layers"
        )
    rope = parse_rope(fields, RopeHabits(theta=2e6))
    return replace(
        llama(fields, layers),
        rope=rope,
        unrotated=frozenset(layer for layer in range(layers) if not rotated[layer]),
        tied=fields.boolean("tie_word_embeddings", True),
    )


def olmo2(fields: Fields, layers: int) -> Traits:
    """OLMo 2: norms after attention and MLP only."""
    refuse_windows(fields)
    return _olmo(fields, layers, parse_rope(fields))


def olmo3(fields: Fields, layers: int) -> Traits:
    """As OLMo 2 with windows; scaling of the rope is for layers without one."""
    habits = RopeHabits(theta=fields.number("rope_theta", 500_000.0))
    rope, local_rope = parse_two_ropes(fields, habits, habits)
    return replace(
        _olmo(fields, layers, rope),
        windows=windows_of_kinds(fields, layers, full_every=4),
        local_rope=local_rope,
    )


def _olmo(fields: Fields, layers: int, rope: RopeConfig) -> Traits:
    biased = fields.boolean("attention_bias", False)
    return replace(
        _base(fields, layers, rope=rope),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="all heads",
        norms=_NORMS_AFTER,
    )


def mistral(fields: Fields, layers: int) -> Traits:
    """Mistral: a window."""
    return replace(_base(fields, layers), windows=same_window(fields, layers, 4096))


def qwen2(fields: Fields, layers: int) -> Traits:
    """Qwen2 and 2.5: biases, windows in upper layers."""
    windows = windows_of_upper_layers(fields, layers)
    return replace(_base(fields, layers), windows=windows, attention_bias=True)


def qwen3(fields: Fields, layers: int) -> Traits:
    """Qwen3: norms of queries and keys."""
    biased = fields.boolean("attention_bias", False)
    return replace(
        _base(fields, layers, head_dim=128),
        windows=windows_of_upper_layers(fields, layers),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
    )


def phi3(fields: Fields, layers: int) -> Traits:
    """Phi-3 to Phi-4-mini: merged projections, a partial rope, LongRoPE."""
    aliases: dict[str, RopeKind] = {"su": "longrope", "yarn": "longrope"}
    habits = RopeHabits(aliases=aliases, partial=True, original_context=4096)
    return replace(
        _base(fields, layers, rope=parse_rope(fields, habits)),
        windows=same_window(fields, layers, None),
        merged_qkv=True,
        merged_gate_up=True,
    )


def mixtral(fields: Fields, layers: int) -> Traits:
    """Mixtral: experts."""
    return replace(
        _base(fields, layers, rope=parse_rope(fields, RopeHabits(theta=1e6))),
        windows=same_window(fields, layers, None),
        experts=mixtral_experts(fields, layers),
    )


def qwen2_moe(fields: Fields, layers: int) -> Traits:
    """Qwen2-MoE: experts, one of them for all rows."""
    refuse_windows(fields)
    shared = fields.integer("shared_expert_intermediate_size", maximum=MAX_INNER)
    return replace(
        _base(fields, layers),
        attention_bias=fields.boolean("qkv_bias", True),
        experts=replace(qwen_experts(fields, layers), shared_size=shared),
    )


def qwen3_moe(fields: Fields, layers: int) -> Traits:
    """Qwen3-MoE: experts."""
    biased = fields.boolean("attention_bias", False)
    sliding = fields.boolean("use_sliding_window", False)
    return replace(
        _base(fields, layers),
        windows=same_window(fields, layers, 4096) if sliding else (0,) * layers,
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
        experts=qwen_experts(fields, layers),
    )


def gpt_oss(fields: Fields, layers: int) -> Traits:
    """gpt-oss: sinks, windows in every other layer, biases everywhere."""
    _activation(fields, "hidden_act", "silu")
    biased = fields.boolean("attention_bias", True)
    alpha = fields.number("swiglu_alpha", SWIGLU_ALPHA)
    if alpha != SWIGLU_ALPHA:
        raise UnsupportedModel(
            f"{fields.where}: swiglu_alpha {alpha} is not supported ({SWIGLU_ALPHA} is)"
        )
    return replace(
        _base(fields, layers, activation="clamped_swiglu"),
        windows=windows_of_kinds(fields, layers, full_every=2),
        sinks=True,
        activation_limit=_factor(fields, "swiglu_limit", 7.0),
        attention_bias=biased,
        output_bias=biased,
        experts=gpt_oss_experts(fields, layers),
    )


def glm(fields: Fields, layers: int) -> Traits:
    """GLM-4 of 2024: half of each head is rotated, in neighbouring pairs."""
    refuse_windows(fields)
    return replace(
        _base(fields, layers, rope=parse_rope(fields, RopeHabits(partial=True))),
        interleaved=True,
        attention_bias=fields.boolean("attention_bias", True),
        merged_gate_up=True,
    )


def glm4(fields: Fields, layers: int) -> Traits:
    """GLM-4 of 2025: as the one before, with norms after attention and MLP too."""
    return replace(glm(fields, layers), norms=_GLM4_NORMS)


def gemma2(fields: Fields, layers: int) -> Traits:
    """Gemma 2: bounded scores and logits."""
    return replace(
        _gemma(fields, layers, parse_rope(fields)),
        windows=windows_of_kinds(fields, layers, full_every=2),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        final_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def gemma3(fields: Fields, layers: int) -> Traits:
    """Text of Gemma 3. As in transformers, ``attn_logit_softcapping`` does nothing."""
    rope, local_rope = parse_two_ropes(fields, RopeHabits(theta=1e6), RopeHabits())
    pattern = fields.integer("sliding_window_pattern", 6)
    return replace(
        _gemma(fields, layers, rope),
        windows=windows_of_kinds(fields, layers, full_every=pattern),
        local_rope=local_rope,
        final_softcap=_softcap(fields, "final_logit_softcapping", None),
        qk_norm="each head",
    )


def _gemma(fields: Fields, layers: int, rope: RopeConfig) -> Traits:
    if fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedModel(f"{fields.where}: use_bidirectional_attention is not supported")
    scalar = fields.number("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise BrokenModel(f"{fields.where}: query_pre_attn_scalar has to be positive, not {scalar}")
    activation = _activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    biased = fields.boolean("attention_bias", False)
    return replace(
        _base(fields, layers, head_dim=256, activation=activation, rope=rope),
        attention_scale=scalar**-0.5,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        attention_bias=biased,
        output_bias=biased,
        norms=_SANDWICH,
        norm_offset=1.0,
        tied=fields.boolean("tie_word_embeddings", True),
    )


def _activation(fields: Fields, name: str, default: str) -> Activation:
    named = fields.text(name, default)
    if named not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModel(f"{fields.where}: {name} {named!r} is not supported (only {known})")
    return _ACTIVATIONS[named]


def _factor(fields: Fields, name: str, default: float = 1.0) -> float:
    factor = fields.number(name, default)
    if factor <= 0:
        raise BrokenModel(f"{fields.where}: {name} has to be positive, not {factor}")
    return factor


def _softcap(fields: Fields, name: str, default: float | None) -> float:
    bound = fields.optional_number(name, default)
    if bound is not None and bound <= 0:
        raise BrokenModel(f"{fields.where}: {name} has to be positive or null, not {bound}")
    return bound or 0.0
