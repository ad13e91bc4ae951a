"""One fused forward pass of a stage."""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from molink.facts.images import FIRST_IMAGE_ID
from molink.ring.step import StepInput, StepOutput
from molink.stage.batch import SequenceRows, StageInput, StageOutput
from molink.stage.device_copy import download_rows
from molink.stage.stage import Stage
from molink.stage.torch_dtypes import TORCH_DTYPES
from molink.wire.messages.data_plane import RequestSlice, Volume
from molinkd.worker.image_rows import collect_image_rows
from molinkd.worker.mtp_drafts import add_mtp_drafts
from molinkd.worker.request_table import RequestTable, StageRequest
from molinkd.worker.sampler import plan_sampling, pool_step, sample_step

log = logging.getLogger(__name__)


@torch.inference_mode()
def run_step(
    stage: Stage,
    requests: RequestTable,
    step_inputs: Sequence[StepInput],
    between_layers: Callable[[], None] | None = None,
) -> list[StepOutput]:
    """Run decode and prefill rows of all inputs as one token-flat forward pass.

    ``between_layers`` is called as by :meth:`.Stage.compute_step`.

    Rows of a request that failed at an earlier stage arrive as NaN. They are computed as zeros, to
    keep NaN out of the KV pool, and leave as NaN again, so that the last stage reports the failure.
    """
    groups = [rows for step_input in step_inputs for rows in step_input.volume.slices]
    # Extend all block tables first: rows in flight rely on them even if this step fails.
    for rows in groups:
        requests[rows.request].blocks.extend(rows.blocks)
        if requests[rows.request].adapter > len(stage.config.adapters):
            requests[rows.request].failed = True  # the base must not answer in its place
    for rows in groups:
        if rows.copy_from_block >= 0:
            stage.copy_block(rows.copy_from_block, requests[rows.request].blocks, rows.start)
        _restore_state(stage, requests[rows.request], rows)
    tokens, hidden = _gather_input(stage, step_inputs)
    if hidden is not None:
        hidden = _mark_failed(requests, groups, hidden)
    wanted = plan_sampling(step_inputs, requests, stage.config.vocab_size) if stage.is_last else []
    batch = StageInput(
        tokens=tokens,
        hidden=hidden,
        sequences=tuple(
            sequence
            for step_input in step_inputs
            for rows in step_input.volume.slices
            for sequence in _split_sequences(
                rows, requests[rows.request], step_input.volume.prefill
            )
        ),
        logit_rows=tuple(row for one in wanted for row in one.logit_rows),
        image_rows=collect_image_rows(groups, requests) if stage.is_first else None,
    )
    output = stage.compute_step(batch, between_layers)
    for step_input in step_inputs:
        _copy_states(stage, requests, step_input.volume)
    if stage.is_last and not stage.config.has_output_head:
        return pool_step(step_inputs, requests, wanted, output.rows)
    if stage.is_last:
        results = sample_step(step_inputs, requests, wanted, output, stage.draw_rows)
        if output.normed is None:
            return results
        return add_mtp_drafts(stage, requests, step_inputs, output.normed, results)
    return _split_output(requests, step_inputs, output.rows)


@torch.inference_mode()
def fail_step(
    stage: Stage, requests: RequestTable, step_inputs: Sequence[StepInput]
) -> list[StepOutput]:
    """Return the results of a step that failed: all of its requests have failed."""
    groups = [rows for step_input in step_inputs for rows in step_input.volume.slices]
    for rows in groups:
        requests[rows.request].failed = True
    if stage.is_last:
        empty = torch.empty(0, stage.config.vocab_size)
        return sample_step(step_inputs, requests, [], StageOutput(empty))
    shape = (sum(rows.count for rows in groups), stage.config.hidden_size)
    output = torch.empty(shape, dtype=TORCH_DTYPES[stage.wire_dtype])
    return _split_output(requests, step_inputs, output)


def _restore_state(stage: Stage, state: StageRequest, rows: RequestSlice) -> None:
    """Copy the snapshot that the first rows of a request continue.

    A request fails if its state is not that before its rows.
    """
    if state.copy_from_state >= 0:
        stage.copy_state(state.copy_from_state, state.state_slot)
        state.copy_from_state = -1
    if not state.failed and not stage.has_state(state.state_slot, rows.start):
        log.warning("request %d has no state after %d tokens", rows.request, rows.start)
        state.failed = True


def _copy_states(stage: Stage, requests: RequestTable, volume: Volume) -> None:
    """Copy states to snapshots after the rows of ``volume`` that have run."""
    ends = {(rows.request, rows.start + rows.count) for rows in volume.slices}
    for copy in volume.state_copies:
        if (copy.request, copy.end) in ends:
            stage.copy_state(requests[copy.request].state_slot, copy.target)


def _gather_input(
    stage: Stage, step_inputs: Sequence[StepInput]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Token ids ``[T]`` at the first stage, hidden rows ``[T, H]`` at the others."""
    if stage.is_first:
        ids = [token for step_input in step_inputs for token in _verified_tokens(step_input)]
        text = [token if token < FIRST_IMAGE_ID else 0 for token in ids]
        return torch.tensor(text, dtype=torch.int64), None
    parts = []
    for step_input in step_inputs:
        rows = torch.frombuffer(step_input.data, dtype=TORCH_DTYPES[stage.wire_dtype])
        rows = rows.view(-1, stage.config.hidden_size)
        parts.append(rows if step_input.row_indices is None else rows[list(step_input.row_indices)])
    return None, parts[0] if len(parts) == 1 else torch.cat(parts)


def _mark_failed(
    requests: RequestTable, groups: Sequence[RequestSlice], hidden: torch.Tensor
) -> torch.Tensor:
    """Mark requests whose ``hidden`` rows ``[T, H]`` are not finite; return ``hidden`` with these
    zeroed.
    """
    usable = torch.isfinite(hidden).all(dim=1)
    if bool(usable.all()):
        return hidden
    first = 0
    for rows in groups:
        if not bool(usable[first : first + rows.count].all()):
            if not requests[rows.request].failed:
                log.warning("rows of request %d are not finite", rows.request)
            requests[rows.request].failed = True
        first += rows.count
    return hidden.masked_fill(~usable[:, None], 0)


def _split_sequences(
    rows: RequestSlice, state: StageRequest, prefill: bool
) -> Iterator[SequenceRows]:
    """Split a slice into sequences: a prompt chunk is one, each draft is a decode row."""
    each, drafts = rows.count if prefill else 1, rows.start + rows.count - len(rows.drafts)
    for start in range(rows.start, rows.start + rows.count, each):
        yield SequenceRows(
            start,
            each,
            state.blocks,
            state.max_positions,
            state.state_slot,
            state.adapter,
            state.image_spans,
            is_draft=start >= drafts,
        )


def _verified_tokens(step_input: StepInput) -> Sequence[int]:
    tokens: Sequence[int] = step_input.data
    if step_input.row_indices is None:
        return tokens
    return [tokens[index] for index in step_input.row_indices]


def _split_output(
    requests: RequestTable, step_inputs: Sequence[StepInput], output: torch.Tensor
) -> list[StepOutput]:
    """Split the fused output rows ``[T, H]`` by volume."""
    parts, first = [], 0
    for step_input in step_inputs:
        begin = first
        for rows in step_input.volume.slices:
            if requests[rows.request].failed:
                output[first : first + rows.count] = torch.nan
            first += rows.count
        parts.append(output[begin:first])
    return [
        StepOutput(step_input.volume, data, None)
        for step_input, data in zip(step_inputs, download_rows(parts), strict=True)
    ]
