"""Reads from ``config.json`` how GPTQ, AWQ, FP8 or compressed-tensors have stored a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.low_bit import LowBitLayout, LowBitScheme
from molink.errors import BrokenModel, UnsupportedModel

#: Widths of packed numbers of which none lies in two words.
_PACKED_BITS = (2, 4, 8)
_Value = TypeVar("_Value", str, int, bool)


def parse_low_bit(raw: Mapping[str, Any], where: str) -> LowBitScheme | None:
    """How the projections are stored; ``None`` where the config names none of these methods.

    Raises:
        UnsupportedModel: a variant that isn't implemented; named.
        BrokenModel: a field that is impossible; named.
    """
    section = ConfigFields(raw, where).get_object("quantization_config")
    fields = ConfigFields(section, f"{where}: quantization_config")
    read = _METHODS.get(fields.get_string("quant_method", "").lower())
    return None if read is None else read(fields)


def _parse_gptq(fields: ConfigFields) -> LowBitScheme:
    layout = fields.get_string("checkpoint_format", fields.get_string("format", "gptq")).lower()
    bits = _check_value(fields, "bits", fields.get_integer("bits"), _PACKED_BITS)
    if layout not in ("gptq", "gptq_v2") or fields.get_boolean("is_marlin_format", False):
        raise _make_unsupported(fields, "checkpoint_format", layout, ("gptq", "gptq_v2"))
    if fields.get_boolean("lm_head", False):
        raise UnsupportedModel(f"{fields.where}: a quantized output head is not supported")
    overrides = [rule for rule in fields.get_object("dynamic") if not rule.startswith("-:")]
    if overrides:
        raise UnsupportedModel(
            f"{fields.where}: settings of some layers only ({overrides[0][:80]!r} in dynamic) are "
            "not supported"
        )
    layout_found: LowBitLayout = "gptq" if layout == "gptq" else "gptq_v2"
    ordered = fields.get_boolean("desc_act", False)
    return LowBitScheme(
        layout_found, bits, (1, _parse_group_size(fields, "group_size")), has_column_order=ordered
    )


def _parse_awq(fields: ConfigFields) -> LowBitScheme:
    # AutoAWQ's own names, and those of transformers.
    bits = _check_value(
        fields, "bits", fields.get_integer("bits", fields.get_integer("w_bit", 4)), (4,)
    )
    version = fields.get_string("version", fields.get_string("format", "gemm")).lower()
    _check_value(fields, "version", version, ("gemm",))
    group = _parse_group_size(fields, "group_size", fields.get_number("q_group_size", 128))
    return LowBitScheme("awq", bits, (1, group))


def _parse_fp8(fields: ConfigFields) -> LowBitScheme:
    _check_value(fields, "fmt", fields.get_string("fmt", "e4m3").lower(), ("e4m3", "float8_e4m3fn"))
    return LowBitScheme(
        "plain",
        8,
        _parse_pair(fields, "weight_block_size"),
        has_zero_points=False,
        number_kind="float",
    )


def _parse_compressed(fields: ConfigFields) -> LowBitScheme:
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.get_object(name):
            raise UnsupportedModel(f"{fields.where}: {name} is not supported")
    sparsity = ConfigFields(
        fields.get_object("sparsity_config"), f"{fields.where}: sparsity_config"
    )
    _check_value(sparsity, "format", sparsity.get_string("format", "dense"), ("dense",))
    listed, where = fields.get_object("config_groups"), f"{fields.where}: config_groups"
    groups, common = ConfigFields(listed, where), fields.get_string("format", "")
    found = {
        _parse_weight_group(ConfigFields(groups.get_object(name), where), common) for name in listed
    }
    if len(found) != 1:
        raise UnsupportedModel(
            f"{where}: weights of {len(found)} kinds in one model are not supported (only of one)"
        )
    return found.pop()


def _parse_weight_group(group: ConfigFields, common: str) -> LowBitScheme:
    """Of one of the groups of projections that compressed-tensors can treat unlike."""
    layout = group.get_string("format", common)
    weights = ConfigFields(group.get_object("weights"), f"{group.where}: weights")
    kind = _check_value(weights, "type", weights.get_string("type", "int"), ("int", "float"))
    bits, symmetric = weights.get_integer("num_bits", 8), weights.get_boolean("symmetric", True)
    block = _parse_block(weights)
    if layout == "pack-quantized" and kind == "int":
        _check_value(weights, "num_bits", bits, _PACKED_BITS)
        if block[0] != 1:
            raise _make_unsupported(
                weights, "strategy", weights.get_string("strategy", "tensor"), _SCALE_PER_ROW
            )
        ordered = weights.get_string("actorder", "none") in ("group", "dynamic")
        return LowBitScheme(
            "packed", bits, block, has_zero_points=not symmetric, has_column_order=ordered
        )
    plain = {"int-quantized": "int", "float-quantized": "float", "naive-quantized": kind}
    if plain.get(layout) != kind:
        raise _make_unsupported(group, "format", layout, ("pack-quantized", *plain))
    _check_value(weights, "num_bits", bits, (8,))
    _check_value(weights, "symmetric", symmetric, (True,))
    return LowBitScheme(
        "plain", bits, block, has_zero_points=False, number_kind="int" if kind == "int" else "float"
    )


_SCALE_PER_ROW = ("channel", "group")


def _parse_block(weights: ConfigFields) -> tuple[int, int]:
    strategy = weights.get_string("strategy", "tensor")
    _check_value(weights, "strategy", strategy, ("tensor", *_SCALE_PER_ROW, "block"))
    if strategy == "block":
        return _parse_pair(weights, "block_structure")
    group = _parse_group_size(weights, "group_size") if strategy == "group" else 0
    return (0 if strategy == "tensor" else 1), group


def _parse_group_size(fields: ConfigFields, name: str, fallback: float | None = None) -> int:
    """Columns of a group; -1 in a config is a whole row, 0 here."""
    value = fields.get_number(name, fallback)
    if value == -1:
        return 0
    if value < 1 or value != int(value):
        raise BrokenModel(f"{fields.where}: {name} has to be -1 or a number of columns: {value}")
    return int(value)


def _parse_pair(fields: ConfigFields, name: str) -> tuple[int, int]:
    sizes = fields.get_integers(name)
    if not sizes:
        return 0, 0
    if len(sizes) != 2 or min(sizes) < 1:
        raise BrokenModel(f"{fields.where}: {name} has to be rows and columns, not {sizes}")
    return sizes[0], sizes[1]


def _check_value(fields: ConfigFields, name: str, value: _Value, known: Iterable[_Value]) -> _Value:
    if value not in known:
        raise _make_unsupported(fields, name, value, known)
    return value


def _make_unsupported(
    fields: ConfigFields, name: str, value: object, known: Iterable[object]
) -> UnsupportedModel:
    listed = ", ".join(str(one) for one in known)
    return UnsupportedModel(
        f"{fields.where}: {name} {str(value)[:40]!r} is not supported (only {listed})"
    )


_METHODS: dict[str, Callable[[ConfigFields], LowBitScheme]] = {
    "gptq": _parse_gptq,
    "awq": _parse_awq,
    "fp8": _parse_fp8,
    "compressed-tensors": _parse_compressed,
}
#: What ``quant_method`` may be.
LOW_BIT_METHODS = tuple(_METHODS)
