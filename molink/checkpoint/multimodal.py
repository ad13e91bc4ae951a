"""Folders of models that see images too: molink serves their text model, as one without eyes.

Their ``config.json`` has the text model's fields in ``extract_text_config``. Their tensors have
names of their own, which come in two spellings: those of the text model begin with
``language_model.``, or from transformers 4.52 on with ``model.language_model.``; all others belong
to what sees.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from molink.checkpoint.config_fields import ConfigFields
from molink.errors import BrokenModel

#: ``architectures`` of such models → ``model_type`` of their text model, where they don't say.
TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Mistral3ForConditionalGeneration": "mistral",
}
#: What stands beside ``text_config`` and is about the text model, or about all of the model.
_OUTER_FIELDS = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
#: How names in a file begin → how the text model's own names do.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_VISION_PREFIXES = tuple(
    f"{outer}{part}."
    for outer in ("", "model.")
    for part in ("vision_tower", "vision_model", "multi_modal_projector")
)

T = TypeVar("T")


def extract_text_config(raw: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """What the config of the text model alone would be; ``None`` where ``raw`` is no other one's.

    Raises:
        BrokenModel: there is no ``extract_text_config``, though there should be.
    """
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    family = TEXT_MODELS.get(name) if isinstance(name, str) else None
    if family is None:
        return None
    inner = ConfigFields(raw, where).get_object("text_config")
    if not inner:
        raise BrokenModel(f"{where}: text_config is missing")
    outer = {key: raw[key] for key in _OUTER_FIELDS if raw.get(key) is not None}
    return {"model_type": family, **inner, **outer, "architectures": None}


def extract_text_tensors(found: Mapping[str, T], where: str) -> dict[str, T]:
    """Tensors by the names of a text model; of other models these are the names they have.

    What belongs to images is left out.

    Raises:
        BrokenModel: two of them have one name then.
    """
    named: dict[str, T] = {}
    for name, tensor in found.items():
        if name.startswith(_VISION_PREFIXES):
            continue
        ours = _text_name(name)
        if ours in named:
            raise BrokenModel(f"{where}: tensor {ours} is there under two names")
        named[ours] = tensor
    return named


def _text_name(name: str) -> str:
    for begin, ours in _TEXT_PREFIXES.items():
        if name.startswith(begin):
            return ours + name.removeprefix(begin)
    return name
