"""Samples tokens from the last stage's logits."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import torch
from torch import Tensor

from molink.errors import MolinkError
from molink.facts.drafts import MAX_DRAFTS
from molink.ring.step import StepInput, StepOutput
from molink.stage.batch import StageOutput
from molink.stage.device_copy import download_tensors
from molink.stage.sampling.compiled_draws import DrawRows
from molink.stage.sampling.draft_verification import accept_tokens, find_certain_tokens, sample_rows
from molink.stage.sampling.sampler import SampledToken, sample_tokens
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    ForcedTokens,
    PooledRow,
    RequestSlice,
    SampledId,
    SamplerOutput,
    TopLogprobs,
    Volume,
)
from molinkd.worker.request_table import RequestTable, StageRequest

log = logging.getLogger(__name__)

#: Stands for the token of a pooled row.
_NO_TOKEN = SampledToken(0)


@dataclass(slots=True)
class SampledSlice:
    """A slice to sample from. ``first_row`` is the index of its first sampled row in the step.

    ``drafts`` are its verified ones. ``certain_tokens`` has the only token that the grammar allows
    after each row, else -1; such rows need no logits. It and ``masks`` are computed before the
    forward pass, except for prompts, whose grammar may still be compiling.
    """

    request_slice: RequestSlice
    request: StageRequest
    first_row: int
    drafts: Sequence[int] = ()
    masks: Sequence[bytes] | None = None
    certain_tokens: Sequence[int] = ()

    @property
    def logit_rows(self) -> Sequence[int]:
        """Rows of the step whose logits are needed."""
        rows = range(self.first_row, self.first_row + 1 + len(self.drafts))
        if not self.certain_tokens:
            return rows
        return [row for row, token in zip(rows, self.certain_tokens, strict=True) if token < 0]


def plan_sampling(
    step_inputs: Sequence[StepInput], requests: RequestTable, vocab_size: int
) -> list[SampledSlice]:
    """Return the slices of a step to sample from.

    A lookahead slice that does not continue the sampled token is left out.
    """
    found, end = list[SampledSlice](), 0
    for step_input in step_inputs:
        for rows in step_input.volume.slices:
            end += rows.count
            state = requests[rows.request]
            if rows.sample and rows.continues_from(*state.last_sampled):
                drafts = rows.verified_drafts
                one = SampledSlice(rows, state, end - 1 - len(drafts), drafts)
                if state.matcher is not None and not step_input.volume.prefill:
                    one.masks = _allowed_masks(state, drafts)
                    if one.masks is not None and state.sampling_params.logprobs < 0:
                        one.certain_tokens = find_certain_tokens(one.masks, vocab_size)
                found.append(one)
    return found


def sample_step(
    step_inputs: Sequence[StepInput],
    requests: RequestTable,
    wanted: Sequence[SampledSlice],
    output: StageOutput,
    draw_rows: DrawRows | None = None,
) -> list[StepOutput]:
    """Sample tokens for all ``wanted`` slices from logits ``[n, vocab_size]``.

    ``draw_rows`` is the stage's.
    Failed requests are reported regardless of their logits.
    """
    inputs = []
    for one in wanted:
        request, chosen = one.request, one.request_slice
        if one.masks is None and request.matcher is not None:
            one.masks = _allowed_masks(request, one.drafts)
        first = chosen.start + chosen.count - len(one.drafts)
        rows = sample_rows(first, one.drafts, request.sampling_params, request.history, one.masks)
        if one.certain_tokens:
            pairs = zip(rows, one.certain_tokens, strict=True)
            rows = [row for row, token in pairs if token < 0]
        inputs += rows
    drawn = iter(sample_tokens(output.rows, inputs, output.greedy, draw_rows))
    found = {id(one.request_slice): _accept_tokens(one, drawn) for one in wanted}
    return _make_results(step_inputs, requests, found)


def pool_step(
    step_inputs: Sequence[StepInput],
    requests: RequestTable,
    wanted: Sequence[SampledSlice],
    rows: Tensor,
) -> list[StepOutput]:
    """Return the normed rows ``[n, hidden]`` of an embedding model, each with a token id of 0.

    ``rows`` are float32, one for each of the ``logit_rows`` of ``wanted``; drafts are ignored.
    """
    (values,) = download_tensors([rows])
    finite, first = torch.isfinite(values).all(dim=1).tolist(), 0
    found: dict[int, Sequence[SampledToken]] = {}
    pooled: dict[int, bytes] = {}
    for one in wanted:
        found[id(one.request_slice)] = [_NO_TOKEN] if finite[first] else []
        pooled[one.request_slice.request] = values[first].numpy().tobytes()
        first += len(one.logit_rows)
    results = _make_results(step_inputs, requests, found)
    payload = Payload("f32", (values.shape[1],))
    return [
        msgspec.structs.replace(
            result,
            pooled=tuple(
                (PooledRow(each.request, each.position, payload), pooled[each.request])
                for each in (() if result.sampled is None else result.sampled.sampled)
            ),
        )
        for result in results
    ]


def _make_results(
    step_inputs: Sequence[StepInput],
    requests: RequestTable,
    found: Mapping[int, Sequence[SampledToken]],
) -> list[StepOutput]:
    """The results of a step; ``found`` has the tokens of sampled slices, by their identity."""
    return [
        _make_result(
            step_input.volume,
            requests,
            [(rows, found.get(id(rows))) for rows in step_input.volume.slices],
        )
        for step_input in step_inputs
    ]


def precompute_masks(requests: RequestTable, results: Collection[StepOutput]) -> None:
    """Precompute the next step's token masks, off the critical path."""
    for result in results:
        if result.sampled is not None:
            forced = {each.request: each.tokens for each in result.sampled.forced}
            for request in {choice.request for choice in result.sampled.sampled}:
                state = requests.find_request(request)
                if state is not None and state.matcher is not None:
                    state.matcher.precompute_masks(forced.get(request, ()))


def _accept_tokens(
    one: SampledSlice, drawn: Iterator[SampledToken | None]
) -> Sequence[SampledToken]:
    drafts = one.drafts
    if not one.certain_tokens:
        return accept_tokens(list(islice(drawn, 1 + len(drafts))), drafts)
    tokens = [SampledToken(token) if token >= 0 else next(drawn) for token in one.certain_tokens]
    return accept_tokens(tokens, drafts)


def _allowed_masks(state: StageRequest, drafts: Sequence[int]) -> Sequence[bytes] | None:
    """Tokens that the grammar allows next, and after each draft.

    ``None`` without a grammar, or if the request fails with it.
    """
    if state.matcher is None or state.failed:
        return None
    try:
        return state.matcher.compute_masks(drafts)
    except MolinkError as error:
        log.warning("request failed: %s", error)
        state.failed = True
        return None


def _forced_tokens(state: StageRequest) -> Sequence[int]:
    """Tokens that the grammar forces next."""
    assert state.matcher is not None
    try:
        return state.matcher.forced_tokens(MAX_DRAFTS)
    except MolinkError:
        return ()  # the request's next step reports the error


def _make_result(
    volume: Volume,
    requests: RequestTable,
    pairs: Sequence[tuple[RequestSlice, Sequence[SampledToken] | None]],
) -> StepOutput:
    """Turn sampled tokens into messages, and add them to the history where penalties need it.

    A slice that is paired with ``None`` was not sampled.
    """
    choices, tops, failed, forced = (
        list[SampledId](),
        list[TopLogprobs](),
        list[int](),
        list[ForcedTokens](),
    )
    for rows, drawn in pairs:
        state, first = requests[rows.request], rows.start + rows.count - len(rows.verified_drafts)
        if state.failed or (drawn is not None and not drawn):
            failed.append(rows.request)
            continue
        if not drawn:
            continue
        state.last_sampled = first + len(drawn) - 1, drawn[-1].token
        if state.sampling_params.needs_history:
            state.history.add_generated(token.token for token in drawn)
        if state.matcher is not None:
            state.matcher.add_tokens(token.token for token in drawn)
            if tokens := _forced_tokens(state):
                forced.append(ForcedTokens(rows.request, tuple(tokens)))
        for position, token in enumerate(drawn, first):
            choices.append(SampledId(rows.request, position, token.token, token.logprob))
            if token.top:
                ids, logprobs = zip(*token.top, strict=True)
                tops.append(TopLogprobs(rows.request, position, ids, logprobs))
    sampled = SamplerOutput(volume.seq, tuple(choices), tuple(failed), tuple(forced))
    return StepOutput(volume, None, sampled, tuple(tops))
