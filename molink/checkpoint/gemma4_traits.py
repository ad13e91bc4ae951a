"""Parses the config of Gemma 4 into traits that the decoder implements.

See :mod:`molink.checkpoint.trait_fields` for defaults and errors.
"""

from dataclasses import replace
from typing import Any

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.experts import gemma4_experts
from molink.checkpoint.rope import RopeDefaults, parse_two_ropes
from molink.checkpoint.trait_fields import (
    base_traits,
    parse_activation,
    parse_softcap,
    parse_typed_windows,
)
from molink.checkpoint.traits import FamilyTraits, HeadShape, LayerNorms
from molink.errors import BrokenModel, UnsupportedModel


def gemma4(fields: ConfigFields, layers: int) -> FamilyTraits:
    """Text model of Gemma 4, the larger ones: other heads in layers without windows."""
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if fields.get_count(name, 0):
            raise UnsupportedModel(
                f"{fields.where}: {name} (Gemma 4 E2B and E4B) is not supported: all stages would "
                "need the tokens, or keys and values of others"
            )
    rope, local_rope = parse_two_ropes(fields, RopeDefaults(), RopeDefaults())
    windows = _parse_windows(fields, layers)
    activation = parse_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    made = base_traits(fields, layers, head_dim=256, activation=activation, rope=rope)
    biased = fields.get_boolean("attention_bias", False)
    experts = gemma4_experts(fields, layers)
    return replace(
        made,
        attention_scale=1.0,
        windows=windows,
        full_heads=_parse_full_heads(fields, windows, made.kv_heads),
        full_keys_are_values=fields.get_boolean("attention_k_eq_v", False),
        normed_values=True,
        sliding_rope=local_rope,
        final_softcap=parse_softcap(fields, "final_logit_softcapping", None),
        embedding_scale=fields.get_integer("hidden_size") ** 0.5,
        scaled_layers=True,
        attention_bias=biased,
        output_bias=biased,
        qk_norm="each head",
        norms=LayerNorms(
            after_attention="post_attention_layernorm",
            before_mlp=None if experts else "pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        experts=experts,
        tied_embeddings=fields.get_boolean("tie_word_embeddings", True),
    )


def _parse_windows(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """Parse windows: all layers but every 6th have one by default; the last never has."""
    return (*parse_typed_windows(fields, layers, full_every=6)[:-1], 0)


def _parse_full_heads(fields: ConfigFields, windows: tuple[int, ...], kv_heads: int) -> HeadShape:
    """Parse the heads of layers without a window.

    transformers 5 writes them to ``per_layer_config``; released configs have ``global_head_dim``
    and ``num_global_key_value_heads``.
    """
    listed = fields.get_object("per_layer_config")
    kept = fields.get_boolean("attention_k_eq_v", False)
    wanted: dict[str, Any] = {
        "head_dim": fields.get_integer("global_head_dim", 512),
        "num_key_value_heads": fields.get_optional_integer("num_global_key_value_heads", None)
        if kept
        else None,
    }
    if listed:
        full = {str(layer) for layer, window in enumerate(windows) if not window}
        first = next(iter(listed.values()))
        if set(listed) != full or any(one != first for one in listed.values()):
            raise UnsupportedModel(
                f"{fields.where}: per_layer_config of other layers than those without a window, or "
                "different ones, is not supported"
            )
        if not isinstance(first, dict) or set(first) - set(wanted):
            raise BrokenModel(f"{fields.where}: per_layer_config has unknown fields")
        wanted |= first
    inner = ConfigFields(wanted, fields.where)
    return HeadShape(
        inner.get_optional_integer("num_key_value_heads", None) or kv_heads,
        inner.get_integer("head_dim"),
    )
