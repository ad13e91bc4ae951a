"""Facts of a model's files for people: what ``molink show`` prints."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from molink.checkpoint.config import ModelConfig
from molink.checkpoint.config_fields import read_json
from molink.checkpoint.gguf_import import find_gguf, read_gguf_model
from molink.checkpoint.model_folder import scan_tensors
from molink.checkpoint.safetensors_header import TensorSpan
from molink.checkpoint.tensor_layout import stage_tensors
from molink.errors import BrokenModel, MolinkError
from molink.gguf.ggml_types import PACKED_TYPES
from molink.gguf.gguf_file import read_split_gguf
from molink.gguf.tensor_mapping import MappedTensor
from molink.text.chat_template import load_chat_templates

#: ``license`` in the YAML block at the beginning of a model card.
_LICENSE = re.compile(r"\A---\n(?:.*\n)*?license: *['\"]?([^'\"\n]+?)['\"]? *\n")
#: Texts of ``False`` and ``True``.
_CHOICE = ("no", "yes")
#: Longest beginning of a model card that is read, in characters.
_MAX_CARD = 1 << 16


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model's facts; those that its files don't tell are ``None``.

    ``trouble`` says why molink can't read them. ``parameters`` counts tied embeddings once.
    """

    architecture: str | None = None
    parameters: int | None = None
    layers: int | None = None
    context: int | None = None
    quantization: str | None = None
    license: str | None = None
    chat_template: bool | None = None
    images: bool | None = None
    trouble: str | None = None

    def to_json(self) -> dict[str, Any]:
        """All fields; unknown ones are ``null``."""
        return asdict(self)

    def to_rows(self) -> list[tuple[str, str]]:
        """Label and text of each known fact."""
        parameters, context = self.parameters, self.context
        shown = {
            **asdict(self),
            "parameters": None if parameters is None else _format_count(parameters),
            "context": None if context is None else f"{context} tokens",
            "chat_template": None if self.chat_template is None else _CHOICE[self.chat_template],
            "images": None if self.images is None else _CHOICE[self.images],
        }
        return [
            (name.replace("_", " "), str(text)) for name, text in shown.items() if text is not None
        ]


def describe_model(copies: list[Path]) -> ModelSummary:
    """Describe a model by the first of its copies that can be read. Blocks.

    A copy is a folder, a GGUF file, or a repository's folder in the Hugging Face cache.
    """
    trouble = None
    for copy in copies:
        try:
            return _describe_files(_find_files(copy))
        except (MolinkError, OSError) as error:
            trouble = trouble or str(error)
    return ModelSummary(trouble=trouble)


def _find_files(copy: Path) -> Path:
    """Return the folder or GGUF file of a copy."""
    folders = [copy, *sorted(copy.glob("snapshots/*"))]
    for folder in folders:
        if folder.is_file() or (folder / "config.json").is_file():
            return folder
    for folder in folders:
        if (file := find_gguf(folder)) is not None:
            return file
    raise BrokenModel(f"{copy} has no config.json")


def _describe_files(path: Path) -> ModelSummary:
    if path.is_file():
        metadata = read_split_gguf(path).metadata
        config, entries = read_gguf_model(path)
        tensors: Mapping[str, TensorSpan | MappedTensor] = entries
        license = metadata.get_string("general.license", "") or None
        has_template = "tokenizer.chat_template" in metadata
    else:
        config = ModelConfig.load_folder(path)
        tensors = scan_tensors(path) if any(path.glob("*.safetensors")) else {}
        config = config.drop_absent_mtp(tensors) if tensors else config
        license, has_template = _read_license(path), _has_chat_template(path)
    shapes = stage_tensors(config, 0, config.layers)
    return ModelSummary(
        architecture=config.family,
        parameters=sum(map(prod, shapes.values())),
        layers=config.layers,
        context=config.max_model_len,
        quantization=_describe_quantization(config, tensors),
        license=license,
        chat_template=has_template,
        images=config.vision is not None,
    )


def _describe_quantization(
    config: ModelConfig, tensors: Mapping[str, TensorSpan | MappedTensor]
) -> str:
    """Name the form of most of the bytes of the stored ``tensors``."""
    if config.low_bit is not None:
        return f"{config.low_bit.bits} bits ({config.low_bit.layout})"
    if config.quantized != "none":
        return config.quantized
    packed: Counter[str] = Counter()
    plain = Counter({config.dtype.upper(): 0})
    for name, tensor in tensors.items():
        suffix = name.rpartition(".")[2]
        if suffix in PACKED_TYPES:
            packed[suffix] += tensor.nbytes
        else:
            plain[tensor.dtype] += tensor.nbytes
    for kind, _ in packed.most_common(1):
        return kind.upper()
    return f"none ({plain.most_common(1)[0][0].lower()})"


def _read_license(folder: Path) -> str | None:
    card = folder / "README.md"
    if not card.is_file():
        return None
    with card.open(encoding="utf-8", errors="replace") as file:
        found = _LICENSE.match(file.read(_MAX_CARD))
    return None if found is None else found[1]


def _has_chat_template(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    return load_chat_templates(folder, config, {}).default is not None


def _format_count(number: int) -> str:
    """Format a number of parameters: ``5.2 M``, ``8.0 B``."""
    unit, name = (1e9, "B") if number >= 1e9 else (1e6, "M")
    return f"{number / unit:.1f} {name}"
