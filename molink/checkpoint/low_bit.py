"""Checkpoints of GPTQ, AWQ, FP8 and compressed-tensors: which tensors stand for a projection.

A weight ``[out, in]`` is stored as numbers of few bits, with a scale for each *block* of it (some
rows, mostly one, by some columns, a *group*) and perhaps a zero point: ``(number - zero) * scale``.
On disk and between PCs it stays so, and in some forms on CPUs
(:mod:`molink.checkpoint.resident_format`); else a stage unpacks it as it loads
(:mod:`molink.stage.weights`). Projections that the checkpoint's author left out are stored as in
any other model: what there is of a projection decides.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

from molink.checkpoint.quantization import is_quantizable
from molink.checkpoint.safetensors_header import TensorSpec
from molink.checkpoint.tensor_requirement import FLOAT_DTYPES, TensorRequirement

#: Where the numbers and zero points of a weight lie.
#:
#: ``gptq``: ``qweight`` int32 ``[in / n, out]``, ``n`` numbers to a word, the first in its lowest
#: bits; ``scales`` ``[groups, out]``; ``qzeros`` ``[groups, out / n]``, each one less than the zero
#: point (``gptq_v2``: the zero point itself).
#: ``awq``: ``qweight`` int32 ``[in, out / n]``, whose words hold their eight numbers in the order
#: 0 2 4 6 1 3 5 7; ``qzeros`` alike, ``scales`` as there.
#: ``packed`` (compressed-tensors): ``weight_packed`` int32 ``[out, in / n]``, ``weight_scale``
#: ``[out, groups]``, ``weight_zero_point`` ``[out / n, groups]``.
#: ``plain``: ``weight`` of 8 bits ``[out, in]``, ``weight_scale`` or ``weight_scale_inv`` (which is
#: no inverse) with an element for each block.
LowBitLayout = Literal["gptq", "gptq_v2", "awq", "packed", "plain"]

#: Types of 8-bit numbers that are stored as they are.
EIGHT_BIT_DTYPES = {"float": "F8_E4M3", "int": "I8"}
_WORD_BITS = 32
_WEIGHT_SUFFIX = ".weight"
_PLAIN_SCALES = ("weight_scale", "weight_scale_inv")
#: Beside weights, and of no use here: rows aren't rounded to 8 bits, and the config has the shape.
_UNUSED_SUFFIXES = ("input_scale", "activation_scale", "weight_shape", "g_idx", "weight_g_idx")


@dataclass(frozen=True, slots=True)
class LowBitScheme:
    """How a checkpoint's projections are stored.

    ``scale_block`` are the rows and columns of ``[out, in]`` that share a scale, 0 = all.
    ``has_zero_points``: there are zero points; without, it is the middle of what the bits can be.
    ``has_column_order``: a tensor ``g_idx`` (int32 ``[in]``) names the group of each column
    ("act-order"), else they follow each other. ``number_kind`` is the type of ``plain`` numbers.
    """

    layout: LowBitLayout
    bits: int
    scale_block: tuple[int, int]
    has_zero_points: bool = True
    has_column_order: bool = False
    number_kind: Literal["int", "float"] = "int"

    def is_stored(self, name: str, found: Mapping[str, TensorSpec]) -> bool:
        """Whether the weight ``name`` is stored so; else it is in full, or not there at all."""
        span = found.get(self.numbers_name(name))
        return span is not None and (self.layout != "plain" or span.dtype not in FLOAT_DTYPES)

    def numbers_name(self, name: str) -> str:
        """What the tensor with the numbers of the weight ``name`` is called."""
        return self._companion_name(name, {"plain": "weight", "packed": "weight_packed"}, "qweight")

    def zero_points_name(self, name: str) -> str:
        """What the tensor with its zero points is called."""
        return self._companion_name(name, {"packed": "weight_zero_point"}, "qzeros")

    def scales_name(self, name: str, found: Container[str]) -> str:
        """What the tensor with its scales is called."""
        if self.layout != "plain":
            return self._companion_name(name, {"packed": "weight_scale"}, "scales")
        names = [_sibling_name(name, end) for end in _PLAIN_SCALES]
        return next((one for one in names if one in found), names[0])

    def order_name(self, name: str) -> str:
        """What the tensor is called that names the group of each column."""
        return self._companion_name(name, {"packed": "weight_g_idx"}, "g_idx")

    def count_groups(self, width: int) -> int:
        """How many scales a row of ``width`` columns has."""
        return -(-width // (self.scale_block[1] or width))

    def required_tensors(
        self, name: str, shape: tuple[int, int], found: Mapping[str, TensorSpec]
    ) -> dict[str, TensorRequirement]:
        """What has to be stored for a weight ``name`` of ``shape``, if it is stored so."""
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
        """Names of tensors that may be beside the weight ``name``, and are not read."""
        # Older versions of AutoGPTQ gave every projection a bias.
        biases = ("bias",) if self.layout in ("gptq", "gptq_v2") else ()
        return tuple(_sibling_name(name, end) for end in (*_UNUSED_SUFFIXES, *biases))

    def _plain_scales(self, shape: tuple[int, int], span: TensorSpec | None) -> tuple[int, ...]:
        if self.scale_block == (0, 0):
            return () if span is not None and span.shape == () else (1,)
        rows = -(-shape[0] // (self.scale_block[0] or shape[0]))
        return rows, self.count_groups(shape[1])

    def _count_words(self, numbers: int) -> int:
        return -(-numbers * self.bits // _WORD_BITS)

    def _companion_name(self, name: str, ends: Mapping[str, str], other: str) -> str:
        return _sibling_name(name, ends.get(self.layout, other))


def can_be_low_bit(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor may be stored so."""
    return is_quantizable(name, shape)


def _sibling_name(name: str, end: str) -> str:
    return f"{name.removesuffix(_WEIGHT_SUFFIX)}.{end}"
