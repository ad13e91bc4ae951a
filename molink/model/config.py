"""What ``config.json`` says of a model, as far as the decoder has to know."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from molink.errors import BrokenModel, UnsupportedModel
from molink.model.fields import Fields, read_json
from molink.model.rope import MAX_CONTEXT, RopeConfig, parse_rope

Family = Literal["llama", "qwen2", "qwen3"]
#: Element types of weights that can be computed with, by the names of the wire.
WeightDType = Literal["f32", "bf16", "f16"]

#: ``architectures`` of config.json → family.
ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DTYPES: dict[str, WeightDType] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
#: Extents beyond these are a damaged config, not a model (also bounds what is allocated).
_MAX_LAYERS = 4096
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 1024
_MAX_HIDDEN = 2**17
_MAX_INTERMEDIATE = 2**20
_MAX_VOCABULARY = 2**21


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family.

    ``attention_bias`` is about the q, k and v projections, ``output_bias`` about o. ``context`` is
    the longest sequence in tokens (prompt and answer). ``eos_ids`` ends an answer; those of
    ``generation_config.json`` are included. ``attention_scale`` is the factor of q·k; ``windows``
    has an entry for each layer: how many positions a row attends to, 0 = all before it.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    context: int
    dtype: WeightDType
    eos_ids: tuple[int, ...]
    attention_scale: float
    windows: tuple[int, ...]
    attention_softcap: float = 0.0

    @property
    def groups(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    @classmethod
    def load(cls, folder: Path, fallback_dtype: WeightDType = "f32") -> "ModelConfig":
        """Read ``config.json`` and, if there, ``generation_config.json``.

        ``fallback_dtype`` is for a config that doesn't state the weights' type.

        Raises:
            UnsupportedModel: an architecture or feature that isn't implemented; named.
            BrokenModel: the file is missing, no JSON, or a field is impossible; named.
        """
        path = folder / "config.json"
        config = read_json(path)
        generation = folder / "generation_config.json"
        extra = read_json(generation) if generation.is_file() else {}
        stops = Fields(extra, str(generation)).integers("eos_token_id")
        return _parse(config, str(path), stops, fallback_dtype)


def _parse(
    raw: Mapping[str, Any], where: str, stops: tuple[int, ...], fallback: WeightDType
) -> ModelConfig:
    family = _family(raw, where)
    fields = Fields(raw, where)
    _refuse_unsupported(raw, fields)
    hidden = fields.integer("hidden_size", most=_MAX_HIDDEN)
    heads = fields.integer("num_attention_heads", most=_MAX_HEADS)
    layers = fields.integer("num_hidden_layers", most=_MAX_LAYERS)
    positions = fields.integer("max_position_embeddings", 2048, MAX_CONTEXT)
    rope = parse_rope(raw, where)
    biased = fields.boolean("attention_bias", False)
    qwen3_head_dim = 128 if family == "qwen3" else None
    head_dim = fields.integer("head_dim", qwen3_head_dim or max(1, hidden // heads))
    config = ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", most=_MAX_VOCABULARY),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", most=_MAX_INTERMEDIATE),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tied=fields.boolean("tie_word_embeddings", False),
        attention_bias=True if family == "qwen2" else biased,
        output_bias=False if family == "qwen2" else biased,
        mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
        qk_norm=family == "qwen3",
        context=max(positions, rope.reach),
        dtype=_dtype(fields, fallback),
        eos_ids=tuple(dict.fromkeys(fields.integers("eos_token_id") + stops)),
        attention_scale=head_dim**-0.5,
        windows=(0,) * layers,
    )
    _check_shape(config, where)
    return config


def _family(raw: Mapping[str, Any], where: str) -> Family:
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name is None:
        by_type = {family: architecture for architecture, family in ARCHITECTURES.items()}
        model_type = raw.get("model_type")
        name = by_type.get(cast(Family, model_type)) if isinstance(model_type, str) else None
        name = name or model_type
    if not isinstance(name, str):
        raise BrokenModel(f"{where}: architectures is missing")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{where}: architecture {name} is not supported; these are: {known}")
    return ARCHITECTURES[name]


def _refuse_unsupported(raw: Mapping[str, Any], fields: Fields) -> None:
    where = fields.where
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: hidden_act {activation!r} is not supported (only silu)")
    if raw.get("quantization_config"):
        raise UnsupportedModel(
            f"{where}: quantization_config: weights quantized beforehand are not supported; "
            "take the model's bf16 or fp16 files"
        )
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list):
        raise BrokenModel(f"{where}: layer_types has to be a list, not {repr(kinds)[:80]}")
    sliding = next((kind for kind in kinds if kind != "full_attention"), None)
    if fields.boolean("use_sliding_window", False) and not kinds:
        first = fields.number("max_window_layers", 28)
        sliding = "sliding_attention" if fields.integer("num_hidden_layers") > first else None
    if sliding is not None:
        raise UnsupportedModel(f"{where}: layers with {sliding!r} are not supported")


def _dtype(fields: Fields, fallback: WeightDType) -> WeightDType:
    name = fields.text("dtype", fields.text("torch_dtype", ""))
    if not name:
        return fallback
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise UnsupportedModel(f"{fields.where}: dtype {name!r} is not supported (only {known})")
    return _DTYPES[name]


def _check_shape(config: ModelConfig, where: str) -> None:
    if config.heads % config.kv_heads:
        raise BrokenModel(
            f"{where}: num_attention_heads {config.heads} is no multiple of "
            f"num_key_value_heads {config.kv_heads}"
        )
    if config.head_dim % 2 or config.head_dim > _MAX_HEAD_DIM:
        raise BrokenModel(
            f"{where}: head_dim {config.head_dim} has to be even and at most {_MAX_HEAD_DIM}"
        )
    if config.norm_eps < 0:
        raise BrokenModel(f"{where}: rms_norm_eps {config.norm_eps} has to be positive")
