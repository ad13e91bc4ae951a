"""Opens and checks a model folder in Hugging Face's layout."""

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from molink.checkpoint.adapters import ADAPTERS_FILE
from molink.checkpoint.config import ModelConfig
from molink.checkpoint.config_fields import read_json
from molink.checkpoint.foreign_formats import (
    explain_missing_weights,
    refuse_foreign_folder,
    refuse_foreign_tensors,
    refuse_unknown_tensors,
)
from molink.checkpoint.image_rules import PREPROCESSOR_FILE, PROCESSOR_FILE
from molink.checkpoint.low_bit import LowBitScheme, can_be_low_bit
from molink.checkpoint.model_task import MODULES_FILE, POOLING_FILE, SCORE_FILE
from molink.checkpoint.multimodal import rename_tensors
from molink.checkpoint.placement_facts import model_facts
from molink.checkpoint.prequantized import required_tensors
from molink.checkpoint.safetensors_header import TensorRequirement, TensorSpan, read_header
from molink.checkpoint.tensor_layout import TensorShapes, stage_tensors, vision_tensors
from molink.checkpoint.vision import CONNECTOR_PREFIX, TOWER_PREFIX
from molink.errors import BrokenModel, ModelNotFound, UnsupportedModel, UsageError
from molink.facts.dtypes import WeightDType
from molink.facts.layer_range import format_layers
from molink.facts.model import ModelFacts
from molink.files import find_path_fault
from molink.gguf.ggml_types import packed_names

#: Reads a tensor's bytes, locally or remotely; returns fewer only at the end of its file.
ReadTensor = Callable[[TensorSpan], bytes]


INDEX_FILE = "model.safetensors.index.json"
REQUIRED_FILES = ("config.json", "tokenizer.json")
#: All files but weights that a peer needs; optional ones may be absent.
METADATA_FILES = (
    *REQUIRED_FILES,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    MODULES_FILE,
    POOLING_FILE,
    SCORE_FILE,
    ADAPTERS_FILE,
)
_VISION_PREFIXES = (TOWER_PREFIX, CONNECTOR_PREFIX)
_WEIGHT_DTYPES: dict[str, WeightDType] = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with a model, or with the tensors of some of its layers.

    ``tensors`` are all tensors in its files, by name.
    """

    path: Path
    config: ModelConfig
    tensors: dict[str, TensorSpan]

    @classmethod
    def open(cls, path: Path, layers: tuple[int, int] | None = None) -> "ModelFolder":
        """Check that a folder can serve layers ``first:last`` (all if ``None``).

        Embedding, final norm and output head are required only if the range touches that end.

        Raises:
            ModelNotFound: no such folder.
            UnsupportedModel: an architecture, feature or weight type is not implemented.
            BrokenModel: a file or tensor is missing, truncated, inconsistent, or unknown to the
                config.
            UsageError: the model has no such layers.
        """
        if not path.is_dir():
            raise ModelNotFound(f"{path} is not a model folder")
        refuse_foreign_folder(path)
        _check_metadata(path)
        folder, shapes = cls._check_folder(path, scan_tensors(path), layers)
        check_low_bit_contents(path, folder.config.low_bit, shapes, folder.tensors)
        return folder

    @classmethod
    def open_remote(
        cls, path: Path, tensors: Mapping[str, TensorSpan], read: ReadTensor | None = None
    ) -> "ModelFolder":
        """Check a model whose weights are elsewhere; raises as :meth:`open`.

        ``path`` holds all other files; ``tensors`` come from the shard headers. Without ``read``,
        contents of tensors are not checked.
        """
        refuse_foreign_folder(path, {span.file for span in tensors.values()})
        _check_metadata(path)
        folder, shapes = cls._check_folder(path, dict(tensors), None)
        if read is not None:
            check_low_bit_contents(path, folder.config.low_bit, shapes, folder.tensors, read)
        return folder

    @classmethod
    def _check_folder(
        cls, path: Path, tensors: dict[str, TensorSpan], layers: tuple[int, int] | None
    ) -> "tuple[ModelFolder, TensorShapes]":
        """Return also the shapes of the required tensors."""
        refuse_foreign_tensors(path, tensors)
        config = ModelConfig.load_folder(path, _find_dtype(tensors)).drop_absent_mtp(tensors)
        tensors = _drop_unread(tensors, config)
        first, last = (0, config.layers) if layers is None else layers
        if not 0 <= first < last <= config.layers:
            given = format_layers((first, last))
            raise UsageError(f"{path} has layers 1-{config.layers}; {given} is out of range")
        if any(0 < border < config.first_layers for border in (first, last)):
            given, whole = format_layers((first, last)), format_layers((0, config.first_layers))
            raise UsageError(
                f"{path}: layers {given} cut layers {whole}, which one stage must hold"
            )
        shapes = stage_tensors(config, first, last)
        wanted = required_tensors(shapes, config.quantized, tensors, config.low_bit)
        _check_tensors(path, tensors, wanted)
        if layers is None:
            _check_mtp_modules(path, config, tensors)
        refuse_unknown_tensors(path, config, tensors)
        return cls(path, config, tensors), shapes

    def stage_tensors(self, first: int, last: int) -> list[str]:
        """Names of the tensors of a stage with layers ``first:last``."""
        shapes = stage_tensors(self.config, first, last)
        config = self.config
        return list(required_tensors(shapes, config.quantized, self.tensors, config.low_bit))

    def placement_facts(self, name: str) -> ModelFacts:
        """Facts for placement; sizes are those of the stored weights."""
        return model_facts(self.config, name, self.tensors)


def _check_metadata(path: Path) -> None:
    for name in REQUIRED_FILES:
        read_json(path / name)


def scan_tensors(path: Path) -> dict[str, TensorSpan]:
    """Tensors of all safetensors files; the index decides between duplicates.

    They have molink's names (:func:`.rename_tensors`); those of a vision tower that is not served
    are left out.

    Raises:
        BrokenModel: no file, or one is truncated or inconsistent.
        UnsupportedModel: it has a vision tower beside an unsupported text model.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise explain_missing_weights(path)
    preferred = read_weight_map(path)
    tensors: dict[str, TensorSpan] = {}
    for file in files:
        for name, span in rename_tensors(read_header(file), str(file)).items():
            known = tensors.get(name)
            if known is None or preferred.get(name) == span.file:
                tensors[name] = span
            elif preferred.get(name) != known.file and known.shape != span.shape:
                raise BrokenModel(f"{path}: tensor {name} differs in {known.file} and {span.file}")
    if any(name.startswith(_VISION_PREFIXES) for name in tensors):
        return _drop_unread(tensors, ModelConfig.load_folder(path))
    return tensors


def read_weight_map(path: Path) -> dict[str, str]:
    """Map tensors to files by the index of a sharded folder; empty without an index."""
    if not (path / INDEX_FILE).is_file():
        return {}
    found: Any = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise BrokenModel(f"{path / INDEX_FILE}: weight_map is not an object of file names")
    for file in set(found.values()):
        if fault := find_path_fault(file):
            raise BrokenModel(f"{path / INDEX_FILE}: weight_map has {file[:200]!a}, which {fault}")
    return rename_tensors(found, str(path / INDEX_FILE))


def _drop_unread(tensors: dict[str, TensorSpan], config: ModelConfig) -> dict[str, TensorSpan]:
    """Drop tensors that the vision tower doesn't need, such as an image classifier's head."""
    known = {stored for name in vision_tensors(config) for stored in (name, *packed_names(name))}
    return {
        name: span
        for name, span in tensors.items()
        if name in known or not name.startswith(_VISION_PREFIXES)
    }


def _find_dtype(tensors: dict[str, TensorSpan]) -> WeightDType:
    for name, span in tensors.items():
        # Scales often have another dtype.
        if span.dtype in _WEIGHT_DTYPES and name.endswith(".weight"):
            return _WEIGHT_DTYPES[span.dtype]
    return "f32"


def _check_tensors(
    path: Path, tensors: dict[str, TensorSpan], wanted: Mapping[str, TensorRequirement]
) -> None:
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise _missing_tensors(path, missing)
    for name, stored in wanted.items():
        span = tensors[name]
        if not stored.accepts_shape(span.shape):
            raise BrokenModel(
                f"{path / span.file}: tensor {name} has shape {list(span.shape)}, "
                f"but config.json demands {list(stored.shape)}"
            )
        if span.dtype not in stored.dtypes:
            raise UnsupportedModel(
                f"{path / span.file}: tensor {name} is {span.dtype}; supported here: "
                f"{', '.join(stored.dtypes)}"
            )


def _check_mtp_modules(path: Path, config: ModelConfig, tensors: Iterable[str]) -> None:
    """Check that a whole model has as many MTP modules as its config says."""
    if config.mtp is None:
        return
    stored = sum(config.mtp.is_stored(tensors, index) for index in range(config.draft_layers))
    if stored < config.draft_layers:
        raise BrokenModel(
            f"{path / 'config.json'}: {config.mtp.count_field} is {config.draft_layers}, but the "
            f"safetensors files have {stored} such layers"
        )


def _missing_tensors(path: Path, names: Iterable[str]) -> BrokenModel:
    first, *others = names
    more = f" and {len(others)} more" if others else ""
    shard = read_weight_map(path).get(first)
    if shard is None:
        return BrokenModel(f"{path}: tensor {first}{more} is in none of the safetensors files")
    reason = "lacks it" if (path / shard).is_file() else "is missing"
    return BrokenModel(f"{path / shard} {reason}: {INDEX_FILE} says it holds {first}{more}")


def check_low_bit_contents(
    path: Path,
    scheme: LowBitScheme | None,
    shapes: TensorShapes,
    tensors: Mapping[str, TensorSpan],
    read: ReadTensor | None = None,
) -> None:
    """Check column orders of the weights in ``shapes``, and that unsupported biases are zero.

    Shapes and types have been checked. Tensors are in the folder ``path`` unless ``read`` is given.

    Raises:
        BrokenModel: a column's group is out of range, or a group has too many columns.
        UnsupportedModel: a bias is not zero.
    """
    if scheme is None:
        return
    read = read or partial(_read_local, path)
    for name, shape in shapes.items():
        if can_be_low_bit(name, shape) and scheme.is_stored(name, tensors):
            _check_order(path, scheme, name, shape[1], tensors, read)
            bias = f"{name.removesuffix('weight')}bias"
            if bias in tensors and bias not in shapes:
                _check_zero(path, tensors[bias], bias, read)


def _check_order(
    path: Path,
    scheme: LowBitScheme,
    name: str,
    width: int,
    tensors: Mapping[str, TensorSpan],
    read: ReadTensor,
) -> None:
    order, groups, columns = (
        scheme.order_name(name),
        scheme.count_groups(width),
        scheme.scale_block[1] or width,
    )
    if not scheme.has_column_order or groups == 1:
        return
    span = tensors[order]
    found = array("i", _read_tensor(path, span, order, read))
    if sys.byteorder == "big":
        found.byteswap()
    if not 0 <= min(found) <= max(found) < groups:
        raise BrokenModel(
            f"{path / span.file}: tensor {order} has groups {min(found)} to {max(found)}, but "
            f"there are scales of {groups} (0 to {groups - 1}): fetch the file again"
        )
    group, most = Counter(found).most_common(1)[0]
    if most > columns:
        raise BrokenModel(
            f"{path / span.file}: tensor {order} gives group {group} {most} columns, where "
            f"config.json says {columns}: fetch the file again"
        )


def _check_zero(path: Path, span: TensorSpan, name: str, read: ReadTensor) -> None:
    if any(_read_tensor(path, span, name, read)):
        raise UnsupportedModel(
            f"{path / span.file}: tensor {name} is a bias that this config.json does not allow"
        )


def _read_tensor(path: Path, span: TensorSpan, name: str, read: ReadTensor) -> bytes:
    try:
        found = read(span)
    except OSError as error:
        raise BrokenModel(f"{path / span.file}: tensor {name} can't be read: {error}") from error
    if len(found) != span.nbytes:
        raise BrokenModel(f"{path / span.file}: tensor {name} is truncated; fetch the file again")
    return found


def _read_local(path: Path, span: TensorSpan) -> bytes:
    with (path / span.file).open("rb") as file:
        file.seek(span.offset)
        return file.read(span.nbytes)
