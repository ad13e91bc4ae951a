"""Parses the fields of ``config.json`` that the decoder needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, cast

from molink.checkpoint.adapters import Adapter, read_adapters
from molink.checkpoint.config_fields import ConfigFields, read_json
from molink.checkpoint.families import (
    ARCHITECTURES,
    CONFIG_DEFAULTS,
    CONFIG_NAMES,
    Family,
    parse_traits,
)
from molink.checkpoint.image_rules import read_image_rules
from molink.checkpoint.low_bit import LowBitScheme, parse_low_bit
from molink.checkpoint.model_task import GENERATE, ModelTask, read_task
from molink.checkpoint.multimodal import (
    FLAT_MODELS,
    TEXT_MODELS,
    UNREAD_TOWER,
    extract_text_config,
    is_vision_listed,
)
from molink.checkpoint.prequantized import parse_quantized
from molink.checkpoint.rope import MAX_MODEL_LEN, RopeConfig
from molink.checkpoint.traits import FamilyTraits
from molink.checkpoint.vision import VisionConfig
from molink.checkpoint.vision_towers import parse_vision
from molink.errors import BrokenModel, UnsupportedModel
from molink.facts.dtypes import WeightDType
from molink.facts.model import Quantize

#: Supported compute types of weights, by their Hugging Face name.

_DTYPES: dict[str, WeightDType] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
#: Names of the epsilon of norms.
_NORM_EPS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
#: Larger extents mean a damaged config; the limits also bound allocations.
_MAX_LAYERS = 4096
_MAX_HIDDEN = 2**17
_MAX_INTERMEDIATE = 2**20
_MAX_VOCABULARY = 2**21


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(FamilyTraits):
    """A model's traits, size and stop tokens.

    ``max_model_len`` counts prompt and answer tokens. ``eos_ids`` includes those of
    ``generation_config.json``. ``quantized`` is the checkpoint's quantization where a stage keeps
    it, ``low_bit`` where a stage unpacks it. ``is_multimodal`` marks a model that takes more than
    text; ``vision`` is its tower, ``None`` if it is served as its text model. ``notes`` tell users
    what is not supported. ``task`` is what the model is made for. ``adapters`` are those of its
    folder.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    layers: int
    intermediate_size: int
    norm_eps: float
    max_model_len: int
    dtype: WeightDType
    eos_ids: tuple[int, ...]
    quantized: Quantize = "none"
    is_multimodal: bool = False
    vision: VisionConfig | None = None
    low_bit: LowBitScheme | None = None
    notes: tuple[str, ...] = ()
    task: ModelTask = GENERATE
    adapters: tuple[Adapter, ...] = ()

    @property
    def has_output_head(self) -> bool:
        """Whether rows become logits; an embedding model's last stage returns normed rows."""
        return self.task.name != "embed"

    @property
    def sees_whole_images(self) -> bool:
        """Whether an image's rows attend to the whole image, which must then lie in one step."""
        return self.vision is not None and self.vision.whole_images

    @property
    def first_layers(self) -> int:
        """Minimum number of layers of the first stage: those after which image rows are added."""
        return 1 if self.vision is None else max(1, len(self.vision.deepstack))

    @property
    def is_text_only(self) -> bool:
        """Whether it is a multimodal model of which only the text model is served."""
        return self.is_multimodal and self.vision is None

    def drop_absent_mtp(self, names: Iterable[str]) -> "ModelConfig":
        """Return the config without ``mtp`` if the checkpoint's tensors ``names`` lack it.

        Many checkpoints leave out the MTP layers that their configs mention.
        """
        absent = self.mtp is not None and not self.mtp.is_stored(names)
        return replace(self, mtp=None) if absent else self

    @classmethod
    def load_folder(cls, folder: Path, fallback_dtype: WeightDType = "f32") -> "ModelConfig":
        """Read ``config.json`` and, if present, ``generation_config.json`` and adapters.

        ``fallback_dtype`` applies if the config names no type.

        Raises:
            UnsupportedModel: an architecture or feature is not implemented.
            BrokenModel: the file is missing or invalid.
        """
        path = folder / "config.json"
        config = read_json(path)
        generation = folder / "generation_config.json"
        extra = read_json(generation) if generation.is_file() else {}
        stops = ConfigFields(extra, str(generation)).get_integers("eos_token_id")
        made = _build_config(config, str(path), stops, fallback_dtype, read_task(folder))
        vision = None if made.vision is None else read_image_rules(folder, made.vision)
        return replace(made, vision=vision, adapters=read_adapters(folder))

    @classmethod
    def parse_config(cls, config: Mapping[str, Any], where: str) -> "ModelConfig":
        """Parse the content of a ``config.json``; raises as :meth:`load_folder`."""
        return _build_config(config, where, (), "f32")


def _build_config(
    raw: Mapping[str, Any],
    where: str,
    stops: tuple[int, ...],
    fallback: WeightDType,
    task: ModelTask = GENERATE,
) -> ModelConfig:
    inner, outer = extract_text_config(raw, where), raw
    raw = raw if inner is None else inner
    family = _find_family(raw, where, task)
    _refuse_other_attention(raw, where, task)
    names = CONFIG_NAMES.get(family, {})
    named = {names.get(name, name): value for name, value in raw.items()}
    fields = ConfigFields({**CONFIG_DEFAULTS.get(family, {}), **named}, where)
    hidden = fields.get_integer("hidden_size", maximum=_MAX_HIDDEN)
    listed = fields.get_strings("layers_block_type")
    layers = fields.get_integer("num_hidden_layers", len(listed) if listed else None, _MAX_LAYERS)
    positions = fields.get_integer("max_position_embeddings", 2048, MAX_MODEL_LEN)
    eps = _parse_norm_eps(fields)
    traits = parse_traits(family, fields, layers)
    if task.name == "embed":
        traits = replace(traits, tied_embeddings=False)
    context, notes = _parse_max_len(fields, max(positions, traits.rope.scaled_context))
    vision, unseen = _parse_tower(outer, where, hidden, eps, traits.rope)
    if vision is not None and len(vision.deepstack) > layers:
        raise BrokenModel(f"{where}: deepstack_visual_indexes for more than {layers} layers")
    return ModelConfig(
        family=family,
        vocab_size=fields.get_integer("vocab_size", maximum=_MAX_VOCABULARY),
        hidden_size=hidden,
        layers=layers,
        intermediate_size=_parse_intermediate_size(fields),
        norm_eps=eps,
        max_model_len=context,
        dtype=_parse_dtype(fields, fallback),
        eos_ids=tuple(dict.fromkeys(fields.get_integers("eos_token_id") + stops)),
        quantized=parse_quantized(raw, where),
        is_multimodal=inner is not None or UNREAD_TOWER in outer,
        vision=vision,
        low_bit=parse_low_bit(raw, where),
        notes=notes + unseen,
        task=task,
        **{field.name: getattr(traits, field.name) for field in dataclass_fields(traits)},
    )


def _parse_tower(
    outer: Mapping[str, Any], where: str, hidden: int, eps: float, rope: RopeConfig
) -> tuple[VisionConfig | None, tuple[str, ...]]:
    """Return the vision tower, and notes about one that is left out."""
    unread = ConfigFields(outer, where).get_string(UNREAD_TOWER, "")
    if unread:
        return None, (f"{where}: images are not supported, as {unread}",)
    try:
        vision = parse_vision(outer, where, hidden, eps)
    except UnsupportedModel as error:
        return None, (f"{error}: images are not supported",)
    if vision is not None and not _has_plain_tower(outer, where, vision):
        return None, (f"{where}: images are not supported, as the tower may be quantized",)
    if vision is not None and vision.rules.layout == "cells" and not rope.axes:
        return None, (f"{where}: images are not supported without mrope_section",)
    return vision, ()


def _has_plain_tower(outer: Mapping[str, Any], where: str, vision: VisionConfig) -> bool:
    """Whether a quantized checkpoint says that its vision tower is not."""
    section = ConfigFields(outer, where).get_object("quantization_config")
    listed: set[str] = set()
    for name in ("modules_to_not_convert", "ignore"):
        modules = section.get(name)
        if isinstance(modules, list):
            listed.update(one for one in modules if isinstance(one, str))
    return not section or all(is_vision_listed(name, listed) for name in vision.projections)


def _parse_norm_eps(fields: ConfigFields) -> float:
    """Parse the epsilon that norms add to a mean square or variance."""
    name = next((one for one in _NORM_EPS if fields.get_value(one) is not None), _NORM_EPS[0])
    eps = fields.get_number(name, 1e-6)
    if eps < 0:
        raise BrokenModel(f"{fields.where}: {name} {eps} must be positive")
    return eps


def _parse_intermediate_size(fields: ConfigFields) -> int:
    """Parse the width of plain MLPs.

    LFM2 may state a width from which the real one, a multiple of a block, is derived. Granite 4
    without experts states only the shared expert's width. Llama 4 states the width of its plain
    MLPs in a field of its own.
    """
    if fields.get_value("num_local_experts") == 0:
        return fields.get_integer("shared_intermediate_size", 1024, _MAX_INTERMEDIATE)
    other = ("block_ff_dim", "intermediate_size_mlp")
    name = next((one for one in other if fields.get_value(one) is not None), "intermediate_size")
    size = fields.get_integer(name, maximum=_MAX_INTERMEDIATE)
    if not fields.get_boolean("block_auto_adjust_ff_dim", False):
        return size
    block = fields.get_integer("block_multiple_of", 256, _MAX_INTERMEDIATE)
    scaled = int(fields.get_positive("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    inner = -(-scaled // block) * block
    return ConfigFields({"intermediate_size": inner}, fields.where).get_integer(
        "intermediate_size", maximum=_MAX_INTERMEDIATE
    )


def _parse_max_len(fields: ConfigFields, context: int) -> tuple[int, tuple[str, ...]]:
    """Return the usable context length, and notes about limits.

    Dual chunk attention (arXiv 2402.17463; Qwen2.5-1M) is full attention up to the trained length,
    and chunked beyond it, which is not implemented.
    """
    dual = fields.get_object("dual_chunk_attention_config")
    if not dual:
        return context, ()
    inner = ConfigFields(dual, f"{fields.where}: dual_chunk_attention_config")
    trained = inner.get_integer("original_max_position_embeddings", maximum=MAX_MODEL_LEN)
    if trained >= context:
        return context, ()
    return trained, (
        f"{inner.where} is not supported: the context is {trained} tokens, without it, instead of "
        f"{context}",
    )


def _refuse_other_attention(raw: Mapping[str, Any], where: str, task: ModelTask) -> None:
    """Refuse bidirectional attention, which some embedding models have."""
    for name, causal in (("use_bidirectional_attention", False), ("is_causal", True)):
        # Gemma 4's value "vision" concerns images only.
        if raw.get(name, causal) not in (causal, None, "vision"):
            raise UnsupportedModel(
                f"{where}: {name} {str(raw[name])[:40]} is not supported: in molink tokens attend "
                "to earlier ones only"
            )
    if task.name == "embed" and raw.get("auto_map"):
        raise UnsupportedModel(
            f"{where}: this embedding model brings code of its own (auto_map), which molink does "
            "not run"
        )


def _find_family(raw: Mapping[str, Any], where: str, task: ModelTask) -> Family:
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name is None:
        by_type = {family: architecture for architecture, family in ARCHITECTURES.items()}
        model_type = raw.get("model_type")
        name = by_type.get(cast(Family, model_type)) if isinstance(model_type, str) else None
        name = name or model_type
    if task.name == "embed" and isinstance(name, str) and name.endswith("Model"):
        name = f"{name.removesuffix('Model')}ForCausalLM"
    if not isinstance(name, str):
        raise BrokenModel(f"{where}: architectures is missing")
    if name not in ARCHITECTURES:
        known = ", ".join((*ARCHITECTURES, *TEXT_MODELS, *FLAT_MODELS))
        raise UnsupportedModel(
            f"{where}: architecture {name} is not supported; supported are: {known}"
        )
    return ARCHITECTURES[name]


def _parse_dtype(fields: ConfigFields, fallback: WeightDType) -> WeightDType:
    name = fields.get_string("dtype", fields.get_string("torch_dtype", ""))
    if not name:
        return fallback
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise UnsupportedModel(f"{fields.where}: dtype {name!r} is not supported (only {known})")
    return _DTYPES[name]
