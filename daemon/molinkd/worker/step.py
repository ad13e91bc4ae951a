"""One fused forward pass of a stage: what goes in, what comes out."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch

from molink.errors import MolinkError
from molink.ring.work import Segment, SegmentResult
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.sampling.drafts import accepted, sample_rows
from molink.stage.sampling.sampler import SampledToken, sample
from molink.stage.stage import Stage
from molink.stage.to_device import download
from molink.stage.torch_dtypes import TORCH_DTYPES
from molink.wire.messages.data import Choice, Rows, Sampled, TopLogprobs, Volume
from molinkd.worker.request_table import RequestState, RequestTable

log = logging.getLogger(__name__)


@torch.inference_mode()
def run_step(
    stage: Stage, requests: RequestTable, segments: Sequence[Segment]
) -> list[SegmentResult]:
    """Run all segments as one token-flat forward pass, decode and prefill rows together.

    A request that failed at an earlier stage arrives as rows that are not finite. They are computed
    as zeros, so that nothing unusable enters the KV pool, and leave as NaN again, so that the tail
    reports the request as failed.
    """
    groups = [rows for segment in segments for rows in segment.volume.rows]
    # All tables first: rows already in flight rely on them, even if this step fails.
    for rows in groups:
        requests[rows.request].blocks.extend(rows.blocks)
    for rows in groups:
        if rows.source >= 0:
            stage.copy_block(rows.source, requests[rows.request].blocks, rows.start)
    tokens, hidden = _gather_input(stage, segments)
    if hidden is not None:
        hidden = _mark_failed(requests, groups, hidden)
    batch = StageInput(
        tokens=tokens,
        hidden=hidden,
        sequences=tuple(
            sequence
            for segment in segments
            for rows in segment.volume.rows
            for sequence in _sequences(rows, requests[rows.request], segment.volume.prefill)
        ),
        logit_rows=_sampling_rows(requests, groups),
    )
    return _results(stage, requests, segments, stage.forward(batch))


@torch.inference_mode()
def failed_step(
    stage: Stage, requests: RequestTable, segments: Sequence[Segment]
) -> list[SegmentResult]:
    """The results of a step that could not be run: all of its requests have failed."""
    groups = [rows for segment in segments for rows in segment.volume.rows]
    for rows in groups:
        requests[rows.request].failed = True
    if stage.is_last:
        shape = (len(_sampling_rows(requests, groups)), stage.config.vocab_size)
        return _results(stage, requests, segments, torch.empty(shape))
    shape = (sum(rows.count for rows in groups), stage.config.hidden_size)
    output = torch.empty(shape, dtype=TORCH_DTYPES[stage.travel_dtype])
    return _results(stage, requests, segments, output)


def _gather_input(
    stage: Stage, segments: Sequence[Segment]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Token ids ``[T]`` at the first stage, hidden rows ``[T, H]`` at the others."""
    if stage.is_first:
        ids = [token for segment in segments for token in _kept_tokens(segment)]
        return torch.tensor(ids, dtype=torch.int64), None
    parts = []
    for segment in segments:
        rows = torch.frombuffer(segment.data, dtype=TORCH_DTYPES[stage.travel_dtype])
        rows = rows.view(-1, stage.config.hidden_size)
        parts.append(rows if segment.kept is None else rows[list(segment.kept)])
    return None, parts[0] if len(parts) == 1 else torch.cat(parts)


def _mark_failed(
    requests: RequestTable, groups: Sequence[Rows], hidden: torch.Tensor
) -> torch.Tensor:
    """Find requests with unusable rows in ``hidden`` ``[T, H]``; returns it with these as zeros."""
    usable = torch.isfinite(hidden).all(dim=1)
    if bool(usable.all()):
        return hidden
    first = 0
    for rows in groups:
        if not bool(usable[first : first + rows.count].all()):
            if not requests[rows.request].failed:
                log.warning("rows of request %d came that can't be used", rows.request)
            requests[rows.request].failed = True
        first += rows.count
    return hidden.masked_fill(~usable[:, None], 0)


def _sequences(rows: Rows, state: RequestState, prefill: bool) -> Iterator[SequenceRows]:
    """A piece of a prompt at once; drafts each as a decode row, as the token will be at last."""
    each = rows.count if prefill else 1
    for start in range(rows.start, rows.start + rows.count, each):
        yield SequenceRows(start, each, state.blocks, state.reach)


def _kept_tokens(segment: Segment) -> Sequence[int]:
    tokens: Sequence[int] = segment.data
    if segment.kept is None:
        return tokens
    return [tokens[index] for index in segment.kept]


def _sampling_rows(requests: RequestTable, groups: Sequence[Rows]) -> tuple[int, ...]:
    """Flat index of the last row of each group that samples, and of its rows since its drafts."""
    indices, end = list[int](), 0
    for rows in groups:
        end += rows.count
        if _samples(requests, rows):
            indices += range(end - 1 - len(rows.checked), end)
    return tuple(indices)


def _samples(requests: RequestTable, rows: Rows) -> bool:
    """Whether tokens are wanted of a group, at the tail: not if it went ahead of another token."""
    return rows.sample and rows.follows(*requests[rows.request].last)


def _results(
    stage: Stage, requests: RequestTable, segments: Sequence[Segment], output: torch.Tensor
) -> list[SegmentResult]:
    """Cut the fused output, rows ``[T, H]`` or logits ``[samples, V]``, into its volumes."""
    if stage.is_last:
        return _sample(segments, requests, output)
    parts, first = [], 0
    for segment in segments:
        begin = first
        for rows in segment.volume.rows:
            if requests[rows.request].failed:
                output[first : first + rows.count] = torch.nan
            first += rows.count
        parts.append(output[begin:first])
    return [
        SegmentResult(segment.volume, data, None)
        for segment, data in zip(segments, download(parts), strict=True)
    ]


def _sample(
    segments: Sequence[Segment], requests: RequestTable, logits: torch.Tensor
) -> list[SegmentResult]:
    """Sample tokens for every group that wants them; ``logits`` is ``[samples, V]``."""
    groups = [rows for segment in segments for rows in segment.volume.rows]
    wanted = {id(rows): rows for rows in groups if _samples(requests, rows)}
    inputs = []
    for rows in wanted.values():
        state = requests[rows.request]
        masks = _allowed(state, rows.checked)
        inputs += sample_rows(rows, state.sampling, state.history, masks)
    drawn = iter(sample(logits, inputs) if inputs else [])
    results = []
    for segment in segments:
        pairs = [
            (rows, accepted(list(islice(drawn, 1 + len(rows.checked))), rows.checked))
            if id(rows) in wanted
            else (rows, None)
            for rows in segment.volume.rows
        ]
        results.append(_sampled(segment.volume, requests, pairs))
    return results


def _allowed(state: RequestState, drafts: Sequence[int]) -> Sequence[bytes] | None:
    """The tokens that its grammar allows next, and after each draft.

    ``None`` if it has none, or it fails with it.
    """
    if state.constraint is None or state.failed:
        return None
    try:
        return state.constraint.allowed(drafts)
    except MolinkError as error:
        log.warning("a request fails: %s", error)
        state.failed = True
        return None


def _sampled(
    volume: Volume,
    requests: RequestTable,
    pairs: Iterable[tuple[Rows, Sequence[SampledToken] | None]],
) -> SegmentResult:
    """Put a volume's tokens into messages, and into the history where penalties need it.

    ``None`` are those of a group of which none are wanted.
    """
    choices, tops, failed = list[Choice](), list[TopLogprobs](), list[int]()
    for rows, drawn in pairs:
        state, first = requests[rows.request], rows.start + rows.count - len(rows.checked)
        if state.failed or (drawn is not None and not drawn):
            failed.append(rows.request)
            continue
        if not drawn:
            continue
        state.last = first + len(drawn) - 1, drawn[-1].token
        if state.sampling.needs_history:
            state.history.add_generated(token.token for token in drawn)
        if state.constraint is not None:
            state.constraint.add(token.token for token in drawn)
        for position, token in enumerate(drawn, first):
            choices.append(Choice(rows.request, position, token.token, token.logprob))
            if token.top:
                ids, logprobs = zip(*token.top, strict=True)
                tops.append(TopLogprobs(rows.request, position, ids, logprobs))
    sampled = Sampled(volume.tick, tuple(choices), tuple(failed))
    return SegmentResult(volume, None, sampled, tuple(tops))
