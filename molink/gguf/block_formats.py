"""What weights of few bits are as numbers, and what they take where they stay so.

A weight is a *code* of 4 to 8 bits. Groups of 16 to 128 codes share a scale. Some kinds of GGUF
blocks add something to each weight of a group; checkpoints with zero points shift its codes::

    weight = scale · (code - offset + shift) + added

These are numbers of 16 bits of the group, or (kinds ``K``) such numbers of a block of 256, times a
whole number of the group with 6 to 8 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from molink.facts.dtypes import NarrowDType

#: Rows of a weight that lie together where a CPU multiplies by blocks: their number has to be a
#: multiple of it. CPUs with shorter registers take half as many.
ROW_MULTIPLE = 32
#: Bits of half a word.
HALF_BITS = 16
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Of a kind: ``bits`` of a code, weights of a ``group`` and of a ``block``.

    Codes of 8 bits are signed. ``has_minimum``: something is added. ``has_nested_scales``: groups
    have whole numbers of one byte, signed where nothing is added. ``has_shifts``: codes are
    shifted, by whole numbers. ``number_dtype`` of 16 bits are of that type.
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
        """Numbers that a group has, or a block where groups have whole ones: a scale first."""
        return 1 + self.has_minimum + self.has_shifts

    @property
    def word_bytes(self) -> int:
        """Bytes of a word of codes."""
        return 2 if self.bits == 8 else 4

    @property
    def words_per_group(self) -> int:
        """Words of a group."""
        return self.group * self.bits // (8 * self.word_bytes)

    @property
    def groups_per_block(self) -> int:
        """Groups of a block."""
        return self.block // self.group

    @property
    def number_bytes(self) -> int:
        """Bytes of a group's own numbers: of 16 bits, or whole ones."""
        return (1 if self.has_nested_scales else _HALF_BYTES) * self.numbers_per_group

    @property
    def group_bytes(self) -> int:
        """Bytes of a group in memory."""
        return self.number_bytes + self.words_per_group * self.word_bytes

    @property
    def block_number_bytes(self) -> int:
        """Bytes of a block's numbers of 16 bits, where groups have whole ones."""
        return _HALF_BYTES * self.numbers_per_group * self.has_nested_scales

    @property
    def nbytes(self) -> int:
        """Bytes of a block in memory."""
        return self.block_number_bytes + self.groups_per_block * self.group_bytes


#: Of kinds of GGUF blocks, by name. All others become numbers as they are loaded.
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
    """``bits`` bits of a code from ``target_bit`` on: bits ``source_bit`` on of half of a group's
    ``word``."""

    word: int
    source_bit: int
    bits: int
    target_bit: int


@cache
def locate_pair(bits: int, index: int) -> tuple[BitRange, ...]:
    """Where pair ``index`` of a group's codes lies.

    A *word* of 32 bits has in its lower half codes at even depths, in its upper half the others, so
    that a shift brings a pair of neighbours forth. As many codes as possible lie in one piece:
    four of 4 bits, to whose groups those of 5 bits add a word, or two of 6 bits. What these leave
    of three words are two more of them. Codes of 8 bits have words of 16 bits of their own.
    """
    if bits == 8:
        return (BitRange(index, 0, bits, 0),)
    if bits < 6:
        low = BitRange(index // 4, 4 * (index % 4), 4, 0)
        return (low,) if bits == 4 else (low, BitRange(4, index, 1, 4))
    if index < 6:
        return (BitRange(index // 2, bits * (index % 2), bits, 0),)
    return BitRange(index - 6, 12, 4, 0), BitRange(2, 2 * index, 2, 4)


def resident_bytes(form: BlockFormat, shape: Sequence[int]) -> int:
    """What a weight ``[out, in]`` that stays in such blocks takes on a CPU, in bytes."""
    return prod(shape) // form.block * form.nbytes
