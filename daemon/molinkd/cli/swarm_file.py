"""``swarm.toml``: what a swarm is to serve. Read strictly; what is wrong is named with its line."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, get_args

import msgspec

from molink.checkpoint.model_source import (
    DEMO_MODEL_NAME,
    find_local_model,
    is_hub_file,
    is_repository,
    short_name,
)
from molink.errors import UsageError
from molink.facts.dtypes import DTypeChoice
from molink.facts.model import Objective, Quantize
from molink.facts.scalars import Text
from molink.swarm.placement.placement import parse_layers
from molink.wire.messages.admin import MAX_MODELS, MAX_PINS, ModelEntry
from molink.wire.messages.instructions import MAX_PIPELINES

#: Bytes of a file that is looked at.
MAX_BYTES = 1 << 16

_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PATH = re.compile(r" - at `\$(?:\.models\[(\d+)\])?(?:\.([A-Za-z_]+))?")
#: A key, or the header of a table in a model.
_KEY = re.compile(r"(?:\[\s*models\s*\.\s*)?[\"']?([A-Za-z0-9_-]+)[\"']?\s*[=\]]")
_SYNTAX = re.compile(r" \(at line (\d+), column \d+\)")


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``[[models]]`` of the file."""

    #: A name of the Hugging Face hub, a folder or GGUF file (from the file's own folder on), or
    #: ``molink-demo``.
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]
    #: Pipelines that it has, where there are enough PCs.
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIPELINES)] = 1
    #: Stages that each of them has at least, where there are enough PCs; 0 = whatever is best.
    min_stages: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    objective: Objective = "latency"
    dtype: DTypeChoice = "auto"
    quantize: Quantize = "none"
    #: Micro-batches in flight; 0 = as many as pay.
    micro_batches: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    #: Names or ids of the only PCs that it runs on; they run no other model.
    pcs: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_PINS)] = ()
    #: The layers ``A:B`` that a PC holds, by its name or id.
    layers: dict[Text, Text] = {}


class SwarmFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    models: Annotated[tuple[ModelSection, ...], msgspec.Meta(max_length=MAX_MODELS)]
    #: The version of molink that all PCs have to run; empty = any.
    molink: Text = ""


class LineIndex:
    """Where in the text things stand, for who has to mend them."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        #: Line of each key by the index of its model (-1: above all), and of each model's begin.
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
        """The line of a key, or else of its model."""
        begin = self._models[model] if 0 <= model < len(self._models) else 1
        return self._keys.get((model, key), self._keys.get((-1, "models"), begin))

    def first_key(self, model: int, *keys: str) -> str:
        """The first of ``keys`` that stands there; empty if none does."""
        return next((key for key in keys if (model, key) in self._keys), "")

    def error_at(self, why: str, model: int = -1, key: str = "", line: int = 0) -> UsageError:
        """That something is wrong there."""
        return UsageError(f"{self._path}, line {line or self.find_line(model, key)}: {why}")


def read_swarm_file(path: Path) -> tuple[SwarmFile, LineIndex]:
    """What a file says, and where.

    Raises:
        UsageError: it can't be read, or something in it can't be; says in which line, and why.
    """
    try:
        raw = path.read_bytes()
        text = raw[:MAX_BYTES].decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read: {error}") from None
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{path} is longer than {MAX_BYTES} bytes: is it the right file?")
    lines = LineIndex(path, text)
    try:
        found = msgspec.convert(tomllib.loads(text), SwarmFile)
    except tomllib.TOMLDecodeError as error:
        at = _SYNTAX.search(str(error))
        why = f"this is no TOML: {_SYNTAX.sub('', str(error))}"
        raise lines.error_at(why, line=int(at[1]) if at else len(text.splitlines())) from None
    except msgspec.ValidationError as error:
        raise _explain_error(str(error), lines) from None
    _check_file(found, lines)
    return found, lines


def model_entries(file: SwarmFile, lines: LineIndex, folder: Path) -> tuple[ModelEntry, ...]:
    """The models as the daemon is asked for them; folders are looked for in ``folder``.

    Raises:
        UsageError: one is neither a folder nor a name of the hub.
    """
    return tuple(
        ModelEntry(
            source=_resolve_source(one.model, index, lines, folder),
            replicas=one.replicas,
            min_stages=one.min_stages,
            objective=one.objective,
            dtype=one.dtype,
            quantize=one.quantize,
            micro_batches=one.micro_batches,
            pins=tuple((pc, one.layers.get(pc, "auto")) for pc in one.pcs or one.layers),
        )
        for index, one in enumerate(file.models)
    )


def served_name(model: str) -> str:
    """The name under which a swarm serves what a file names."""
    return model if model == DEMO_MODEL_NAME else short_name(model.rstrip("/\\").replace("\\", "/"))


def _resolve_source(model: str, index: int, lines: LineIndex, folder: Path) -> str:
    found = (
        None
        if model == DEMO_MODEL_NAME
        else find_local_model(str(folder / Path(model).expanduser()))
    )
    if found is not None:
        return str(found)
    if model != DEMO_MODEL_NAME and not is_repository(model) and not is_hub_file(model):
        why = (
            f"{model} is no folder and no GGUF file, not {DEMO_MODEL_NAME}, and no name of the "
            "Hugging "
            "Face hub"
        )
        raise lines.error_at(f"{why} (OWNER/NAME)", index, "model")
    return model


def _explain_error(text: str, lines: LineIndex) -> UsageError:
    """What msgspec found, where, and what there is instead."""
    path = _PATH.search(text)
    model = int(path[1]) if path and path[1] else -1
    key = path[2] or "" if path else ""
    why = text.partition(" - at `")[0]
    unknown, missing = _UNKNOWN.search(text), _MISSING.search(text)
    table = ModelSection if model >= 0 else SwarmFile
    if unknown:
        key = unknown[1]
        why = f"{key} is nothing known: there are {', '.join(table.__struct_fields__)}"
    elif missing:
        why = f"{missing[1]} is missing"
    elif key:
        why = f"{key}: {why[:1].lower()}{why[1:]}"
        choices = get_args(table.__annotations__[key]) if "enum" in why else ()
        why += f": it is one of {', '.join(choices)}" if choices else ""
    return lines.error_at(why, model, key)


def _check_file(file: SwarmFile, lines: LineIndex) -> None:
    if not file.models:
        raise lines.error_at("no model is named; `molink stop` has the swarm serve none")
    seen: dict[str, int] = {}
    for index, one in enumerate(file.models):
        name = served_name(one.model)
        if seen.setdefault(name, index) != index:
            raise lines.error_at(f"{name} is named twice", index, "model")
        if len(set(one.pcs)) < len(one.pcs):
            raise lines.error_at("a PC is pinned twice", index, "pcs")
        if one.replicas > 1 and one.layers:
            why = f"of which of the {one.replicas} replicas are these layers? Name them for one"
            raise lines.error_at(why, index, "layers")
        for pc, layers in one.layers.items():
            part = parse_layers(layers)
            if part is None or part[0] >= part[1]:
                raise lines.error_at(
                    f"layers of {pc} are A:B with A < B, not {layers}", index, "layers"
                )
            if one.pcs and pc not in one.pcs:
                raise lines.error_at(f"{pc} has layers, but is none of pcs", index, "layers")
    pipelines = sum(one.replicas for one in file.models)
    if pipelines > MAX_PIPELINES:
        why = f"these are {pipelines} pipelines with all replicas; a swarm has {MAX_PIPELINES}"
        raise lines.error_at(f"{why} at most", len(file.models) - 1, "replicas")
