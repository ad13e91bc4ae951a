"""What a stage is given to compute."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Consecutive rows of one request: its tokens at positions ``start … start + count - 1``.

    ``blocks`` is the request's whole block table: block ``i`` holds the keys and values of
    positions ``i * block_size …``. One row after the first is a decode row, more are a prefill
    chunk; all earlier positions must have been computed in these blocks before.

    ``max_positions`` is how many tokens the request may come to have, 0 if no more than now: by
    that, models that rotate long sequences differently (LongRoPE) treat all its rows alike.
    Requests that share blocks must agree on it.
    """

    start: int
    count: int
    blocks: Sequence[int]
    max_positions: int = 0

    @property
    def end(self) -> int:
        """The request's tokens after these rows."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StageInput:
    """Rows of a micro-batch, token-flat: the rows of all ``sequences`` one after the other.

    The first stage gets ``tokens`` (int64 ``[T]``), any other ``hidden`` (``[T, hidden_size]``, any
    float dtype). The last stage returns logits of the rows ``logit_rows`` (indices into the T).
    """

    tokens: Tensor | None
    hidden: Tensor | None
    sequences: tuple[SequenceRows, ...]
    logit_rows: tuple[int, ...] = ()
