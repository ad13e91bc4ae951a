"""Which shapes there is code for, and the memory that attention needs, without LLVM."""

from collections.abc import Iterable
from dataclasses import dataclass

from molink.checkpoint.traits import Activation

#: Positions that are multiplied at once, and those of them that lie in one page for sure.
STRIP, HALF = 32, 16
#: Columns of a strip of values that are multiplied at once.
CHUNK = 32
#: Sums in a register.
LANES = 16
#: Bytes of a number.
BF16, F32 = 2, 4
#: Queries of a pass, about: turning a strip of keys has to pay, and their scores to fit a cache.
_QUERIES = 48
#: Queries that are multiplied at once (``DotBf16.tile``); those of a row stay together.
_MAX_GROUPS = 12


def fits_rowwise(widths: Iterable[int], rotary: Iterable[int]) -> bool:
    """Whether rows of such widths, and rotations of so many dimensions, consist of vectors."""
    return not any(width % LANES for width in widths) and not any(
        dim % (2 * LANES) for dim in rotary
    )


def has_gate(activation: Activation) -> bool:
    """Whether there is code for it."""
    return activation != "clamped_swiglu"


@dataclass(frozen=True, slots=True)
class AttendShape:
    """What the code is compiled for. ``groups`` is query heads per key-value head.

    With ``sinks`` each query head has a score that takes its share of the weights.
    """

    kv_heads: int
    groups: int
    head_dim: int
    scale: float
    block_size: int
    sinks: bool = False

    @property
    def fits(self) -> bool:
        """Whether there is code for it."""
        whole = self.head_dim % CHUNK == 0 and self.block_size % HALF == 0
        return whole and self.groups <= _MAX_GROUPS

    @property
    def rows(self) -> int:
        """Rows of a pass at most."""
        return max(1, _QUERIES // self.groups)

    def scratch_bytes(self, positions: int) -> int:
        """Memory that a thread needs for rows that attend to at most so many positions."""
        width = (positions // STRIP + 2) * STRIP
        return Scratch.of(self).scores + self.rows * self.groups * width * F32


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where in a thread's memory is what, in bytes; the columns of a strip come first."""

    sums: int
    totals: int
    scores: int

    @classmethod
    def of(cls, shape: AttendShape) -> "Scratch":
        """That of a shape."""
        queries = shape.rows * shape.groups
        sums = STRIP * shape.head_dim * BF16
        totals = sums + -(-queries // LANES) * LANES * F32
        return cls(sums, totals, totals + queries * shape.head_dim * F32)
