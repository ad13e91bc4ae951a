"""Parses fields that configs of many families share.

Defaults are those of transformers. All functions raise ``UnsupportedModel`` for what is not
implemented, and ``BrokenModel`` for missing or invalid fields; both name the field.

A sliding window of W covers a row and the W - 1 rows before it; 0 means no window.
"""

from dataclasses import replace

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.rope import RopeConfig, parse_rope
from molink.checkpoint.traits import Activation, FamilyTraits, MtpShape
from molink.errors import BrokenModel, UnsupportedModel

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
#: Activations of MLPs without gates.
_PLAIN_ACTIVATIONS: dict[str, Activation] = {"relu2": "relu2"}
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
#: Limits for damaged configs.
MAX_HEADS = 4096
_MAX_DRAFT_LAYERS = 64


def base_traits(
    fields: ConfigFields,
    layers: int,
    *,
    head_dim: int | None = None,
    activation: Activation | None = None,
    rope: RopeConfig | None = None,
) -> FamilyTraits:
    """Parse traits that all families share. ``head_dim`` defaults to hidden size over heads."""
    heads = fields.get_integer("num_attention_heads", maximum=MAX_HEADS)
    share = max(1, fields.get_integer("hidden_size") // heads)
    head_dim = fields.get_integer("head_dim", head_dim or share)
    return FamilyTraits(
        heads=heads,
        kv_heads=fields.get_integer("num_key_value_heads", heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        windows=(0,) * layers,
        rope=rope or parse_rope(fields),
        activation=activation or parse_activation(fields, "hidden_act", "silu"),
        tied_embeddings=fields.get_boolean("tie_word_embeddings", False),
    )


def parse_activation(
    fields: ConfigFields, name: str, default: str, *, is_gated: bool = True
) -> Activation:
    """Parse the MLP's activation from field ``name``."""
    found = _ACTIVATIONS if is_gated else _PLAIN_ACTIVATIONS
    named = fields.get_string(name, default)
    if named not in found:
        known = ", ".join(found)
        raise UnsupportedModel(f"{fields.where}: {name} {named!r} is not supported (only {known})")
    return found[named]


def refuse_other(fields: ConfigFields, name: str, only: str) -> None:
    """Refuse a string field with another value than ``only``, its default."""
    found = fields.get_string(name, only)
    if found != only:
        raise UnsupportedModel(f"{fields.where}: {name} {found!r} is not supported (only {only})")


def count_draft_layers(fields: ConfigFields) -> int:
    """Count modules for multi-token prediction."""
    return fields.get_count("num_nextn_predict_layers", 0, _MAX_DRAFT_LAYERS)


def add_mtp(traits: FamilyTraits, fields: ConfigFields) -> FamilyTraits:
    """Add MTP modules that follow the last layer, as in DeepSeek-V3."""
    count = count_draft_layers(fields)
    mtp = MtpShape(prefix=f"model.layers.{len(traits.windows)}.") if count else None
    return replace(traits, draft_layers=count, mtp=mtp)


def add_qwen_mtp(traits: FamilyTraits, fields: ConfigFields) -> FamilyTraits:
    """Add the MTP module of Qwen3-Next and Qwen3.5, which configs need not mention.

    One with an embedding of its own is not used.
    """
    mtp = MtpShape(
        prefix="mtp.",
        layer="layers.0.",
        count_field="mtp_num_hidden_layers",
        token_norm="pre_fc_norm_embedding",
        row_norm="pre_fc_norm_hidden",
        projection="fc",
        output_norm="norm",
    )
    count = fields.get_count(mtp.count_field, 1, _MAX_DRAFT_LAYERS)
    is_used = count and not fields.get_boolean("mtp_use_dedicated_embeddings", False)
    return replace(traits, draft_layers=count, mtp=mtp if is_used else None)


def parse_softcap(fields: ConfigFields, name: str, default: float | None) -> float:
    """Parse the number that bounds scores or logits: ``default`` if absent, 0 if ``null``."""
    bound = fields.get_optional_number(name, default)
    if bound is not None and bound <= 0:
        raise BrokenModel(f"{fields.where}: {name} must be positive or null, not {bound}")
    return bound or 0.0


def parse_uniform_windows(
    fields: ConfigFields, layers: int, default: int | None
) -> tuple[int, ...]:
    """Apply ``sliding_window`` to all layers; ``null`` means none, absence ``default``."""
    return (fields.get_optional_integer("sliding_window", default) or 0,) * layers


def parse_upper_windows(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """``sliding_window`` from layer ``max_window_layers`` on, if ``use_sliding_window``.

    ``layer_types`` takes precedence (Qwen2, Qwen3).
    """
    sliding = fields.get_boolean("use_sliding_window", False)
    window = fields.get_optional_integer("sliding_window", 4096) if sliding else None
    return parse_windows_from(fields, layers, window, default=28)


def parse_windows_from(
    fields: ConfigFields, layers: int, window: int | None, default: int
) -> tuple[int, ...]:
    """``window`` from layer ``max_window_layers`` on, or in layers that ``layer_types`` names."""
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


def parse_chunks(fields: ConfigFields, layers: int, unrotated: frozenset[int]) -> tuple[int, ...]:
    """``attention_chunk_size`` in layers that ``layer_types`` names; without that list, in those
    with RoPE (Llama 4)."""
    chunk = fields.get_optional_integer("attention_chunk_size", 8192)
    listed = fields.get_strings("layer_types")
    if listed is None:
        listed = tuple(_FULL if layer in unrotated else _CHUNKED for layer in range(layers))
    return _make_windows(fields, listed, layers, chunk, (_CHUNKED, "attention_chunk_size"))


def parse_unrotated_layers(fields: ConfigFields, layers: int) -> frozenset[int]:
    """Layers without RoPE: those whose ``no_rope_layers`` is 0, or each 4th."""
    interval = fields.get_integer("no_rope_layer_interval", 4)
    rotated = fields.get_integers("no_rope_layers") or tuple(
        int((layer + 1) % interval != 0) for layer in range(layers)
    )
    if len(rotated) < layers:
        raise BrokenModel(
            f"{fields.where}: no_rope_layers has {len(rotated)} entries for {layers} layers"
        )
    return frozenset(layer for layer in range(layers) if not rotated[layer])


def refuse_windows(fields: ConfigFields, only: str = _FULL) -> None:
    """Refuse a config with windows, for families whose layers are all of kind ``only``."""
    kinds = fields.get_strings("layer_types") or ()
    kind = next((kind for kind in kinds if kind != only), None)
    if kind is None and fields.get_boolean("use_sliding_window", False):
        kind = _SLIDING
    if kind is not None:
        raise UnsupportedModel(
            f"{fields.where}: layers with {kind!r} are not supported in this architecture"
        )


def _make_windows(
    fields: ConfigFields,
    kinds: tuple[str, ...],
    layers: int,
    window: int | None,
    named: tuple[str, str] = (_SLIDING, "sliding_window"),
) -> tuple[int, ...]:
    """Apply ``window`` to layers whose kind is the first of ``named``; the second is its field."""
    where, (windowed, field) = fields.where, named
    if len(kinds) != layers:
        raise BrokenModel(f"{where}: layer_types has {len(kinds)} entries for {layers} layers")
    other = next((kind for kind in kinds if kind not in (_FULL, windowed)), None)
    if other is not None:
        raise UnsupportedModel(f"{where}: layers with {other!r} are not supported")
    if window is None and windowed in kinds:
        raise BrokenModel(f"{where}: layer_types has {windowed!r}, but there is no {field}")
    return tuple((window or 0) if kind == windowed else 0 for kind in kinds)
