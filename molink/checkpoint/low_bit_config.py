"""Reads from ``config.json`` how GPTQ, AWQ, FP8 or compressed-tensors have stored a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from molink.checkpoint.fields import Fields
from molink.checkpoint.low_bit import Layout, LowBit
from molink.errors import BrokenModel, UnsupportedModel

#: Widths of packed numbers of which none lies in two words.
_BITS = (2, 4, 8)
_Value = TypeVar("_Value", str, int, bool)


def parse_low_bit(raw: Mapping[str, Any], where: str) -> LowBit | None:
    """How the projections are stored; ``None`` where the config names none of these methods.

    Raises:
        UnsupportedModel: a variant that isn't implemented; named.
        BrokenModel: a field that is impossible; named.
    """
    section = Fields(raw, where).object("quantization_config")
    fields = Fields(section, f"{where}: quantization_config")
    read = _METHODS.get(fields.text("quant_method", "").lower())
    return None if read is None else read(fields)


def _gptq(fields: Fields) -> LowBit:
    layout = fields.text("checkpoint_format", fields.text("format", "gptq")).lower()
    bits = _one_of(fields, "bits", fields.integer("bits"), _BITS)
    if layout not in ("gptq", "gptq_v2") or fields.boolean("is_marlin_format", False):
        raise _unsupported(fields, "checkpoint_format", layout, ("gptq", "gptq_v2"))
    if fields.boolean("lm_head", False):
        raise UnsupportedModel(f"{fields.where}: a quantized output head is not supported")
    overrides = [rule for rule in fields.object("dynamic") if not rule.startswith("-:")]
    if overrides:
        raise UnsupportedModel(
            f"{fields.where}: settings of some layers only ({overrides[0][:80]!r} in dynamic) are "
            "not supported"
        )
    layout_found: Layout = "gptq" if layout == "gptq" else "gptq_v2"
    ordered = fields.boolean("desc_act", False)
    return LowBit(layout_found, bits, (1, _group(fields, "group_size")), ordered=ordered)


def _awq(fields: Fields) -> LowBit:
    # AutoAWQ's own names, and those of transformers.
    bits = _one_of(fields, "bits", fields.integer("bits", fields.integer("w_bit", 4)), (4,))
    version = fields.text("version", fields.text("format", "gemm")).lower()
    _one_of(fields, "version", version, ("gemm",))
    group = _group(fields, "group_size", fields.number("q_group_size", 128))
    return LowBit("awq", bits, (1, group))


def _fp8(fields: Fields) -> LowBit:
    _one_of(fields, "fmt", fields.text("fmt", "e4m3").lower(), ("e4m3", "float8_e4m3fn"))
    return LowBit("plain", 8, _pair(fields, "weight_block_size"), zeros=False, kind="float")


def _compressed(fields: Fields) -> LowBit:
    for name in ("kv_cache_scheme", "transform_config"):
        if fields.object(name):
            raise UnsupportedModel(f"{fields.where}: {name} is not supported")
    sparsity = Fields(fields.object("sparsity_config"), f"{fields.where}: sparsity_config")
    _one_of(sparsity, "format", sparsity.text("format", "dense"), ("dense",))
    listed, where = fields.object("config_groups"), f"{fields.where}: config_groups"
    groups, common = Fields(listed, where), fields.text("format", "")
    found = {_weights(Fields(groups.object(name), where), common) for name in listed}
    if len(found) != 1:
        raise UnsupportedModel(
            f"{where}: weights of {len(found)} kinds in one model are not supported (only of one)"
        )
    return found.pop()


def _weights(group: Fields, common: str) -> LowBit:
    """Of one of the groups of projections that compressed-tensors can treat unlike."""
    layout = group.text("format", common)
    weights = Fields(group.object("weights"), f"{group.where}: weights")
    kind = _one_of(weights, "type", weights.text("type", "int"), ("int", "float"))
    bits, symmetric = weights.integer("num_bits", 8), weights.boolean("symmetric", True)
    block = _block(weights)
    if layout == "pack-quantized" and kind == "int":
        _one_of(weights, "num_bits", bits, _BITS)
        if block[0] != 1:
            raise _unsupported(weights, "strategy", weights.text("strategy", "tensor"), _BY_ROW)
        ordered = weights.text("actorder", "none") in ("group", "dynamic")
        return LowBit("packed", bits, block, zeros=not symmetric, ordered=ordered)
    plain = {"int-quantized": "int", "float-quantized": "float", "naive-quantized": kind}
    if plain.get(layout) != kind:
        raise _unsupported(group, "format", layout, ("pack-quantized", *plain))
    _one_of(weights, "num_bits", bits, (8,))
    _one_of(weights, "symmetric", symmetric, (True,))
    return LowBit("plain", bits, block, zeros=False, kind="int" if kind == "int" else "float")


_BY_ROW = ("channel", "group")


def _block(weights: Fields) -> tuple[int, int]:
    strategy = weights.text("strategy", "tensor")
    _one_of(weights, "strategy", strategy, ("tensor", *_BY_ROW, "block"))
    if strategy == "block":
        return _pair(weights, "block_structure")
    group = _group(weights, "group_size") if strategy == "group" else 0
    return (0 if strategy == "tensor" else 1), group


def _group(fields: Fields, name: str, fallback: float | None = None) -> int:
    """Columns of a group; -1 in a config is a whole row, 0 here."""
    value = fields.number(name, fallback)
    if value == -1:
        return 0
    if value < 1 or value != int(value):
        raise BrokenModel(f"{fields.where}: {name} has to be -1 or a number of columns: {value}")
    return int(value)


def _pair(fields: Fields, name: str) -> tuple[int, int]:
    sizes = fields.integers(name)
    if not sizes:
        return 0, 0
    if len(sizes) != 2 or min(sizes) < 1:
        raise BrokenModel(f"{fields.where}: {name} has to be rows and columns, not {sizes}")
    return sizes[0], sizes[1]


def _one_of(fields: Fields, name: str, value: _Value, known: Iterable[_Value]) -> _Value:
    if value not in known:
        raise _unsupported(fields, name, value, known)
    return value


def _unsupported(
    fields: Fields, name: str, value: object, known: Iterable[object]
) -> UnsupportedModel:
    listed = ", ".join(str(one) for one in known)
    return UnsupportedModel(
        f"{fields.where}: {name} {str(value)[:40]!r} is not supported (only {listed})"
    )


_METHODS: dict[str, Callable[[Fields], LowBit]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
}
#: What ``quant_method`` may be.
LOW_BIT_METHODS = tuple(_METHODS)
