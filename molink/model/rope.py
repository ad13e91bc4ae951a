"""Rotary position settings of a model, in both spellings of ``config.json``.

Up to transformers 4 a config has ``rope_theta`` and ``rope_scaling``; from 5 on it has one
``rope_parameters`` with ``rope_theta`` and ``rope_type`` inside. Either may be found in the wild.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from molink.errors import BrokenModel, UnsupportedModel
from molink.model.fields import Fields

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

DEFAULT_THETA = 10_000.0
#: A longer context, in tokens, is a damaged config (also bounds what is allocated).
MAX_CONTEXT = 2**24


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into rotation angles; fields beyond ``factor`` belong to some kinds only.

    ``original_context`` (tokens) is the length that the model was trained with before scaling: for
    ``dynamic`` always ``max_position_embeddings``, as in transformers.
    """

    theta: float = DEFAULT_THETA
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn; an attention factor of ``None`` is derived from ``factor`` and the two scales
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def reach(self) -> int:
        """Tokens that the scaling makes addressable beyond ``max_position_embeddings``, or 0.

        A ``linear`` or ``llama3`` config already states the scaled length there.
        """
        return int(self.original_context * self.factor) if self.kind in ("dynamic", "yarn") else 0


def parse_rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    """Read the rotary settings of a config; ``where`` names the file in errors.

    Raises:
        UnsupportedModel: a kind of scaling, or a partial rotation, that isn't implemented.
        BrokenModel: a field that is missing, of the wrong type or impossible.
    """
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise BrokenModel(f"{where}: rope settings have to be an object, not {found!r}")
    fields = Fields(found, f"{where}: rope settings")
    outer = Fields(raw, where)
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind not in get_args(RopeKind):
        known = ", ".join(get_args(RopeKind))
        raise UnsupportedModel(f"{where}: rope scaling {kind!r} is not supported (only {known})")
    partial = fields.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"{where}: partial_rotary_factor {partial} is not supported")
    theta = fields.number("rope_theta", outer.number("rope_theta", DEFAULT_THETA))
    if theta <= 1.0:
        raise BrokenModel(f"{where}: rope_theta has to be above 1, not {theta}")
    if kind == "default":
        return RopeConfig(theta=theta)
    return _scaled(cast(RopeKind, kind), theta, fields, outer)


def _scaled(kind: RopeKind, theta: float, fields: Fields, outer: Fields) -> RopeConfig:
    positions = outer.integer("max_position_embeddings", 2048, MAX_CONTEXT)
    if kind == "dynamic":
        original = positions
    else:
        inner = fields.integer("original_max_position_embeddings", positions, MAX_CONTEXT)
        original = outer.integer("original_max_position_embeddings", inner, MAX_CONTEXT)
    # A yarn config without a factor means the ratio of the two lengths.
    implied = positions / original if kind == "yarn" else None
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        factor=fields.number("factor", implied),
        original_context=original,
        low_freq_factor=fields.number("low_freq_factor", 1.0),
        high_freq_factor=fields.number("high_freq_factor", 4.0),
        attention_factor=fields.optional_number("attention_factor"),
        beta_fast=fields.number("beta_fast", 32.0) or 32.0,
        beta_slow=fields.number("beta_slow", 1.0) or 1.0,
        mscale=fields.number("mscale", 0.0),
        mscale_all_dim=fields.number("mscale_all_dim", 0.0),
        truncate=fields.boolean("truncate", True),
    )
    if rope.factor < 1.0:
        raise BrokenModel(f"{fields.where}: factor has to be at least 1, not {rope.factor}")
    if original * rope.factor > MAX_CONTEXT:
        raise BrokenModel(
            f"{fields.where}: factor {rope.factor} makes a context of over {MAX_CONTEXT} tokens"
        )
    if min(rope.beta_fast, rope.beta_slow) <= 0:
        raise BrokenModel(f"{fields.where}: beta_fast and beta_slow have to be positive")
    if kind == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        raise BrokenModel(
            f"{fields.where}: low_freq_factor {rope.low_freq_factor} has to be positive and below "
            f"high_freq_factor {rope.high_freq_factor}"
        )
    return rope
