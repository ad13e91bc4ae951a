"""Multimodal models: config and tensor names of their text model and vision tower.

Their ``config.json`` has the text model's fields in ``text_config``. Its tensors are prefixed
``language_model.``, or ``model.language_model.`` from transformers 4.52 on; all others belong to
the vision tower and its connector (:mod:`molink.checkpoint.vision`). Tensors of a bare decoder lack
the prefix ``model.``.
"""

import re
from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any, TypeVar

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.vision import CONNECTOR_PREFIX, TOWER_PREFIX
from molink.errors import BrokenModel

#: ``architectures`` entry → ``model_type`` of the text model if the config does not state it.
TEXT_MODELS = {
    "AyaVisionForConditionalGeneration": "cohere2",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_text",
    "Idefics3ForConditionalGeneration": "llama",
    "Llama4ForConditionalGeneration": "llama4_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "SmolVLMForConditionalGeneration": "llama",
}
#: The same for configs without ``text_config``, whose own fields are the text model's.
FLAT_MODELS = {"Phi4MMForCausalLM": "phi3", "Phi4MultimodalForCausalLM": "phi3"}
#: Defaults of absent fields of text models, where they differ from the family's.
_TEXT_DEFAULTS = {
    name: {"rms_norm_eps": 1e-5}
    for name in ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
} | {
    "Qwen3VLForConditionalGeneration": {"rope_theta": 500_000.0},
    "Qwen3VLMoeForConditionalGeneration": {"rope_theta": 500_000.0, "norm_topk_prob": True},
}
#: ``model_type`` of text models → another one of the same family.
_SAME_TYPES = {
    "gemma4_unified_text": "gemma4_text",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
#: Models whose text model has its fields in ``text_config`` only since transformers 4.52.
_FORMERLY_FLAT = frozenset({"Qwen2_5_VLForConditionalGeneration"})
#: Outer fields that concern the text model.
_OUTER_FIELDS = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
#: Prefix in a file → prefix in the text model.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    # Nemotron, as released and as transformers calls it
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
    # LFM2 and Falcon-H1
    "model.embedding_norm.": "model.norm.",
    "model.final_layernorm.": "model.norm.",
}
#: Nemotron calls every layer ``mixer``; a tensor's name implies the real module.
_MIXER_NAME = re.compile(r"(model\.layers\.\d+)\.mixer\.((\w+)(?:\..+)?)")
_MIXER_MODULES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj"), "mamba"),
}
#: Gemma 4's experts, whose names there are not below the layer's ``mlp``.
_EXPERT_MODULE = re.compile(r"(model\.layers\.\d+)\.(?=(?:router|experts)\.)")
#: Norms of OLMo Hybrid's recurrent layers.
_OLMO_NORMS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
_OLMO_NORM = re.compile(rf"(?<=\.)({'|'.join(_OLMO_NORMS)})(?=\.weight$)")
#: Tensor names of a decoder saved without its outer model, as many embedding models are.
_BARE_NAME = re.compile(r"embed_tokens\.|layers\.\d+\.(?:self_attn|linear_attn|mlp|\w*layernorm)\.")
_BARE_NORM = "norm.weight"
#: Prefixes of towers and connectors; longer ones come first.
_VISION_PREFIXES = {
    f"{outer}{part}.": prefix
    for part, prefix in (
        ("vision_tower.vision_model", TOWER_PREFIX),
        ("vision_tower", TOWER_PREFIX),
        ("vision_model", TOWER_PREFIX),
        ("visual.merger", CONNECTOR_PREFIX),
        ("visual", TOWER_PREFIX),
        ("multi_modal_projector", CONNECTOR_PREFIX),
        ("connector", CONNECTOR_PREFIX),
        # Phi-4-multimodal, Gemma 4
        ("embed_tokens_extend", TOWER_PREFIX),
        ("audio_tower", f"{TOWER_PREFIX}audio_tower."),
        ("embed_vision.embedding_projection", f"{CONNECTOR_PREFIX}embedding_projection."),
        ("embed_vision.multimodal_embedder", CONNECTOR_PREFIX),
        # as saved by transformers, and as released
        ("embed_vision", TOWER_PREFIX),
        ("vision_embedder", TOWER_PREFIX),
        ("embed_audio", f"{CONNECTOR_PREFIX}audio."),
    )
    for outer in ("", "model.")
}
#: Phi-4-multimodal as released: adapters for images and speech, and the weights that they change.
_INNER_ADAPTER = re.compile(r".+\.lora_[AB]\.(?:vision|speech)\.weight")
_ADAPTED_LAYER = ".base_layer."

#: Field of an imported GGUF model's ``config.json``: why its vision tower was left out.
UNREAD_TOWER = "unread_vision_tower"

T = TypeVar("T")


def extract_text_config(raw: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """Return the text model's config; ``None`` if ``raw`` is not multimodal.

    Raises:
        BrokenModel: ``text_config`` is missing.
    """
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name not in TEXT_MODELS:
        flat = FLAT_MODELS.get(name) if isinstance(name, str) else None
        return None if flat is None else {**raw, "model_type": flat, "architectures": None}
    inner = ConfigFields(raw, where).get_object("text_config")
    if not inner and name in _FORMERLY_FLAT:
        inner = {**raw, "model_type": TEXT_MODELS[name]}
    if not inner:
        raise BrokenModel(f"{where}: text_config is missing")
    outer = {key: raw[key] for key in _OUTER_FIELDS if raw.get(key) is not None}
    defaults = {"model_type": TEXT_MODELS[name], **_TEXT_DEFAULTS.get(name, {})}
    made = {**defaults, **inner, **outer, "architectures": None}
    return {**made, "model_type": _SAME_TYPES.get(made["model_type"], made["model_type"])}


def rename_tensors(found: Mapping[str, T], where: str) -> dict[str, T]:
    """Return a file's tensors under molink's names for the text model and the vision tower.

    Raises:
        BrokenModel: two tensors get the same name.
    """
    named: dict[str, T] = {}
    bare = {name for name in found if _BARE_NAME.match(name)}
    if bare and _BARE_NORM in found:
        bare.add(_BARE_NORM)
    for name, tensor in found.items():
        if _INNER_ADAPTER.fullmatch(name):
            continue
        ours = _vision_name(name)
        if ours is None:
            ours = f"model.{name}" if name in bare else _text_name(name)
        if ours in named:
            raise BrokenModel(f"{where}: tensor {ours} exists under two names")
        named[ours] = tensor
    return named


def is_vision_listed(name: str, listed: Collection[str]) -> bool:
    """Whether a list of modules has that of a vision tower, or one around it.

    ``listed`` names are those of files, from the outermost module or from an inner one on.
    """
    for begin, prefix in _VISION_PREFIXES.items():
        if name.startswith(prefix):
            parts = f"{begin}{name.removeprefix(prefix)}".split(".")
            outer = accumulate(parts, lambda one, part: f"{one}.{part}")
            if any(module in listed for module in (*outer, *parts)):
                return True
    return False


def _vision_name(name: str) -> str | None:
    begun = next((begin for begin in _VISION_PREFIXES if name.startswith(begin)), None)
    return None if begun is None else _VISION_PREFIXES[begun] + name.removeprefix(begun)


def _text_name(name: str) -> str:
    name = name.replace(_ADAPTED_LAYER, ".")
    begun = next((begin for begin in _TEXT_PREFIXES if name.startswith(begin)), None)
    if begun is not None:
        name = _TEXT_PREFIXES[begun] + name.removeprefix(begun)
    name = _EXPERT_MODULE.sub(r"\1.mlp.", name)
    name = _OLMO_NORM.sub(lambda found: _OLMO_NORMS[found[1]], name)
    match = _MIXER_NAME.fullmatch(name)
    return f"{match[1]}.{_MIXER_MODULES.get(match[3], 'mlp')}.{match[2]}" if match else name
