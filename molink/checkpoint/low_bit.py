"""Checkpoints of GPTQ, AWQ, FP8 and compressed-tensors.

A weight ``[out, in]`` is stored as low-bit numbers with a scale for each *block* (some rows,
usually one, by some columns, a *group*) and optional zero points: ``(number - zero) * scale``. It
keeps that form on disk, in transfers and, for some formats, in memory
(:func:`find_resident_format`); otherwise a stage unpacks it while loading
(:mod:`molink.stage.weights`). Projections that were not quantized are stored as usual: the tensors
present decide.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from molink.checkpoint.config_fields import ConfigFields
from molink.checkpoint.quantized_size import WIDE_SUFFIXES, is_quantizable
from molink.checkpoint.safetensors_header import FLOAT_DTYPES, TensorRequirement, TensorSpec
from molink.checkpoint.stacked_experts import find_stack
from molink.errors import BrokenModel, UnsupportedModel
from molink.facts.dtypes import WeightDType
from molink.gguf.block_formats import (
    BLOCK_FORMATS,
    MXFP4_BLOCK,
    ROW_MULTIPLE,
    BlockFormat,
    StepKind,
    find_group,
    float4_format,
)
from molink.gguf.ggml_types import find_packed

#: Tensor layout of numbers and zero points. ``gptq``: ``qweight`` int32 ``[in / n, out]``, ``n``
#: numbers per word, lowest bits first; ``scales`` ``[groups, out]``; ``qzeros`` ``[groups, out /
#: n]``, each one less than the zero point (``gptq_v2``: the zero point itself). ``awq``:
#: ``qweight`` int32 ``[in, out / n]``, whose words hold their eight numbers in the order 0 2 4 6 1
#: 3 5 7; ``qzeros`` likewise, ``scales`` as in ``gptq``. ``packed`` (compressed-tensors):
#: ``weight_packed`` int32 ``[out, in / n]``, ``weight_scale`` ``[out, groups]``,
#: ``weight_zero_point`` ``[out / n, groups]``. ``plain``: 8-bit ``weight`` ``[out, in]``,
#: ``weight_scale`` or ``weight_scale_inv`` (not an inverse) with an element per block. ``mxfp4``
#: and ``nvfp4`` (compressed-tensors): ``weight_packed`` uint8 ``[out, in / 2]``, whose bytes hold
#: two E2M1 floats, lower half first; ``weight_scale`` ``[out, groups]``, the biased exponents of
#: powers of two (E8M0), or E4M3 floats that ``weight_global_scale`` ``[1]`` divides.
LowBitLayout = Literal["gptq", "gptq_v2", "awq", "packed", "plain", "mxfp4", "nvfp4"]

#: Types of unpacked 8-bit numbers.
EIGHT_BIT_DTYPES = {"float": "F8_E4M3", "int": "I8"}
_WORD_BITS = 32
_WEIGHT_SUFFIX = ".weight"
_PLAIN_SCALES = ("weight_scale", "weight_scale_inv")
#: Companion tensors that are ignored: activations are not quantized, and shapes follow from the
#: config.
_UNUSED_SUFFIXES = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "weight_shape",
    "g_idx",
    "weight_g_idx",
)
#: Columns per scale of 4-bit floats, and the type of scales.
_FLOAT4_SCALES = {"mxfp4": (32, "U8"), "nvfp4": (16, "F8_E4M3")}
_FLOAT4_CODES_PER_BYTE = 2


@dataclass(frozen=True, slots=True)
class LowBitScheme:
    """How a checkpoint's projections are stored.

    A scale covers ``scale_block`` rows and columns of ``[out, in]``, 0 = all. Without
    ``has_zero_points`` the zero point is the middle of the number's range. With
    ``has_column_order`` ("act-order"), ``g_idx`` (int32 ``[in]``) maps columns to groups.
    ``number_kind`` is the type of ``plain`` numbers.
    """

    layout: LowBitLayout
    bits: int
    scale_block: tuple[int, int]
    has_zero_points: bool = True
    has_column_order: bool = False
    number_kind: Literal["int", "float"] = "int"

    def is_stored(self, name: str, found: Mapping[str, TensorSpec]) -> bool:
        """Whether the weight ``name`` is stored in this scheme."""
        span = found.get(self.numbers_name(name))
        return span is not None and (self.layout != "plain" or span.dtype not in FLOAT_DTYPES)

    def numbers_name(self, name: str) -> str:
        """Name of the tensor with the numbers of the weight ``name``."""
        ends = {"plain": "weight", **dict.fromkeys(("packed", *_FLOAT4_SCALES), "weight_packed")}
        return self._companion_name(name, ends, "qweight")

    def zero_points_name(self, name: str) -> str:
        """Name of the tensor with its zero points."""
        return self._companion_name(name, {"packed": "weight_zero_point"}, "qzeros")

    def scales_name(self, name: str, found: Container[str]) -> str:
        """Name of the tensor with its scales."""
        if self.layout != "plain":
            ends = dict.fromkeys(("packed", *_FLOAT4_SCALES), "weight_scale")
            return self._companion_name(name, ends, "scales")
        names = [_sibling_name(name, end) for end in _PLAIN_SCALES]
        return next((one for one in names if one in found), names[0])

    def global_scale_name(self, name: str) -> str:
        """Name of the tensor that divides all scales of ``nvfp4``."""
        return _sibling_name(name, "weight_global_scale")

    def order_name(self, name: str) -> str:
        """Name of the tensor that maps columns to groups."""
        return self._companion_name(name, {"packed": "weight_g_idx"}, "g_idx")

    def count_groups(self, width: int) -> int:
        """Scales per row of ``width`` columns."""
        return -(-width // (self.scale_block[1] or width))

    def required_tensors(
        self, name: str, shape: tuple[int, int], found: Mapping[str, TensorSpec]
    ) -> dict[str, TensorRequirement]:
        """Required tensors of a weight ``name`` of ``shape``."""
        rows, width = shape
        groups = self.count_groups(width)
        scales = self.scales_name(name, found)
        if self.layout == "plain":
            kinds = (EIGHT_BIT_DTYPES[self.number_kind],)
            wanted = self._plain_scales(shape, found.get(scales))
            return {
                name: TensorRequirement(kinds, shape),
                scales: TensorRequirement(FLOAT_DTYPES, wanted),
            }
        if self.layout in _FLOAT4_SCALES:
            return self._float4_tensors(name, shape)
        words = {
            "awq": (width, self._count_words(rows)),
            "packed": (rows, self._count_words(width)),
        }.get(self.layout, (self._count_words(width), rows))
        by_row = self.layout == "packed"
        tensors = {
            self.numbers_name(name): TensorRequirement(("I32",), words),
            scales: TensorRequirement(FLOAT_DTYPES, (rows, groups) if by_row else (groups, rows)),
        }
        if self.has_zero_points:
            packed = self._count_words(rows)
            shape = (packed, groups) if by_row else (groups, packed)
            tensors[self.zero_points_name(name)] = TensorRequirement(("I32",), shape)
        if self.has_column_order and groups > 1:
            tensors[self.order_name(name)] = TensorRequirement(("I32",), (width,))
        return tensors

    def unused_names(self, name: str) -> tuple[str, ...]:
        """Names of companion tensors that are ignored."""
        # Old AutoGPTQ versions stored a bias for every projection.
        biases = ("bias",) if self.layout in ("gptq", "gptq_v2") else ()
        return tuple(_sibling_name(name, end) for end in (*_UNUSED_SUFFIXES, *biases))

    def _plain_scales(self, shape: tuple[int, int], span: TensorSpec | None) -> tuple[int, ...]:
        if self.scale_block == (0, 0):
            return () if span is not None and span.shape == () else (1,)
        rows = -(-shape[0] // (self.scale_block[0] or shape[0]))
        return rows, self.count_groups(shape[1])

    def _float4_tensors(self, name: str, shape: tuple[int, int]) -> dict[str, TensorRequirement]:
        rows, width = shape
        group, scale = _FLOAT4_SCALES[self.layout]
        if width % group:
            raise BrokenModel(f"tensor {name}: rows of {width} are no multiple of {group}")
        packed = rows, width // _FLOAT4_CODES_PER_BYTE
        tensors = {
            self.numbers_name(name): TensorRequirement(("U8",), packed),
            self.scales_name(name, ()): TensorRequirement((scale,), (rows, width // group)),
        }
        if self.layout == "nvfp4":
            tensors[self.global_scale_name(name)] = TensorRequirement(("F32",), (1,))
        return tensors

    def _count_words(self, numbers: int) -> int:
        return -(-numbers * self.bits // _WORD_BITS)

    def _companion_name(self, name: str, ends: Mapping[str, str], other: str) -> str:
        return _sibling_name(name, ends.get(self.layout, other))


def can_be_low_bit(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor may be stored in a low-bit scheme."""
    return is_quantizable(name, shape) or name.endswith(WIDE_SUFFIXES)


def _sibling_name(name: str, end: str) -> str:
    return f"{name.removesuffix(_WEIGHT_SUFFIX)}.{end}"


#: Bit widths that divide a word.
_PACKED_BITS = (2, 4, 8)
_Value = TypeVar("_Value", str, int, bool)


def parse_low_bit(raw: Mapping[str, Any], where: str) -> LowBitScheme | None:
    """Parse the quantization scheme; ``None`` if the config names none of these methods.

    Raises:
        UnsupportedModel: a variant is not implemented.
        BrokenModel: a field is invalid.
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
            f"{fields.where}: settings of single layers ({overrides[0][:80]!r} in dynamic) are not "
            "supported"
        )
    layout_found: LowBitLayout = "gptq" if layout == "gptq" else "gptq_v2"
    ordered = fields.get_boolean("desc_act", False)
    return LowBitScheme(
        layout_found, bits, (1, _parse_group_size(fields, "group_size")), has_column_order=ordered
    )


def _parse_awq(fields: ConfigFields) -> LowBitScheme:
    # Spelled as in AutoAWQ, and as in transformers.
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
            f"{where}: {len(found)} different weight schemes in one model are not supported"
        )
    return found.pop()


def _parse_weight_group(group: ConfigFields, common: str) -> LowBitScheme:
    """Parse one config group of compressed-tensors."""
    layout = group.get_string("format", common)
    weights = ConfigFields(group.get_object("weights"), f"{group.where}: weights")
    kind = _check_value(weights, "type", weights.get_string("type", "int"), ("int", "float"))
    bits, symmetric = weights.get_integer("num_bits", 8), weights.get_boolean("symmetric", True)
    float4 = _FLOAT4_LAYOUTS.get(layout)
    if float4 is not None and kind == "float":
        columns, _ = _FLOAT4_SCALES[float4]
        _check_value(weights, "num_bits", bits, (4,))
        _check_value(weights, "group_size", weights.get_integer("group_size", columns), (columns,))
        _check_value(weights, "symmetric", symmetric, (True,))
        return LowBitScheme(float4, 4, (1, columns), has_zero_points=False, number_kind="float")
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
        known = ("pack-quantized", *plain, *_FLOAT4_LAYOUTS)
        raise _make_unsupported(group, "format", layout, known)
    _check_value(weights, "num_bits", bits, (8,))
    _check_value(weights, "symmetric", symmetric, (True,))
    return LowBitScheme(
        "plain", bits, block, has_zero_points=False, number_kind="int" if kind == "int" else "float"
    )


_FLOAT4_LAYOUTS: dict[str, LowBitLayout] = {
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
}
_SCALE_PER_ROW = ("channel", "group")


def _parse_block(weights: ConfigFields) -> tuple[int, int]:
    strategy = weights.get_string("strategy", "tensor")
    _check_value(weights, "strategy", strategy, ("tensor", *_SCALE_PER_ROW, "block"))
    if strategy == "block":
        return _parse_pair(weights, "block_structure")
    group = _parse_group_size(weights, "group_size") if strategy == "group" else 0
    return (0 if strategy == "tensor" else 1), group


def _parse_group_size(fields: ConfigFields, name: str, fallback: float | None = None) -> int:
    """Parse columns per group; a whole row is -1 in a config and 0 here."""
    value = fields.get_number(name, fallback)
    if value == -1:
        return 0
    if value < 1 or value != int(value):
        raise BrokenModel(f"{fields.where}: {name} must be -1 or a number of columns: {value}")
    return int(value)


def _parse_pair(fields: ConfigFields, name: str) -> tuple[int, int]:
    sizes = fields.get_integers(name)
    if not sizes:
        return 0, 0
    if len(sizes) != 2 or min(sizes) < 1:
        raise BrokenModel(f"{fields.where}: {name} must be rows and columns, not {sizes}")
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
LOW_BIT_METHODS = tuple(_METHODS)


def find_resident_format(
    name: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, TensorSpec],
    low_bit: LowBitScheme | None,
) -> BlockFormat | None:
    """Return the format in which a weight stays in memory; ``None`` if it is dequantized.

    ``tensors`` are those of the checkpoint.
    """
    if len(shape) != 2 or shape[0] % ROW_MULTIPLE:
        return None
    kind, stack = find_packed(name, tensors), find_stack(name, tensors)
    if (stack is not None and stack.is_mxfp4) or (kind is not None and kind.name == "mxfp4"):
        return float4_format(MXFP4_BLOCK, shape[1], "e8m0")
    if kind is not None:
        return BLOCK_FORMATS.get(kind.name)
    if stack is not None:
        return None
    if low_bit is None or not can_be_low_bit(name, shape) or not low_bit.is_stored(name, tensors):
        return None
    scales = tensors.get(low_bit.scales_name(name, tensors))
    if scales is None:
        return None
    if low_bit.number_kind == "float":
        return _float_format(low_bit, (shape[0], shape[1]), scales)
    return _integer_format(low_bit, shape[1], scales)


_NUMBER_DTYPES: dict[str, WeightDType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def _float_format(
    scheme: LowBitScheme, shape: tuple[int, int], scales: TensorSpec
) -> BlockFormat | None:
    """Find the format of floats with whole blocks; a tensor's single scale applies to each row."""
    rows, group = scheme.scale_block[0] or 1, scheme.scale_block[1] or shape[1]
    if scheme.layout in _FLOAT4_SCALES:
        steps: StepKind = "e8m0" if scheme.layout == "mxfp4" else "e4m3"
        return float4_format(group, shape[1], steps)
    numbers = _NUMBER_DTYPES.get(scales.dtype)
    if numbers is None or shape[0] % rows or shape[1] % group:
        return None
    return BlockFormat(8, 0, group, group, number_dtype=numbers, is_float=True, shared_rows=rows)


def _integer_format(scheme: LowBitScheme, width: int, scales: TensorSpec) -> BlockFormat | None:
    """Find the format of 4- or 8-bit integers with 16-bit scales and whole groups."""
    columns = scheme.scale_block[1] or width
    group = find_group(columns)
    numbers = _NUMBER_DTYPES.get(scales.dtype)
    if scheme.bits not in (4, 8) or not group or width % columns or numbers in (None, "f32"):
        return None
    # 8-bit codes are signed, 4-bit codes are not.
    offset = 8 if scheme.bits == 4 else 0
    return BlockFormat(
        scheme.bits, offset, group, group, has_shifts=scheme.has_zero_points, number_dtype=numbers
    )
