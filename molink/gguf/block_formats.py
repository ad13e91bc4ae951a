"""Formats of low-bit weights, and their size in memory.

A weight is a *code* of 4 to 8 bits. Groups of 16 to 128 codes share a scale. Some GGUF types add a
minimum to each group; checkpoints with zero points shift its codes::

    weight = scale · (code - offset + shift) + minimum

These are 16-bit numbers of the group, or (``K`` types) 16-bit numbers of a block of 256 times a 6-
to 8-bit integer of the group. 4-bit codes may stand for the 16 values of a *codebook*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from molink.facts.dtypes import DTYPE_SIZES, WeightDType

#: Rows that CPU kernels process together; a weight's rows must be a multiple. CPUs with shorter
#: registers take half as many.
ROW_MULTIPLE = 32
#: Codes that CPU kernels read without a loop; more unrolling only fills the instruction cache.
RUN_CODES = 32
HALF_BITS = 16


#: Types of the steps of groups with nested scales.
StepKind = Literal["integer", "e4m3", "e8m0"]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Format of a quantized weight: ``bits`` per code, weights per ``group`` and per ``block``.

    8-bit codes are signed. With ``has_minimum`` a minimum is added per group. With
    ``has_nested_scales`` groups have one-byte *steps*: integers, signed unless there is a minimum,
    or floats (E4M3; E8M0, powers of two). With ``has_shifts`` codes are shifted by integers. All
    other numbers have type ``number_dtype``. A ``codebook`` has the 16 values of 4-bit codes. With
    ``is_float`` 8-bit codes are E4M3 floats. ``shared_rows`` neighbouring rows share a scale.
    """

    bits: int
    offset: int
    group: int
    block: int
    has_minimum: bool = False
    has_nested_scales: bool = False
    has_shifts: bool = False
    number_dtype: WeightDType = "f16"
    codebook: tuple[float, ...] = ()
    is_float: bool = False
    shared_rows: int = 1
    step_kind: StepKind = "integer"

    @property
    def fits_cpu(self) -> bool:
        """Whether CPU kernels can multiply by such weights."""
        whole_runs = self.group in (RUN_CODES // 2, RUN_CODES) or self.group % RUN_CODES == 0
        return whole_runs and not self.is_float and self.step_kind != "e4m3"

    @property
    def numbers_per_group(self) -> int:
        """Numbers per group, or per block with nested scales; the scale comes first."""
        return 1 + self.has_minimum + self.has_shifts

    @property
    def word_bytes(self) -> int:
        """Bytes of a word of codes."""
        return 2 if self.bits == 8 else 4

    @property
    def words_per_group(self) -> int:
        """Words per group."""
        return self.group * self.bits // (8 * self.word_bytes)

    @property
    def groups_per_block(self) -> int:
        """Groups per block."""
        return self.block // self.group

    @property
    def number_bytes(self) -> int:
        """Bytes of a group's own numbers."""
        each = 1 if self.has_nested_scales else DTYPE_SIZES[self.number_dtype]
        return each * self.numbers_per_group

    @property
    def group_bytes(self) -> int:
        """Bytes of a group in memory."""
        return self.number_bytes + self.words_per_group * self.word_bytes

    @property
    def block_number_bytes(self) -> int:
        """Bytes of a block's own numbers with nested scales."""
        return DTYPE_SIZES[self.number_dtype] * self.numbers_per_group * self.has_nested_scales

    @property
    def nbytes(self) -> int:
        """Bytes of a block in memory."""
        return self.block_number_bytes + self.groups_per_block * self.group_bytes


#: Values of IQ4_NL's and IQ4_XS's codes.
_IQ4_VALUES = tuple(
    map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
)
#: Values of 4-bit floats with 2 exponent bits and 1 mantissa bit (E2M1).
E2M1_VALUES = (
    *(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
)
#: Formats of GGUF types that stay quantized, by name; others are dequantized on load. MXFP4's
#: format depends on a weight's width (:func:`float4_format`).
BLOCK_FORMATS = {
    "q4_0": BlockFormat(4, 8, 32, 32),
    "q4_1": BlockFormat(4, 0, 32, 32, has_minimum=True),
    "q5_0": BlockFormat(5, 16, 32, 32),
    "q5_1": BlockFormat(5, 0, 32, 32, has_minimum=True),
    "q8_0": BlockFormat(8, 0, 32, 32),
    "q4_k": BlockFormat(4, 0, 32, 256, has_minimum=True, has_nested_scales=True),
    "q5_k": BlockFormat(5, 0, 32, 256, has_minimum=True, has_nested_scales=True),
    "q6_k": BlockFormat(6, 32, 16, 256, has_nested_scales=True),
    "iq4_nl": BlockFormat(4, 0, 32, 32, codebook=_IQ4_VALUES),
    "iq4_xs": BlockFormat(4, 0, 32, 256, has_nested_scales=True, codebook=_IQ4_VALUES),
}


#: NaN as an E8M0 number.
NO_POWER = 255
#: Weights of a group in MXFP4 (OCP Microscaling Formats, §5.1).
MXFP4_BLOCK = 32


def float4_format(group: int, width: int, steps: StepKind) -> BlockFormat:
    """Return the format of E2M1 floats in rows of ``width``, with one scale per tensor or none."""
    return BlockFormat(
        4, 0, group, width,
        has_nested_scales=True, number_dtype="f32", codebook=E2M1_VALUES, step_kind=steps,
    )  # fmt: skip


class BitRange(NamedTuple):
    """A code's bits from ``target_bit`` on, stored in each half of ``word`` from ``source_bit``."""

    word: int
    source_bit: int
    bits: int
    target_bit: int


@cache
def locate_pair(bits: int, index: int) -> tuple[BitRange, ...]:
    """Locate the bits of pair ``index`` in a group's codes.

    The lower half of a 32-bit *word* holds codes of even columns, the upper half those of odd
    columns, so that one shift extracts a pair of neighbours. A word has four 4-bit codes or two
    6-bit codes per half; 5-bit groups add a word, and the bits left in three 6-bit words form two
    more codes. 8-bit codes have words of 16 bits.
    """
    if bits == 8:
        return (BitRange(index, 0, bits, 0),)
    if bits < 6:
        low = BitRange(index // 4, 4 * (index % 4), 4, 0)
        return (low,) if bits == 4 else (low, BitRange(4, index, 1, 4))
    if index < 6:
        return (BitRange(index // 2, bits * (index % 2), bits, 0),)
    return BitRange(index - 6, 12, 4, 0), BitRange(2, 2 * index, 2, 4)


#: Consecutive columns for which a GPU takes one code from each word; tensor cores need at least 16.
_PLANE_WIDTHS = (32, 16)


def plane_width(form: BlockFormat, columns: int) -> int:
    """Return how many columns share a scale and a slice of a GPU's words.

    0 if 32-bit words don't fill the rows.
    """
    slices = HALF_BITS // (8 if form.bits == 8 else 4)
    fitting = (
        width
        for width in _PLANE_WIDTHS
        if form.group % width == 0 and columns % (slices * width) == 0
    )
    return next(fitting, 0)


def fits_planes(form: BlockFormat, shape: Sequence[int]) -> bool:
    """Whether a weight ``[out, in]`` stays in this format on a GPU."""
    return plane_width(form, shape[1]) > 0


#: Group sizes in memory, largest first; a longer group repeats its scale.
_GROUP_SIZES = (128, 64, 32)


def find_group(columns: int) -> int:
    """Return the largest in-memory group for a scale of ``columns`` columns; 0 if none divides."""
    return next((size for size in _GROUP_SIZES if columns % size == 0), 0)


def fits_rows(form: BlockFormat, shape: Sequence[int]) -> bool:
    """Whether a weight ``[out, in]`` stays in this format on a CPU."""
    return form.fits_cpu and shape[0] % ROW_MULTIPLE == 0 and shape[1] % form.block == 0


def resident_bytes(form: BlockFormat, shape: Sequence[int]) -> int:
    """Return the maximum bytes in memory of a weight ``[out, in]`` in this format."""
    return prod(shape) // form.block * form.nbytes
