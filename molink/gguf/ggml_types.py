"""Element types of GGUF tensors: blocks of a few weights with scales.

molink keeps a tensor's blocks in its own files: ``x.weight`` is stored as ``x.weight.q4_k``, bytes
``[rows, bytes of a row]``. Blocks lie along a row, so rows can be sliced and permuted.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import numpy.typing


@dataclass(frozen=True, slots=True)
class GgmlType:
    """An element type: ``nbytes`` bytes hold ``block_size`` weights.

    ``safetensors_dtype`` is empty for block types, which safetensors lacks.
    """

    name: str
    number: int
    block_size: int
    nbytes: int
    safetensors_dtype: str = ""

    def row_bytes(self, width: int) -> int | None:
        """Bytes of a row of ``width`` weights; ``None`` if they are not whole blocks."""
        blocks, rest = divmod(width, self.block_size)
        return None if rest else blocks * self.nbytes


_TYPES = (
    GgmlType("f32", 0, 1, 4, "F32"),
    GgmlType("f16", 1, 1, 2, "F16"),
    GgmlType("q4_0", 2, 32, 18),
    GgmlType("q4_1", 3, 32, 20),
    GgmlType("q5_0", 6, 32, 22),
    GgmlType("q5_1", 7, 32, 24),
    GgmlType("q8_0", 8, 32, 34),
    GgmlType("q2_k", 10, 256, 84),
    GgmlType("q3_k", 11, 256, 110),
    GgmlType("q4_k", 12, 256, 144),
    GgmlType("q5_k", 13, 256, 176),
    GgmlType("q6_k", 14, 256, 210),
    GgmlType("iq4_nl", 20, 32, 18),
    GgmlType("iq4_xs", 23, 256, 136),
    GgmlType("bf16", 30, 1, 2, "BF16"),
    GgmlType("mxfp4", 39, 32, 17),
)
#: Types by their number in GGUF files.
TYPES_BY_NUMBER = {kind.number: kind for kind in _TYPES}
#: Block types, by name; the name is a suffix of tensor names.
PACKED_TYPES = {kind.name: kind for kind in _TYPES if not kind.safetensors_dtype}


def packed_name(name: str, kind: GgmlType) -> str:
    """Return the name of the tensor ``name`` when stored in blocks."""
    return f"{name}.{kind.name}"


def find_packed(name: str, tensors: Container[str]) -> GgmlType | None:
    """Return the type of the blocks in which ``name`` is stored, if it is."""
    return next(
        (kind for kind in PACKED_TYPES.values() if packed_name(name, kind) in tensors), None
    )


def packed_names(name: str) -> tuple[str, ...]:
    """Return all names that the tensor ``name`` may have when stored in blocks."""
    return tuple(packed_name(name, kind) for kind in PACKED_TYPES.values())


def packed_shape(kind: GgmlType, shape: Sequence[int]) -> tuple[int, int] | None:
    """Return a weight's byte shape ``[rows, bytes of a row]``; ``None`` if impossible.

    ``shape`` is ``[out, in]``.
    """
    if len(shape) != 2:
        return None
    nbytes = kind.row_bytes(shape[1])
    return None if nbytes is None else (shape[0], nbytes)


def dequantize_rows(
    kind: GgmlType, rows: "numpy.typing.NDArray[Any]"
) -> "numpy.typing.NDArray[numpy.float32]":
    """Dequantize bytes ``[rows, bytes of a row]`` to float32 ``[rows, in]``."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(rows, GGMLQuantizationType(kind.number))
