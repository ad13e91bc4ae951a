"""Formats of low-bit weights, and their size in memory.

A weight is a *code* of 4 to 8 bits. Groups of 16 to 128 codes share a scale. Some GGUF types add a
minimum to each group; checkpoints with zero points shift its codes::

    weight = scale · (code - offset + shift) + minimum

These are 16-bit numbers of the group, or (``K`` types) 16-bit numbers of a block of 256 times a 6-
to 8-bit integer of the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from molink.facts.dtypes import NarrowDType

#: Rows that CPU kernels process together; a weight's rows must be a multiple. CPUs with shorter
#: registers take half as many.
ROW_MULTIPLE = 32
HALF_BITS = 16
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Format of a quantized weight: ``bits`` of a code, weights per ``group`` and per ``block``.

    8-bit codes are signed. With ``has_minimum`` a minimum is added per group. With
    ``has_nested_scales`` groups have one-byte integers, signed unless there is a minimum. With
    ``has_shifts`` codes are shifted by integers. 16-bit numbers are of ``number_dtype``.
    """

    bits: int
    offset: int
    group: int
    block: int
    has_minimum: bool = False
    has_nested_scales: bool = False
    has_shifts: bool = False
    number_dtype: NarrowDType = "f16"

    @property
    def numbers_per_group(self) -> int:
        """16-bit numbers of a group, or of a block with nested scales; the scale comes first."""
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
        return (1 if self.has_nested_scales else _HALF_BYTES) * self.numbers_per_group

    @property
    def group_bytes(self) -> int:
        """Bytes of a group in memory."""
        return self.number_bytes + self.words_per_group * self.word_bytes

    @property
    def block_number_bytes(self) -> int:
        """Bytes of a block's 16-bit numbers with nested scales."""
        return _HALF_BYTES * self.numbers_per_group * self.has_nested_scales

    @property
    def nbytes(self) -> int:
        """Bytes of a block in memory."""
        return self.block_number_bytes + self.groups_per_block * self.group_bytes


#: Formats of GGUF types that stay quantized, by name; others are dequantized on load.
BLOCK_FORMATS = {
    "q4_0": BlockFormat(4, 8, 32, 32),
    "q4_1": BlockFormat(4, 0, 32, 32, has_minimum=True),
    "q5_0": BlockFormat(5, 16, 32, 32),
    "q5_1": BlockFormat(5, 0, 32, 32, has_minimum=True),
    "q8_0": BlockFormat(8, 0, 32, 32),
    "q4_k": BlockFormat(4, 0, 32, 256, has_minimum=True, has_nested_scales=True),
    "q5_k": BlockFormat(5, 0, 32, 256, has_minimum=True, has_nested_scales=True),
    "q6_k": BlockFormat(6, 32, 16, 256, has_nested_scales=True),
}


class BitRange(NamedTuple):
    """``bits`` bits of a code from ``target_bit`` on, stored from ``source_bit`` on in each half of
    ``word``.
    """

    word: int
    source_bit: int
    bits: int
    target_bit: int


@cache
def locate_pair(bits: int, index: int) -> tuple[BitRange, ...]:
    """Locate the bits of pair ``index`` in a group's codes.

    The lower half of a 32-bit *word* has codes at even depths, the upper half those at odd depths,
    so that one shift extracts a pair of neighbours. A word has four 4-bit codes or two 6-bit codes
    per half; 5-bit groups add a word, and the bits left in three 6-bit words form two more codes.
    8-bit codes have words of 16 bits.
    """
    if bits == 8:
        return (BitRange(index, 0, bits, 0),)
    if bits < 6:
        low = BitRange(index // 4, 4 * (index % 4), 4, 0)
        return (low,) if bits == 4 else (low, BitRange(4, index, 1, 4))
    if index < 6:
        return (BitRange(index // 2, bits * (index % 2), bits, 0),)
    return BitRange(index - 6, 12, 4, 0), BitRange(2, 2 * index, 2, 4)


#: Consecutive columns whose codes a GPU takes from one word each; tensor cores want 16 at least.
PLANE_WIDTHS = (32, 16)


def fits_planes(form: BlockFormat, shape: Sequence[int]) -> bool:
    """Whether a weight ``[out, in]`` stays in this format on a GPU: words of 32 bits fill rows."""
    codes_per_word = 32 // (8 if form.bits == 8 else 4)
    return shape[1] % (codes_per_word * PLANE_WIDTHS[-1]) == 0


def resident_bytes(form: BlockFormat, shape: Sequence[int]) -> int:
    """Bytes in memory of a weight ``[out, in]`` in this format, at most."""
    return prod(shape) // form.block * form.nbytes
