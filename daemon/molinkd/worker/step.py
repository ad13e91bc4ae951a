"""One fused forward pass of a stage: what goes in, what comes out."""

import logging
from collections.abc import Iterator, Sequence

import torch

from molink.ring.work import Segment, SegmentResult
from molink.stage.batch import SequenceRows, StageInput
from molink.stage.stage import Stage
from molink.stage.to_device import download
from molink.stage.torch_dtypes import TORCH_DTYPES
from molink.wire.messages.data import Rows
from molinkd.worker.request_table import RequestState, RequestTable
from molinkd.worker.tail import plan_sampling, sample_step

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
    wanted = plan_sampling(segments, requests, stage.config.vocab_size) if stage.is_last else []
    batch = StageInput(
        tokens=tokens,
        hidden=hidden,
        sequences=tuple(
            sequence
            for segment in segments
            for rows in segment.volume.rows
            for sequence in _sequences(rows, requests[rows.request], segment.volume.prefill)
        ),
        logit_rows=tuple(row for one in wanted for row in one.logit_rows),
    )
    output = stage.forward(batch)
    if stage.is_last:
        return sample_step(segments, requests, wanted, output)
    return _cut(requests, segments, output)


@torch.inference_mode()
def failed_step(
    stage: Stage, requests: RequestTable, segments: Sequence[Segment]
) -> list[SegmentResult]:
    """The results of a step that could not be run: all of its requests have failed."""
    groups = [rows for segment in segments for rows in segment.volume.rows]
    for rows in groups:
        requests[rows.request].failed = True
    if stage.is_last:
        return sample_step(segments, requests, [], torch.empty(0, stage.config.vocab_size))
    shape = (sum(rows.count for rows in groups), stage.config.hidden_size)
    output = torch.empty(shape, dtype=TORCH_DTYPES[stage.travel_dtype])
    return _cut(requests, segments, output)


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


def _cut(
    requests: RequestTable, segments: Sequence[Segment], output: torch.Tensor
) -> list[SegmentResult]:
    """Cut the fused output, rows ``[T, H]``, into its volumes."""
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
