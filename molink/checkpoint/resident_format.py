"""Which weights stay in few bits where a CPU multiplies by these: one rule for reader and plan."""

from collections.abc import Mapping

from molink.checkpoint.low_bit import LowBitScheme, can_be_low_bit
from molink.checkpoint.safetensors_header import TensorSpec
from molink.facts.dtypes import NarrowDType
from molink.gguf.block_formats import BLOCK_FORMATS, ROW_MULTIPLE, BlockFormat
from molink.gguf.ggml_types import find_packed

#: Codes that share a scale in memory, at most and at least: a longer group has it several times.
_GROUP_SIZES = (128, 64, 32)


def find_resident_format(
    name: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, TensorSpec],
    low_bit: LowBitScheme | None,
) -> BlockFormat | None:
    """In what the weight ``name`` of ``shape`` stays; ``None`` if it becomes numbers as it is read.

    ``tensors`` are those that there are, by name.
    """
    if len(shape) != 2 or shape[0] % ROW_MULTIPLE:
        return None
    kind = find_packed(name, tensors)
    if kind is not None:
        return BLOCK_FORMATS.get(kind.name)
    if low_bit is None or not can_be_low_bit(name, shape) or not low_bit.is_stored(name, tensors):
        return None
    return _low_bit_format(low_bit, name, shape[1], tensors)


def _low_bit_format(
    scheme: LowBitScheme, name: str, width: int, tensors: Mapping[str, TensorSpec]
) -> BlockFormat | None:
    """Whole numbers of 4 or 8 bits whose scales have 16 bits, in whole groups."""
    columns = scheme.scale_block[1] or width
    group = next((one for one in _GROUP_SIZES if columns % one == 0), 0)
    scales = tensors.get(scheme.scales_name(name, tensors))
    if scheme.number_kind != "int" or scheme.bits not in (4, 8) or not group or width % columns:
        return None
    if scales is None or scales.dtype not in ("F16", "BF16"):
        return None
    # Codes of 8 bits are signed, those of 4 aren't.
    offset = 8 if scheme.bits == 4 else 0
    numbers: NarrowDType = "f16" if scales.dtype == "F16" else "bf16"
    return BlockFormat(
        scheme.bits, offset, group, group, has_shifts=scheme.has_zero_points, number_dtype=numbers
    )
