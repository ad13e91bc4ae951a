"""Input of a stage's forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from molink.facts.images import ImageSpan


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Consecutive rows of one request, at positions ``start … start + count - 1``.

    ``blocks`` is the request's whole block table: block ``i`` holds KV of positions ``i *
    block_size …``. A single row after the first position is a decode row, several rows are a
    prefill chunk. KV of all earlier positions must be in these blocks.

    ``max_positions`` is the length that the request may reach, 0 for its current length. It selects
    the angles of models that rotate long sequences differently (LongRoPE); requests that share
    blocks must agree on it. Recurrent layers keep the request's state in ``state_slot``, and clear
    it at position 0; a row that ``is_draft`` follows the request's other rows, and need not be
    right. ``adapter`` is the number of the request's adapter, 0 for none. ``images`` are the images
    of its prompt.
    """

    start: int
    count: int
    blocks: Sequence[int]
    max_positions: int = 0
    state_slot: int = 0
    adapter: int = 0
    images: tuple[ImageSpan, ...] = ()
    is_draft: bool = False

    @property
    def end(self) -> int:
        """Length of the request up to and including these rows."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Results of a step, on the device. The next step may overwrite them.

    ``rows`` are the rows for the next stage, or the last stage's logits. ``greedy`` is the result
    of :func:`~molink.stage.sampling.greedy.find_greedy` for the logits, if it was part of a CUDA
    graph. ``normed`` has all rows that the last stage's output head reads (``[T, hidden_size]``),
    if the stage has an MTP layer.
    """

    rows: Tensor
    greedy: Tensor | None = None
    normed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MtpInput:
    """Rows ``[T, hidden_size]`` that the output head reads, and the token after each in ``tokens``.

    ``sequences`` has their positions, in order; ``logit_rows`` selects the rows whose logits are
    computed.
    """

    normed: Tensor
    tokens: Sequence[int]
    sequences: tuple[SequenceRows, ...]
    logit_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MtpOutput:
    """Results of the ``logit_rows``.

    They are rows ``[n, hidden_size]`` that the output head reads, and float32 logits ``[n,
    vocab_size]`` of the token after the next.
    """

    normed: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Image rows that replace the embeddings of the step's rows ``indices``.

    ``rows`` comes from :meth:`.VisionTower.encode_image`, on the host in the compute type: ``[n,
    hidden * (1 + layers)]``. The first ``hidden`` columns replace the embeddings; each further
    group of ``hidden`` columns is added after one of the first layers.
    """

    indices: Sequence[int]
    rows: Tensor


@dataclass(frozen=True, slots=True)
class StageInput:
    """Token-flat rows of a micro-batch, in the order of ``sequences``.

    The first stage gets ``tokens`` (int64 ``[T]``), other stages ``hidden`` (``[T, hidden_size]``,
    any float dtype). The last stage returns logits of the rows ``logit_rows``, or these rows
    normed. ``image_rows`` replace embeddings, so their ``tokens`` may be any ids of the vocabulary.
    """

    tokens: Tensor | None
    hidden: Tensor | None
    sequences: tuple[SequenceRows, ...]
    logit_rows: tuple[int, ...] = ()
    image_rows: ImageRows | None = None
