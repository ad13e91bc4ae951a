"""Which shapes there is code for, and the memory that attention needs, without LLVM."""

from collections.abc import Iterable
from dataclasses import dataclass

from molink.checkpoint.traits import Activation

#: Neighbouring positions that lie in one page for sure.
HALF_PAGE = 16
#: Positions whose scores are weighed together, before those after them: at most so many bytes of
#: their values, so that these stay in a cache close by, and so many positions.
_SPAN_BYTES, _SPAN = 1 << 16, 256
#: Numbers of which heads have a multiple: columns of values that are multiplied at once.
_COLUMN_MULTIPLE = 32
#: Sums in a register.
LANES = 16
#: Bytes of a number.
BF16, F32 = 2, 4
#: Queries of a pass, about: turning keys and values has to pay.
_PASS_QUERIES = 96
#: Parts that a thread is to have at least, so that none waits long for the others.
_MIN_PARTS_PER_THREAD = 4


def supports_rowwise(widths: Iterable[int], rotary: Iterable[int]) -> bool:
    """Whether rows of such widths, and rotations of so many dimensions, consist of vectors."""
    return not any(width % LANES for width in widths) and not any(
        dim % (2 * LANES) for dim in rotary
    )


def supports_gate(activation: Activation) -> bool:
    """Whether there is code for it."""
    return activation != "clamped_swiglu"


@dataclass(frozen=True, slots=True)
class AttentionKernelShape:
    """What the code is compiled for. ``groups`` is query heads per key-value head.

    Scores are ``scale * q·k``, a ``softcap`` above 0 bounds them to ``softcap * tanh(score /
    softcap)``. With ``sinks`` each query head has a score that takes its share of the weights.
    """

    kv_heads: int
    groups: int
    head_dim: int
    scale: float
    block_size: int
    softcap: float = 0.0
    sinks: bool = False

    @property
    def is_supported(self) -> bool:
        """Whether there is code for it."""
        return self.head_dim % _COLUMN_MULTIPLE == 0 and self.block_size % HALF_PAGE == 0

    @property
    def max_pass_rows(self) -> int:
        """Rows of a pass at most."""
        return max(1, _PASS_QUERIES // self.groups)

    def choose_pass_rows(self, rows: int, threads: int) -> int:
        """How many rows a pass has where a forward has ``max_pass_rows``: all threads are to have
        some."""
        shared = -(-rows * self.kv_heads // (_MIN_PARTS_PER_THREAD * threads))
        return min(self.max_pass_rows, max(1, self.max_pass_rows // 4, shared))


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """Where in a thread's memory is what, in bytes; a strip's columns come first.

    ``span`` is how many positions are weighed together.
    """

    span: int
    values: int
    queries: int
    maxima: int
    sums: int
    totals: int
    scores: int
    nbytes: int

    @classmethod
    def from_shape(cls, shape: AttentionKernelShape, strip: int, element: int) -> "ScratchLayout":
        """That of a shape, for keys that are taken ``strip`` positions at a time."""
        head = shape.head_dim * element
        span = max(2 * strip, min(_SPAN, _SPAN_BYTES // head // strip * strip))
        count = shape.max_pass_rows * shape.groups
        numbers = -(-count // LANES) * LANES * F32
        values = strip * head
        queries = values + span * head
        greatest = queries + count * head
        sums = greatest + numbers
        totals = sums + numbers
        scores = totals + count * shape.head_dim * F32
        return cls(
            span, values, queries, greatest, sums, totals, scores, scores + count * span * F32
        )
