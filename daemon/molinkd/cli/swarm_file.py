"""Reads ``swarm.toml``, the models to serve. Strict; errors name the line."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, get_args

import msgspec

from molink.checkpoint.model_names import DEMO_MODEL_NAME, short_name
from molink.checkpoint.model_source import (
    expand_short_name,
    find_local_model,
    is_hub_file,
    is_repository,
)
from molink.errors import UsageError
from molink.facts.dtypes import DTypeChoice
from molink.facts.layer_range import parse_layers
from molink.facts.model import AdapterFolders, KVCacheDType, Objective, Quantize
from molink.facts.scalars import Text
from molink.wire.messages.admin import MAX_MODELS, MAX_PINS, ModelEntry
from molink.wire.messages.instructions import MAX_PIPELINES

#: Maximum size of the file, in bytes.
MAX_BYTES = 1 << 16

_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r" - at `\$(?:\.models\[(\d+)\])?(?:\.([A-Za-z_]+))?")
#: A key, or the header of a table in a model.
_KEY = re.compile(r"(?:\[\s*models\s*\.\s*)?[\"']?([A-Za-z0-9_-]+)[\"']?\s*[=\]]")
_SYNTAX = re.compile(r" \(at line (\d+), column \d+\)")


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``[[models]]`` section of the file."""

    #: A short name, a Hugging Face name, a folder or GGUF file (relative to the file), or
    #: ``molink-demo``.
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    #: Number of pipelines, if there are enough PCs.
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIPELINES)] = 1
    #: Minimum stages per pipeline, if there are enough PCs; 0 = automatic.
    min_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    objective: Objective = "latency"
    dtype: DTypeChoice = "auto"
    quantize: Quantize = "none"
    kv_cache_dtype: KVCacheDType = "auto"
    #: Micro-batches in flight; 0 = automatic.
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    #: PEFT folders of LoRA adapters by name, relative to the file.
    adapters: AdapterFolders = {}
    #: Names or ids of the only PCs for this model; they serve no other.
    pcs: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_PINS)] = ()
    #: Layers ``A-B`` by name or id of the PC.
    layers: dict[Text, Text] = {}

    @property
    def pinned_pcs(self) -> tuple[str, ...]:
        """The PCs that the section names, in the order of the request's pins."""
        return self.pcs or tuple(self.layers)


class SwarmFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    models: Annotated[tuple[ModelSection, ...], msgspec.Meta(max_length=MAX_MODELS)]
    #: The version of molink that all PCs must run; empty = any.
    molink: Text = ""


class LineIndex:
    """Finds the line of a key for error messages."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        #: Line of each key by model index (-1: top level), and the first line of each model.
        self._keys: dict[tuple[int, str], int] = {}
        self._models: list[int] = []
        for number, line in enumerate(text.splitlines(), 1):
            stripped = line.strip()
            if re.match(r"\[\[\s*models\s*\]\]", stripped):
                self._models.append(number)
            found = re.match(
                r"(?:\[\s*models\s*\.\s*)?[\"']?([A-Za-z0-9_-]+)[\"']?\s*[=\]]", stripped
            )
            if found is not None:
                self._keys.setdefault((len(self._models) - 1, found[1]), number)

    def find_line(self, model: int = -1, key: str = "") -> int:
        """Return the line of a key, or of its model."""
        begin = self._models[model] if 0 <= model < len(self._models) else 1
        return self._keys.get((model, key), self._keys.get((-1, "models"), begin))

    def first_key(self, model: int, *keys: str) -> str:
        """Return the first of ``keys`` that is set; empty if none is."""
        return next((key for key in keys if (model, key) in self._keys), "")

    def error_at(self, why: str, model: int = -1, key: str = "", line: int = 0) -> UsageError:
        """Return an error that names the line."""
        return UsageError(f"{self._path}, line {line or self.find_line(model, key)}: {why}")


def read_swarm_file(path: Path) -> tuple[SwarmFile, LineIndex]:
    """Read and validate a file.

    Raises:
        UsageError: it can't be read or is invalid; names the line.
    """
    try:
        raw = path.read_bytes()
        text = raw[:MAX_BYTES].decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} can't be read: {error}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path} is longer than {MAX_BYTES} bytes: is it the right file?")
    lines = LineIndex(path, text)
    try:
        found = msgspec.convert(tomllib.loads(text), SwarmFile)
    except tomllib.TOMLDecodeError as error:
        at = _SYNTAX.search(str(error))
        why = f"invalid TOML: {_SYNTAX.sub('', str(error))}"
        raise lines.error_at(why, line=int(at[1]) if at else len(text.splitlines())) from None
    except msgspec.ValidationError as error:
        raise _explain_error(str(error), lines) from None
    _check_file(found, lines)
    return found, lines


def model_entries(file: SwarmFile, lines: LineIndex, folder: Path) -> tuple[ModelEntry, ...]:
    """Convert the models for the daemon; relative paths start at ``folder``.

    Raises:
        UsageError: a model is neither a path nor a Hugging Face name.
    """
    return tuple(
        ModelEntry(
            source=_resolve_source(one.model, index, lines, folder),
            replicas=one.replicas,
            min_stages=one.min_stages,
            objective=one.objective,
            dtype=one.dtype,
            quantize=one.quantize,
            kv_cache_dtype=one.kv_cache_dtype,
            micro_batches=one.micro_batches,
            adapters={
                name: str((folder / Path(place).expanduser()).absolute())
                for name, place in one.adapters.items()
            },
            pins=tuple((pc, one.layers.get(pc, "auto")) for pc in one.pinned_pcs),
        )
        for index, one in enumerate(file.models)
    )


def served_name(model: str) -> str:
    """Return the name under which a swarm serves a model of the file."""
    if model == DEMO_MODEL_NAME:
        return model
    return short_name(expand_short_name(model.rstrip("/\\").replace("\\", "/")))


def _resolve_source(model: str, index: int, lines: LineIndex, folder: Path) -> str:
    found = (
        None
        if model == DEMO_MODEL_NAME
        else find_local_model(str(folder / Path(model).expanduser()))
    )
    if found is not None:
        return str(found)
    source = expand_short_name(model)
    if source != DEMO_MODEL_NAME and not is_repository(source) and not is_hub_file(source):
        why = (
            f"{model} is not a folder, a GGUF file, {DEMO_MODEL_NAME}, a short name "
            "(`molink search`) or a Hugging Face name"
        )
        raise lines.error_at(f"{why} (OWNER/NAME)", index, "model")
    return source


def _explain_error(text: str, lines: LineIndex) -> UsageError:
    """Turn a msgspec error into one with line and alternatives."""
    path = _PATH.search(text)
    model = int(path[1]) if path and path[1] else -1
    key = path[2] or "" if path else ""
    why = text.partition(" - at `")[0]
    unknown, missing = _UNKNOWN.search(text), _MISSING.search(text)
    table = ModelSection if model >= 0 else SwarmFile
    if unknown:
        key = unknown[1]
        why = f"unknown key {key}; available: {', '.join(table.__struct_fields__)}"
    elif missing:
        why = f"{missing[1]} is missing"
    elif key:
        why = f"{key}: {why[:1].lower()}{why[1:]}"
        choices = get_args(table.__annotations__[key]) if "enum" in why else ()
        why += f". Choices: {', '.join(choices)}" if choices else ""
    return lines.error_at(why, model, key)


def _check_file(file: SwarmFile, lines: LineIndex) -> None:
    if not file.models:
        raise lines.error_at("no models; to serve none, use `molink stop`")
    seen: dict[str, int] = {}
    for index, one in enumerate(file.models):
        name = served_name(one.model)
        if seen.setdefault(name, index) != index:
            raise lines.error_at(f"duplicate model {name}", index, "model")
        if len(set(one.pcs)) < len(one.pcs):
            raise lines.error_at("a PC is pinned twice", index, "pcs")
        if one.replicas > 1 and one.layers:
            why = f"layers can't be assigned with {one.replicas} replicas; use one replica"
            raise lines.error_at(why, index, "layers")
        for pc, layers in one.layers.items():
            if parse_layers(layers) is None:
                why = f"layers of {pc} must be A-B, such as 1-12, not {layers}"
                raise lines.error_at(why, index, "layers")
            if one.pcs and pc not in one.pcs:
                raise lines.error_at(f"{pc} has layers but is not in pcs", index, "layers")
    _check_adapter_names(file, lines, {*seen})
    pipelines = sum(one.replicas for one in file.models)
    if pipelines > MAX_PIPELINES:
        why = f"{pipelines} pipelines including replicas; a swarm can have {MAX_PIPELINES}"
        raise lines.error_at(f"{why} at most", len(file.models) - 1, "replicas")


def _check_adapter_names(file: SwarmFile, lines: LineIndex, names: set[str]) -> None:
    """Check that no adapter has the name of one of the models ``names``, or of another adapter."""
    for index, one in enumerate(file.models):
        for adapter in one.adapters:
            if adapter in names:
                why = f"adapter {adapter} has the name of a model or of another adapter"
                raise lines.error_at(why, index, "adapters")
            names.add(adapter)
