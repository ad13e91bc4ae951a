"""What sets the families of models apart, told in facts that the decoder can obey.

Supported, by the name in ``architectures``:

- ``LlamaForCausalLM``: Llama 2 and 3.x
- ``GraniteForCausalLM``: Granite 3; factors of embeddings, scores, residuals and logits
- ``SmolLM3ForCausalLM``: some layers without a rope
- ``Olmo2ForCausalLM``: norms after attention and MLP only, and of all queries together
- ``MistralForCausalLM``: sliding windows
- ``Qwen2ForCausalLM`` (also 2.5), ``Qwen3ForCausalLM``: windows in some layers
- ``Phi3ForCausalLM``: Phi-3, Phi-3.5, Phi-4 and Phi-4-mini; merged projections, LongRoPE
- ``MixtralForCausalLM``, ``Qwen2MoeForCausalLM``, ``Qwen3MoeForCausalLM``: experts
- ``GptOssForCausalLM``: attention sinks, a clamped gate, experts in MXFP4
- ``GlmForCausalLM``, ``Glm4ForCausalLM``: half of each head is rotated, in neighbouring pairs
- ``Gemma2ForCausalLM``, ``Gemma3ForCausalLM``: four norms a layer, bounded scores, a rope of
  their own for layers with a window
- the text models of those in :mod:`molink.checkpoint.multimodal`

Everything beyond this module knows facts only, no family. Defaults are those of transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from molink.checkpoint.experts import MAX_INNER, gpt_oss_experts, mixtral_experts, qwen_experts
from molink.checkpoint.fields import Fields
from molink.checkpoint.rope import (
    RopeConfig,
    RopeHabits,
    RopeKind,
    check_rope,
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

Family = Literal[
    "llama",
    "granite",
    "smollm3",
    "mistral",
    "olmo2",
    "qwen2",
    "qwen3",
    "phi3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt_oss",
]

#: ``architectures`` of config.json → family, which is also its ``model_type``.
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "GptOssForCausalLM": "gpt_oss",
}
_GLM = {
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
#: What a config means by saying nothing, where that isn't the same for all families.
DEFAULTS: dict[Family, dict[str, Any]] = {
    "olmo2": {"rms_norm_eps": 1e-5},
    "qwen2_moe": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "glm": _GLM,
    "glm4": _GLM,
    "gpt_oss": {
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
}
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
_MAX_HEAD_DIM = 1024


def parse_traits(family: Family, fields: Fields, layers: int) -> Traits:
    """Read what a config of ``family`` says of its ``layers`` layers.

    Raises:
        UnsupportedModel: a feature that isn't implemented; named.
        BrokenModel: a field that is missing, of the wrong type or impossible; named.
    """
    traits = _FAMILIES[family](fields, layers)
    _check_heads(traits, fields.where)
    for rope in (traits.rope, traits.local_rope):
        if rope is not None:
            check_rope(rope, traits.head_dim, fields.where)
    return traits


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


def _llama(fields: Fields, layers: int) -> Traits:
    refuse_windows(fields)
    biased = fields.boolean("attention_bias", False)
    return replace(
        _base(fields, layers),
        attention_bias=biased,
        output_bias=biased,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _granite(fields: Fields, layers: int) -> Traits:
    """Llama with factors. Logits are divided, all else is multiplied."""
    return replace(
        _llama(fields, layers),
        attention_scale=_factor(fields, "attention_multiplier"),
        embedding_scale=_factor(fields, "embedding_multiplier"),
        residual_scale=_factor(fields, "residual_multiplier"),
        logit_scale=1 / _factor(fields, "logits_scaling"),
    )


def _smollm3(fields: Fields, layers: int) -> Traits:
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
        _llama(fields, layers),
        rope=rope,
        unrotated=frozenset(layer for layer in range(layers) if not rotated[layer]),
        tied=fields.boolean("tie_word_embeddings", True),
    )


def _olmo2(fields: Fields, layers: int) -> Traits:
    refuse_windows(fields)
    biased = fields.boolean("attention_bias", False)
    return replace(
        _base(fields, layers),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="all heads",
        norms=_NORMS_AFTER,
    )


def _mistral(fields: Fields, layers: int) -> Traits:
    return replace(_base(fields, layers), windows=same_window(fields, layers, 4096))


def _qwen2(fields: Fields, layers: int) -> Traits:
    windows = windows_of_upper_layers(fields, layers)
    return replace(_base(fields, layers), windows=windows, attention_bias=True)


def _qwen3(fields: Fields, layers: int) -> Traits:
    biased = fields.boolean("attention_bias", False)
    return replace(
        _base(fields, layers, head_dim=128),
        windows=windows_of_upper_layers(fields, layers),
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
    )


def _phi3(fields: Fields, layers: int) -> Traits:
    aliases: dict[str, RopeKind] = {"su": "longrope", "yarn": "longrope"}
    habits = RopeHabits(aliases=aliases, partial=True, original_context=4096)
    return replace(
        _base(fields, layers, rope=parse_rope(fields, habits)),
        windows=same_window(fields, layers, None),
        merged_qkv=True,
        merged_gate_up=True,
    )


def _mixtral(fields: Fields, layers: int) -> Traits:
    return replace(
        _base(fields, layers, rope=parse_rope(fields, RopeHabits(theta=1e6))),
        windows=same_window(fields, layers, None),
        experts=mixtral_experts(fields, layers),
    )


def _qwen2_moe(fields: Fields, layers: int) -> Traits:
    refuse_windows(fields)
    shared = fields.integer("shared_expert_intermediate_size", maximum=MAX_INNER)
    return replace(
        _base(fields, layers),
        attention_bias=fields.boolean("qkv_bias", True),
        experts=replace(qwen_experts(fields, layers), shared_size=shared),
    )


def _qwen3_moe(fields: Fields, layers: int) -> Traits:
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


def _gpt_oss(fields: Fields, layers: int) -> Traits:
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


def _glm(fields: Fields, layers: int) -> Traits:
    refuse_windows(fields)
    return replace(
        _base(fields, layers, rope=parse_rope(fields, RopeHabits(partial=True))),
        interleaved=True,
        attention_bias=fields.boolean("attention_bias", True),
        merged_gate_up=True,
    )


def _glm4(fields: Fields, layers: int) -> Traits:
    return replace(_glm(fields, layers), norms=_GLM4_NORMS)


def _gemma2(fields: Fields, layers: int) -> Traits:
    return replace(
        _gemma(fields, layers, parse_rope(fields)),
        windows=windows_of_kinds(fields, layers, full_every=2),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        final_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields, layers: int) -> Traits:
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


_FAMILIES: dict[Family, Callable[[Fields, int], Traits]] = {
    "llama": _llama,
    "granite": _granite,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "glm": _glm,
    "glm4": _glm4,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


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


def _check_heads(traits: Traits, where: str) -> None:
    if traits.heads % traits.kv_heads:
        raise BrokenModel(
            f"{where}: num_attention_heads {traits.heads} is no multiple of "
            f"num_key_value_heads {traits.kv_heads}"
        )
    if traits.head_dim % 2 or traits.head_dim > _MAX_HEAD_DIM:
        raise BrokenModel(
            f"{where}: head_dim {traits.head_dim} has to be even and at most {_MAX_HEAD_DIM}"
        )
