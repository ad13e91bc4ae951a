"""What the weights of a kind of blocks are as numbers, and what they take where they stay so.

A weight is a *code* of 4 to 8 bits. Groups of 16 or 32 codes share a scale, and some kinds add
something to each weight of a group::

    weight = scale · (code - offset) + added

Both are f16 numbers of the group, or (kinds ``K``) such numbers of a block of 256, times a whole
number of the group with 6 to 8 bits.
"""

from dataclasses import dataclass

from molink.gguf.blocks import Kind

#: Rows of a weight that lie together where a CPU multiplies by blocks: their number has to be a
#: multiple of it. CPUs with shorter registers take half as many.
ROWS = 32
_F16 = 2


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Of a kind: ``bits`` of a code, weights of a ``group`` and of a ``block``.

    Codes of 8 bits are signed. ``adds``: something is added. ``nested``: groups have whole numbers
    of one byte, signed where nothing is added.
    """

    bits: int
    offset: int
    group: int
    block: int
    adds: bool = False
    nested: bool = False

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return self.block // self.group

    @property
    def nbytes(self) -> int:
        """Bytes of a block in memory."""
        numbers = _F16 + self.groups * self.nested
        return self.block * self.bits // 8 + numbers * (1 + self.adds)


#: By the name of the kind. All others become numbers as they are loaded.
FORMATS = {
    "q4_0": BlockFormat(4, 8, 32, 32),
    "q4_1": BlockFormat(4, 0, 32, 32, adds=True),
    "q5_0": BlockFormat(5, 16, 32, 32),
    "q5_1": BlockFormat(5, 0, 32, 32, adds=True),
    "q8_0": BlockFormat(8, 0, 32, 32),
    "q4_k": BlockFormat(4, 0, 32, 256, adds=True, nested=True),
    "q5_k": BlockFormat(5, 0, 32, 256, adds=True, nested=True),
    "q6_k": BlockFormat(6, 32, 16, 256, nested=True),
}


def stays(kind: Kind, rows: int) -> bool:
    """Whether a weight of ``rows`` rows stays in its blocks on a CPU; others become numbers."""
    return kind.name in FORMATS and rows % ROWS == 0


def resident_bytes(kind: Kind, rows: int, row_bytes: int) -> int:
    """What a weight that stays takes there, of whose rows each has ``row_bytes`` in the file."""
    return rows * (row_bytes // kind.nbytes) * FORMATS[kind.name].nbytes
