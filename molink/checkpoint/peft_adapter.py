"""Reads a LoRA adapter in PEFT's layout: ``adapter_config.json``, ``adapter_model.safetensors``.

Accepts only ``A`` and ``B`` of projections that the model has in the same shape. Everything else
that an adapter may change (embeddings, biases, whole modules, DoRA's magnitudes, the base weights)
is refused; the error names it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from molink.checkpoint.adapters import MAX_RANK, MAX_SCALE, AdaptedModule, Adapter
from molink.checkpoint.config import ModelConfig
from molink.checkpoint.config_fields import ConfigFields, read_json
from molink.checkpoint.multimodal import rename_tensors
from molink.checkpoint.safetensors_header import FLOAT_DTYPES, TensorSpan, read_header
from molink.checkpoint.tensor_layout import adaptable_projections
from molink.errors import BrokenModel, ModelNotFound, UnsupportedModel

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
#: Features beyond plain A and B; an adapter that uses one is refused.
_UNSUPPORTED_FIELDS = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "monteclora_config",
)
#: Initializations that keep the base weights; others change them before training.
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
_PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(
    r"model\.layers\.(0|[1-9]\d{0,3})\.([a-z0-9_.]{1,100})\.lora_([AB])\.weight"
)
#: A plain module name as key of a rank pattern, which PEFT reads as a regular expression.
_PLAIN_KEY = re.compile(r"\^?[A-Za-z0-9_.]{1,200}\$?")
_MAX_PATTERNS = 4096
_MAX_TARGETS = 1024

#: Layer index and projection name.
_Place = tuple[int, str]
_Value = TypeVar("_Value", int, float)


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter that fits a model.

    ``matrices`` locates ``A`` and ``B`` in ``file``, by layer and projection.
    """

    adapter: Adapter
    file: Path
    matrices: Mapping[_Place, tuple[TensorSpan, TensorSpan]]

    @classmethod
    def open(cls, folder: Path, name: str, config: ModelConfig) -> "PeftAdapter":
        """Check the adapter in ``folder``, to be called ``name``, for a model.

        Contents of tensors are not checked.

        Raises:
            ModelNotFound: no such folder.
            UnsupportedModel: it changes more than molink can adapt.
            BrokenModel: a file is missing or inconsistent, or the adapter belongs to another model.
        """
        if not folder.is_dir():
            raise ModelNotFound(f"adapter {name}: {folder} is not a folder")
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            if not (folder / file).exists():
                raise BrokenModel(
                    f"adapter {name}: {folder} has no {file}: a PEFT adapter has {CONFIG_FILE} and "
                    f"{WEIGHTS_FILE}"
                )
        factors = _Factors.parse(read_json(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
        path = folder / WEIGHTS_FILE
        matrices = _pair_tensors(path, read_header(path))
        _check_targets(path, factors.targets, matrices)
        found: dict[tuple[str, int, float], list[int]] = {}
        for (layer, module), pair in sorted(matrices.items()):
            rank, scale = factors.find_factors(f"model.layers.{layer}.{module}")
            _check_shapes(path, config, (layer, module), pair, rank)
            found.setdefault((module, rank, scale), []).append(layer)
        modules = tuple(AdaptedModule(*alike, tuple(layers)) for alike, layers in found.items())
        return cls(Adapter(name, modules), path, matrices)


@dataclass(frozen=True, slots=True)
class _Factors:
    """Ranks and alphas of ``adapter_config.json``; ``targets`` are the listed modules, if any."""

    where: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_stabilized: bool
    targets: tuple[str, ...]

    @classmethod
    def parse(cls, raw: dict[str, Any], where: str) -> "_Factors":
        """Read the fields that molink knows.

        Raises:
            UnsupportedModel: a feature is not implemented.
            BrokenModel: a field is invalid.
        """
        fields = ConfigFields(raw, where)
        kind = fields.get_string("peft_type", "LORA")
        if kind != "LORA":
            raise UnsupportedModel(f"{where}: peft_type {kind[:40]!r} is not supported (LORA is)")
        for name in _UNSUPPORTED_FIELDS:
            if raw.get(name):
                raise UnsupportedModel(f"{where}: {name} is not supported")
        if fields.get_string("bias", "none") not in ("none", ""):
            raise UnsupportedModel(f"{where}: bias {str(raw['bias'])[:40]!r} is not supported")
        init = raw.get("init_lora_weights", True)
        if init is not None and init not in _PLAIN_INITS:
            raise UnsupportedModel(
                f"{where}: init_lora_weights {str(init)[:40]!r} changes the base's weights, which "
                "molink serves as they are: convert the adapter to plain LoRA"
            )
        ranks, alphas = (_read_patterns(fields, f"{each}_pattern") for each in ("rank", "alpha"))
        of_ranks, of_alphas = ConfigFields(ranks, where), ConfigFields(alphas, where)
        return cls(
            where=where,
            rank=fields.get_integer("r", 8, MAX_RANK),
            alpha=fields.get_number("lora_alpha", 8),
            ranks={key: of_ranks.get_integer(key, None, MAX_RANK) for key in ranks},
            alphas={key: of_alphas.get_number(key) for key in alphas},
            is_stabilized=fields.get_boolean("use_rslora", False),
            targets=_read_targets(fields),
        )

    def find_factors(self, projection: str) -> tuple[int, float]:
        """Return rank and scale of a projection, given its full name."""
        rank = _match_pattern(self.ranks, projection, self.rank)
        alpha = _match_pattern(self.alphas, projection, self.alpha)
        scale = alpha / (math.sqrt(rank) if self.is_stabilized else rank)
        if not abs(scale) <= MAX_SCALE:
            raise BrokenModel(f"{self.where}: lora_alpha {alpha:g} is too large for rank {rank}")
        return rank, scale


def _read_targets(fields: ConfigFields) -> tuple[str, ...]:
    """Read the listed target modules; none for a regular expression or ``all-linear``."""
    if isinstance(fields.get_value("target_modules"), str):
        return ()
    targets = fields.get_strings("target_modules") or ()
    if len(targets) > _MAX_TARGETS:
        raise BrokenModel(f"{fields.where}: target_modules has {len(targets)} entries")
    return targets


def _read_patterns(fields: ConfigFields, name: str) -> dict[str, Any]:
    """Read a pattern's entries; regular expressions are refused."""
    found = fields.get_object(name)
    if len(found) > _MAX_PATTERNS:
        raise BrokenModel(f"{fields.where}: {name} has {len(found)} entries")
    for key in found:
        if _PLAIN_KEY.fullmatch(key) is None:
            raise UnsupportedModel(
                f"{fields.where}: {name} has {key[:80]!r}, a regular expression; only names of "
                "modules are supported"
            )
    return found


def _match_pattern(patterns: Mapping[str, _Value], projection: str, otherwise: _Value) -> _Value:
    """Return the value of the first pattern that ends ``projection`` at a dot, as in PEFT."""
    for key, value in patterns.items():
        plain = key.removesuffix("$").removeprefix("^")
        if projection == plain or (key[0] != "^" and projection.endswith(f".{plain}")):
            return value
    return otherwise


def _pair_tensors(
    path: Path, tensors: Mapping[str, TensorSpan]
) -> dict[_Place, tuple[TensorSpan, TensorSpan]]:
    """Pair each ``A`` with its ``B``; every tensor must belong to a pair."""
    found: dict[_Place, dict[str, TensorSpan]] = {}
    strays = sorted(name for name in tensors if not name.startswith(_PREFIX))
    if strays:
        raise UnsupportedModel(f"{path}: tensor {strays[0]} is not one of a LoRA adapter of PEFT")
    inner = {name.removeprefix(_PREFIX): span for name, span in tensors.items()}
    for name, span in rename_tensors(inner, str(path)).items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise UnsupportedModel(
                f"{path}: tensor {span.key} is not supported: an adapter may change attention and "
                "MLP projections by lora_A and lora_B only"
            )
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = span
    if not found:
        raise BrokenModel(f"{path}: it has no tensors")
    for (layer, module), pair in found.items():
        if len(pair) < 2:
            lacking = "B" if "A" in pair else "A"
            raise BrokenModel(f"{path}: lora_{lacking} of {module} of layer {layer + 1} is missing")
    return {place: (pair["A"], pair["B"]) for place, pair in found.items()}


def _check_targets(path: Path, targets: tuple[str, ...], matrices: Mapping[_Place, object]) -> None:
    """Check that each listed module has tensors; otherwise the file is incomplete."""
    names = {f"layers.{layer}.{module}" for layer, module in matrices}
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise BrokenModel(
                f"{path}: {CONFIG_FILE} has the target module {target[:80]!r}, of which there are "
                "no tensors"
            )


def _check_shapes(
    path: Path,
    config: ModelConfig,
    place: _Place,
    pair: tuple[TensorSpan, TensorSpan],
    rank: int,
) -> None:
    layer, module = place
    if layer >= config.layers:
        raise BrokenModel(
            f"{path}: the adapter is of another model: it changes layer {layer + 1}, this model "
            f"has {config.layers}"
        )
    known = adaptable_projections(config, layer)
    if module not in known:
        raise UnsupportedModel(
            f"{path}: the adapter changes {module} of layer {layer + 1}; of this model molink "
            f"adapts {', '.join(known) or 'nothing there'}"
        )
    outputs, inputs = known[module]
    for span, shape in zip(pair, ((rank, inputs), (outputs, rank)), strict=True):
        if span.shape != shape:
            raise BrokenModel(
                f"{path}: tensor {span.key} has shape {list(span.shape)}, but this model and rank "
                f"{rank} demand {list(shape)}: the adapter is of another model, or its config is"
            )
        if span.dtype not in FLOAT_DTYPES:
            raise UnsupportedModel(
                f"{path}: tensor {span.key} is {span.dtype}; supported: {', '.join(FLOAT_DTYPES)}"
            )
