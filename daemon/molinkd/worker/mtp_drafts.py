"""Drafts by the last stage's layer for multi-token prediction, after it has sampled."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from molink.ring.step import StepInput, StepOutput
from molink.stage.batch import MtpInput, MtpOutput, SequenceRows
from molink.stage.device_copy import upload_integers
from molink.stage.sampling.greedy import find_likeliest
from molink.stage.stage import Stage
from molink.wire.messages.data_plane import MtpDrafts, RequestSlice, Volume
from molinkd.worker.request_table import RequestTable, StageRequest


@dataclass(slots=True)
class _DraftedSlice:
    """The rows of a slice whose next ``tokens`` are known; ``first_row`` is its first in the step.

    Up to ``max_drafts`` are predicted after these.
    """

    volume: Volume
    request_slice: RequestSlice
    request: StageRequest
    first_row: int
    tokens: Sequence[int]
    max_drafts: int
    drafts: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)

    @property
    def sequences(self) -> Iterator[SequenceRows]:
        """Its rows: a prompt chunk is one sequence, each decode row one."""
        start, count = self.request_slice.start, len(self.tokens)
        each = count if self.volume.prefill else 1
        for first in range(start, start + count, each):
            yield self._make_rows(first, each)

    @property
    def next_row(self) -> SequenceRows:
        """The row of its latest draft but one, from which the next is predicted."""
        return self._make_rows(self._next_position, 1)

    def add_draft(self, token: int, probability: float) -> None:
        """Add a draft, unless its probability is unusable."""
        if math.isfinite(probability):
            self.drafts.append(token)
            self.probabilities.append(probability)
        else:
            self.max_drafts = 0

    def wants_more(self, block_size: int, max_model_len: int) -> bool:
        """Whether to predict another draft, and the row for it has a block."""
        room = min(len(self.request.blocks) * block_size, max_model_len)
        return (
            len(self.drafts) < self.max_drafts
            and math.prod(self.probabilities) >= self.volume.min_probability
            and self._next_position < room
        )

    @property
    def _next_position(self) -> int:
        return self.request_slice.start + len(self.tokens) + len(self.drafts) - 1

    def _make_rows(self, start: int, count: int) -> SequenceRows:
        return SequenceRows(start, count, self.request.blocks, self.request.max_positions)


def add_mtp_drafts(
    stage: Stage,
    requests: RequestTable,
    step_inputs: Sequence[StepInput],
    normed: Tensor,
    results: Sequence[StepOutput],
) -> list[StepOutput]:
    """Store the KV of a step's ``normed`` rows, and add drafts to its ``results``.

    Rows of drafts that turned out wrong are overwritten, as at other layers.
    """
    found = _find_slices(requests, step_inputs, results)
    if not found:
        return list(results)
    made = _run_rows(stage, found, normed)
    active = [one for one in found if one.max_drafts]
    while active:
        for one, token, probability in zip(active, *find_likeliest(made.logits), strict=True):
            one.add_draft(token, probability)
        going = [
            index
            for index, one in enumerate(active)
            if one.wants_more(stage.block_size, stage.config.max_model_len)
        ]
        active = [active[index] for index in going]
        if active:
            made = stage.predict_tokens(
                MtpInput(
                    made.normed.index_select(0, upload_integers(going, made.normed.device)),
                    [one.drafts[-1] for one in active],
                    tuple(one.next_row for one in active),
                    tuple(range(len(active))),
                )
            )
    return [_add_drafts(result, found) for result in results]


def _run_rows(stage: Stage, found: Sequence[_DraftedSlice], normed: Tensor) -> MtpOutput:
    """Store the KV of all slices' rows; the result has the last one of each that wants drafts."""
    rows, tokens, wanted = list[int](), list[int](), list[int]()
    size = stage.config.vocab_size
    for one in found:
        rows += range(one.first_row, one.first_row + len(one.tokens))
        # Those of a prompt come from the scheduler and may stand for images; the embedding has none
        # for others, which on a GPU would end the process.
        tokens += (token if 0 <= token < size else 0 for token in one.tokens)
        if one.max_drafts:
            wanted.append(len(rows) - 1)
    if len(rows) < len(normed):
        normed = normed.index_select(0, upload_integers(rows, normed.device))
    sequences = tuple(sequence for one in found for sequence in one.sequences)
    return stage.predict_tokens(MtpInput(normed, tokens, sequences, tuple(wanted)))


def _find_slices(
    requests: RequestTable, step_inputs: Sequence[StepInput], results: Sequence[StepOutput]
) -> list[_DraftedSlice]:
    found, first = list[_DraftedSlice](), 0
    for step_input, result in zip(step_inputs, results, strict=True):
        volume = step_input.volume
        sampled = {
            (each.request, each.position): each.token
            for each in (() if result.sampled is None else result.sampled.sampled)
        }
        for rows in volume.slices:
            state = requests[rows.request]
            tokens = [] if state.failed else _find_next_tokens(rows, state, sampled)
            if tokens:
                is_sampled = (rows.request, rows.start + len(tokens)) in sampled
                most = volume.max_mtp_drafts if is_sampled else 0
                found.append(_DraftedSlice(volume, rows, state, first, tokens, most))
            first += rows.count
    return found


def _find_next_tokens(
    rows: RequestSlice, state: StageRequest, sampled: Mapping[tuple[int, int], int]
) -> list[int]:
    """The tokens after a slice's leading rows: of its prompt, or just sampled."""
    found, known = list[int](), state.known_tokens
    for position in range(rows.start + 1, rows.start + rows.count + 1):
        token = sampled.get((rows.request, position))
        if token is None:
            if position >= len(known):
                break
            token = known[position]
        found.append(token)
    return found


def _add_drafts(result: StepOutput, found: Sequence[_DraftedSlice]) -> StepOutput:
    drafts = tuple(
        MtpDrafts(
            one.request_slice.request,
            tuple(one.drafts),
            tuple(max(1, round(100 * probability)) for probability in one.probabilities),
        )
        for one in found
        if one.volume is result.volume and one.drafts
    )
    if not drafts or result.sampled is None:
        return result
    sampled = msgspec.structs.replace(result.sampled, mtp_drafts=drafts)
    return msgspec.structs.replace(result, sampled=sampled)
