"""Input of a stage's forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from molink.facts.images import ImageSpan


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Consecutive rows of one request, at positions ``start … start + count - 1``.

    ``blocks`` is the request's whole block table: block ``i`` holds KV of positions ``i *
    block_size …``. A single row after the first is a decode row, several are a prefill chunk; KV of
    all earlier positions must be in these blocks.

    ``max_positions`` is the length that the request may reach, 0 for its current one. Models that
    rotate long sequences differently (LongRoPE) choose by it; requests that share blocks must agree
    on it. Recurrent layers keep the request's state in ``state_slot``, and start afresh at position
    0. ``adapter`` is the number of the request's adapter, 0 for none. ``images`` are those of
    its prompt.
    """

    start: int
    count: int
    blocks: Sequence[int]
    max_positions: int = 0
    state_slot: int = 0
    adapter: int = 0
    images: tuple[ImageSpan, ...] = ()

    @property
    def end(self) -> int:
        """Tokens of the request up to and including these rows."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Results of a step, on the device. The next step may overwrite them.

    ``rows`` are those for the next stage, or logits of the last one, for which ``greedy`` has the
    result of :func:`~molink.stage.sampling.greedy.find_greedy` if it was part of a CUDA graph.
    ``normed`` are all rows of the last stage as the output head reads them (``[T, hidden_size]``),
    if it has an MTP layer.
    """

    rows: Tensor
    greedy: Tensor | None = None
    normed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MtpInput:
    """Rows ``[T, hidden_size]`` as the output head reads them, and the ``tokens`` after each.

    ``sequences`` has their positions, in order; logits are wanted of ``logit_rows``.
    """

    normed: Tensor
    tokens: Sequence[int]
    sequences: tuple[SequenceRows, ...]
    logit_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MtpOutput:
    """Of the ``logit_rows``: rows ``[n, hidden_size]`` as the output head reads them, and float32
    logits ``[n, vocab_size]`` of the token after the next."""

    normed: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows ``[n, hidden]`` of images, which replace the embeddings of the step's rows ``indices``.

    They are on the host, in the compute type.
    """

    indices: Sequence[int]
    rows: Tensor


@dataclass(frozen=True, slots=True)
class StageInput:
    """Token-flat rows of a micro-batch, in the order of ``sequences``.

    The first stage gets ``tokens`` (int64 ``[T]``), others ``hidden`` (``[T, hidden_size]``, any
    float dtype). The last stage returns logits of the rows ``logit_rows``, or their normed rows.
    ``tokens`` that stand for ``image_rows`` may be any of the vocabulary.
    """

    tokens: Tensor | None
    hidden: Tensor | None
    sequences: tuple[SequenceRows, ...]
    logit_rows: tuple[int, ...] = ()
    image_rows: ImageRows | None = None
