"""Supported shapes, and the scratch memory of attention. Does not import LLVM."""

from collections.abc import Iterable
from dataclasses import dataclass

from molink.checkpoint.traits import Activation

#: Consecutive positions guaranteed to lie in one page.
HALF_PAGE = 16
#: Limits of a span in bytes of values, so that they stay in cache, and in positions.
_SPAN_BYTES, _SPAN = 1 << 16, 256
#: Head dimensions must be multiples of this: columns of values multiplied at once.
_COLUMN_MULTIPLE = 32
#: Sums per register.
LANES = 16
#: Bytes of an element.
BF16, F32 = 2, 4
#: Target number of queries per pass, to amortize transposing keys and values.
_PASS_QUERIES = 96
#: Minimum units per thread, for load balance.
_MIN_PARTS_PER_THREAD = 4


def supports_rowwise(widths: Iterable[int], rotary: Iterable[int]) -> bool:
    """Whether these widths and rotary dimensions are whole vectors."""
    return not any(width % LANES for width in widths) and not any(
        dim % (2 * LANES) for dim in rotary
    )


def supports_gate(activation: Activation) -> bool:
    """Whether an activation is supported."""
    return activation in ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class AttentionKernelShape:
    """Properties that code is compiled for. ``groups`` is query heads per KV head.

    Scores are ``scale * q·k``; a ``softcap`` above 0 bounds them to ``softcap * tanh(score /
    softcap)``. With ``sinks`` each query head has a score that takes part in the softmax only. With
    ``quantized`` keys and values are int8, and in a page each head's codes are followed by its bf16
    scales. Windows slide, or are ``chunked``: a row sees only its own chunk.
    """

    kv_heads: int
    groups: int
    head_dim: int
    scale: float
    block_size: int
    softcap: float = 0.0
    sinks: bool = False
    quantized: bool = False
    chunked: bool = False

    @property
    def is_supported(self) -> bool:
        """Whether the shape is supported."""
        return self.head_dim % _COLUMN_MULTIPLE == 0 and self.block_size % HALF_PAGE == 0

    @property
    def max_pass_rows(self) -> int:
        """Maximum rows of a pass."""
        return max(1, _PASS_QUERIES // self.groups)

    def choose_pass_rows(self, rows: int, threads: int) -> int:
        """Choose rows per pass for a forward of ``rows`` rows, so that all threads have work."""
        shared = -(-rows * self.kv_heads // (_MIN_PARTS_PER_THREAD * threads))
        return min(self.max_pass_rows, max(1, self.max_pass_rows // 4, shared))


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """Offsets in a thread's scratch, in bytes; a strip's columns come first.

    ``span`` is positions per span.
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
        """Create the layout for a shape, with keys in strips of ``strip`` positions."""
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
