"""Parses RoPE settings, in both spellings of ``config.json``.

Up to transformers 4 a config has ``rope_theta`` and ``rope_scaling``; from 5 on,
``rope_parameters`` with ``rope_theta`` and ``rope_type``. Where sliding-window layers rotate
differently (Gemma 3), the new spelling has an object per layer type, the old one
``rope_local_base_freq``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from molink.checkpoint.config_fields import ConfigFields
from molink.errors import BrokenModel, UnsupportedModel

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]

DEFAULT_THETA = 10_000.0
#: Tolerance: ``head_dim * partial_rotary_factor`` may be rounded to just below a whole number.
_ROUNDING = 1e-6
#: A longer context, in tokens, means a damaged config; the limit also bounds allocations.
MAX_MODEL_LEN = 2**24


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE parameters; fields after ``factor`` apply to some kinds only.

    ``original_context`` is the trained length in tokens: for ``dynamic`` always
    ``max_position_embeddings``, as in transformers. ``partial_rotary_factor`` is the rotated
    fraction of a head: its first dimensions or, for ``proportional``, the first of each half, with
    the frequencies of a full rotation. ``axes`` has the coordinate that rotates each pair: an
    image's position (0), row (1) or column (2) (M-RoPE, arXiv 2409.12191, §2.1).
    """

    theta: float = DEFAULT_THETA
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn; ``None`` derives the attention factor from ``factor`` and the two scales
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    # longrope: frequency divisors within and beyond the original context
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    axes: tuple[int, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of a head's dimensions that have rotation angles."""
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * self.partial_rotary_factor + _ROUNDING)

    @property
    def scaled_context(self) -> int:
        """Context length that scaling adds beyond ``max_position_embeddings``, or 0.

        A ``linear`` or ``llama3`` config already states the scaled length there.
        """
        return int(self.original_context * self.factor) if self.kind in ("dynamic", "yarn") else 0


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Multiplies queries by ``1 + slope * log(1 + (position + offset) // interval)``.

    With ``unrotated_only`` it applies only in layers without RoPE.
    """

    slope: float
    interval: int
    offset: int = 0
    unrotated_only: bool = False


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """A family's defaults for absent fields.

    ``aliases`` maps other names of RoPE kinds to known ones. ``allows_partial`` permits partial
    rotation, of ``partial`` of a head by default. ``original_context`` is the default of
    ``original_max_position_embeddings``; if set, that field is read from the config itself and not
    from its RoPE settings.
    """

    theta: float = DEFAULT_THETA
    aliases: Mapping[str, RopeKind] = field(default_factory=dict)
    allows_partial: bool = False
    partial: float = 1.0
    original_context: int | None = None


def parse_rope(config: ConfigFields, defaults: RopeDefaults | None = None) -> RopeConfig:
    """Parse the RoPE settings of a config.

    Raises:
        UnsupportedModel: a scaling or partial rotation is not implemented.
        BrokenModel: a field is missing or invalid.
    """
    found = config.get_object("rope_parameters") or config.get_object("rope_scaling")
    return _parse_scaling(found, config, defaults or RopeDefaults())


def parse_scaled_longrope(config: ConfigFields, defaults: RopeDefaults) -> RopeConfig:
    """Parse RoPE settings that state the factor of LongRoPE (Phi-3.5-MoE).

    Raises:
        UnsupportedModel: the factor differs between short and long contexts, or as
            :func:`parse_rope`.
        BrokenModel: as there.
    """
    found = config.get_object("rope_parameters") or config.get_object("rope_scaling")
    inner = ConfigFields(found, f"{config.where}: rope settings")
    short, long = (inner.get_optional_number(f"{kind}_mscale") for kind in ("short", "long"))
    if short != long:
        raise UnsupportedModel(
            f"{inner.where}: short_mscale {short} and long_mscale {long} differ, which is not "
            "supported"
        )
    stated = {} if short is None else {"attention_factor": short}
    return _parse_scaling({**found, **stated}, config, defaults)


def parse_axes(
    config: ConfigFields, rotary_dim: int, *, interleaved: bool = False
) -> tuple[int, ...]:
    """Parse the coordinate that rotates each pair: an image's position (0), row (1) or column (2).

    With ``interleaved``, the pairs of the three sections alternate; once the rows' or columns'
    section is used up, positions take its pairs (Qwen3-VL, arXiv 2511.21631, §2). The result is
    empty if the config has no sections.

    Raises:
        BrokenModel: the sections do not cover exactly all pairs.
    """
    found = config.get_object("rope_parameters") or config.get_object("rope_scaling")
    sections = ConfigFields(found, f"{config.where}: rope settings").get_integers("mrope_section")
    if not sections:
        return ()
    if len(sections) != 3 or min(sections) < 0 or 2 * sum(sections) != rotary_dim:
        raise BrokenModel(
            f"{config.where}: mrope_section {list(sections)[:9]} is not {rotary_dim // 2} pairs in "
            "three parts"
        )
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    turns = enumerate(pair % 3 for pair in range(sum(sections)))
    return tuple(axis if pair < 3 * sections[axis] else 0 for pair, axis in turns)


def parse_query_scaling(config: ConfigFields, rope: RopeConfig) -> QueryScaling | None:
    """Parse the scaling of queries beyond the trained length (Ministral 3); ``None`` if absent.

    Raises:
        BrokenModel: a field is invalid, or the trained length is missing.
    """
    found = config.get_object("rope_parameters") or config.get_object("rope_scaling")
    where, name = f"{config.where}: rope settings", "llama_4_scaling_beta"
    slope = ConfigFields(found, where).get_optional_number(name, None)
    if not slope:
        return None
    if slope < 0 or not rope.original_context:
        raise BrokenModel(
            f"{where}: {name} {slope} must be positive, with original_max_position_embeddings"
        )
    return QueryScaling(slope, rope.original_context)


def parse_alpha_rope(config: ConfigFields, head_dim: int) -> RopeConfig:
    """Parse RoPE settings whose ``alpha`` raises the base at any length (Hunyuan).

    Their kind is ``dynamic``, but they don't depend on the length. Raises as :func:`parse_rope`.
    """
    found = config.get_object("rope_parameters") or config.get_object("rope_scaling")
    inner = ConfigFields(found, f"{config.where}: rope settings")
    kind = inner.get_string("rope_type", inner.get_string("type", "default"))
    alpha = inner.get_number("alpha", 0.0)
    if kind != "dynamic" or not alpha:
        return parse_rope(config)
    if alpha < 1 or head_dim <= 2:
        raise BrokenModel(
            f"{inner.where}: alpha {alpha} must be at least 1, and head_dim {head_dim} above 2"
        )
    theta = inner.get_number("rope_theta", config.get_number("rope_theta", DEFAULT_THETA))
    stretched = theta * alpha ** (head_dim / (head_dim - 2))
    return parse_rope(ConfigFields({"rope_theta": stretched}, config.where))


def parse_two_ropes(
    config: ConfigFields, full: RopeDefaults, local: RopeDefaults
) -> tuple[RopeConfig, RopeConfig]:
    """Parse the settings of layers without and with a window; raises as :func:`parse_rope`."""
    found = config.get_object("rope_parameters")
    both = ConfigFields(found, f"{config.where}: rope_parameters")
    full_found, local_found = (
        both.get_object("full_attention"),
        both.get_object("sliding_attention"),
    )
    if not full_found and not local_found:
        full_found = found or config.get_object("rope_scaling")
    theta = config.get_number("rope_local_base_freq", local.theta)
    return (
        _parse_scaling(full_found, config, full),
        _parse_scaling(local_found or {"rope_theta": theta}, config, local),
    )


def _parse_scaling(
    found: Mapping[str, Any], outer: ConfigFields, defaults: RopeDefaults
) -> RopeConfig:
    where = outer.where
    fields = ConfigFields(found, f"{where}: rope settings")
    named = fields.get_string("rope_type", fields.get_string("type", "default"))
    kind = defaults.aliases.get(named, named)
    if kind not in get_args(RopeKind):
        known = ", ".join(get_args(RopeKind))
        raise UnsupportedModel(f"{where}: rope scaling {kind!r} is not supported (only {known})")
    partial = fields.get_number(
        "partial_rotary_factor", outer.get_number("partial_rotary_factor", defaults.partial)
    )
    if not 0 < partial <= 1:
        raise BrokenModel(f"{where}: partial_rotary_factor {partial} is not in 0 … 1")
    if partial != 1.0 and not (defaults.allows_partial or kind == "proportional"):
        raise UnsupportedModel(f"{where}: partial_rotary_factor {partial} is not supported")
    theta = fields.get_number("rope_theta", outer.get_number("rope_theta", defaults.theta))
    if theta <= 1.0:
        raise BrokenModel(f"{where}: rope_theta must be above 1, not {theta}")
    if kind == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=partial)
    plain = RopeConfig(theta, cast(RopeKind, kind), partial_rotary_factor=partial)
    positions = outer.get_integer("max_position_embeddings", 2048, MAX_MODEL_LEN)
    original = _original_context(kind, positions, fields, outer, defaults)
    if kind == "longrope":
        return _parse_longrope(plain, positions, original, fields)
    return _scale_rope(plain, positions, original, fields)


def _original_context(
    kind: str, positions: int, fields: ConfigFields, outer: ConfigFields, defaults: RopeDefaults
) -> int:
    if kind == "dynamic":
        return positions
    name, inner = "original_max_position_embeddings", defaults.original_context
    if inner is None:
        inner = fields.get_integer(name, positions, MAX_MODEL_LEN)
    return outer.get_integer(name, inner, MAX_MODEL_LEN)


def _scale_rope(
    plain: RopeConfig, positions: int, original: int, fields: ConfigFields
) -> RopeConfig:
    # YaRN without a factor uses the ratio of both lengths.
    implied = positions / original if plain.kind == "yarn" else None
    rope = replace(
        plain,
        factor=fields.get_number("factor", 1.0 if plain.kind == "proportional" else implied),
        original_context=original,
        low_freq_factor=fields.get_number("low_freq_factor", 1.0),
        high_freq_factor=fields.get_number("high_freq_factor", 4.0),
        attention_factor=fields.get_optional_number("attention_factor"),
        beta_fast=fields.get_number("beta_fast", 32.0) or 32.0,
        beta_slow=fields.get_number("beta_slow", 1.0) or 1.0,
        mscale=fields.get_number("mscale", 0.0),
        mscale_all_dim=fields.get_number("mscale_all_dim", 0.0),
        truncate=fields.get_boolean("truncate", True),
    )
    if rope.factor < 1.0:
        raise BrokenModel(f"{fields.where}: factor must be at least 1, not {rope.factor}")
    if original * rope.factor > MAX_MODEL_LEN:
        raise BrokenModel(
            f"{fields.where}: factor {rope.factor} makes a context of over {MAX_MODEL_LEN} tokens"
        )
    if min(rope.beta_fast, rope.beta_slow) <= 0:
        raise BrokenModel(f"{fields.where}: beta_fast and beta_slow must be positive")
    if rope.kind == "llama3" and not 0 < rope.low_freq_factor <= rope.high_freq_factor:
        raise BrokenModel(
            f"{fields.where}: low_freq_factor {rope.low_freq_factor} must be positive and at most "
            f"high_freq_factor {rope.high_freq_factor}"
        )
    return rope


def _parse_longrope(
    plain: RopeConfig, positions: int, original: int, fields: ConfigFields
) -> RopeConfig:
    """Parse LongRoPE (arXiv 2402.13753): divisors are listed; the factor only scales attention."""
    rope = replace(
        plain,
        factor=fields.get_number("factor", positions / original),
        original_context=original,
        attention_factor=fields.get_optional_number("attention_factor"),
        short_factor=fields.get_numbers("short_factor"),
        long_factor=fields.get_numbers("long_factor"),
    )
    for name, listed in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if min(listed) <= 0:
            raise BrokenModel(f"{fields.where}: all entries of {name} must be positive")
    if original < 2:
        raise BrokenModel(f"{fields.where}: original_max_position_embeddings must be above 1")
    return rope


def check_rope(rope: RopeConfig, head_dim: int, where: str) -> None:
    """Check that a rope fits heads of ``head_dim`` dimensions.

    Raises:
        BrokenModel: it does not.
    """
    rotary = rope.rotary_dim(head_dim)
    if rotary < 2 or rotary % 2:
        raise BrokenModel(
            f"{where}: partial_rotary_factor {rope.partial_rotary_factor} rotates {rotary} of "
            f"{head_dim} dimensions; their number must be even"
        )
    if rope.kind == "dynamic" and rotary == 2:
        raise BrokenModel(f"{where}: head_dim {head_dim} is too small for dynamic scaling")
    if rope.kind != "longrope":
        return
    for name, listed in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if len(listed) != rotary // 2:
            raise BrokenModel(f"{where}: {name} has {len(listed)} entries, not {rotary // 2}")
