"""What the last stage makes of a step's logits: tokens, and what has to follow them."""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from molink.errors import MolinkError
from molink.facts.drafts import MAX_DRAFTS
from molink.ring.work import Segment, SegmentResult
from molink.stage.sampling.drafts import accepted, certain_tokens, sample_rows
from molink.stage.sampling.sampler import SampledToken, sample
from molink.wire.messages.data import Choice, Forced, Rows, Sampled, TopLogprobs, Volume
from molinkd.worker.request_table import RequestState, RequestTable

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Wanted:
    """A row group that is sampled from; ``first`` of a step's rows is the first to be sampled.

    ``certain`` has the token after each row where a grammar leaves one only, else -1: what is
    certain takes no logits. It and ``masks`` are known before the rows are computed, but not those
    of prompts, whose grammar may still be compiled meanwhile.
    """

    rows: Rows
    state: RequestState
    first: int
    masks: Sequence[bytes] | None = None
    certain: Sequence[int] = ()

    @property
    def logit_rows(self) -> Iterator[int]:
        """Those of the step's rows whose logits it takes."""
        for index in range(1 + len(self.rows.checked)):
            if not self.certain or self.certain[index] < 0:
                yield self.first + index


def plan_sampling(
    segments: Sequence[Segment], requests: RequestTable, vocabulary: int
) -> list[Wanted]:
    """The groups that are sampled from; of logits of ``vocabulary`` tokens.

    Of one that went ahead of another token than was sampled, none are wanted.
    """
    found, end = list[Wanted](), 0
    for segment in segments:
        for rows in segment.volume.rows:
            end += rows.count
            state = requests[rows.request]
            if rows.sample and rows.follows(*state.last):
                one = Wanted(rows, state, end - 1 - len(rows.checked))
                if not segment.volume.prefill:
                    one.masks = _allowed(state, rows.checked)
                    if one.masks is not None and state.sampling.logprobs < 0:
                        one.certain = certain_tokens(one.masks, vocabulary)
                found.append(one)
    return found


def sample_step(
    segments: Sequence[Segment],
    requests: RequestTable,
    wanted: Sequence[Wanted],
    logits: torch.Tensor,
) -> list[SegmentResult]:
    """Sample tokens for every group that wants them; ``logits`` ``[n, V]`` of those that take any.

    A request that has failed is reported, whatever its logits are.
    """
    inputs = []
    for one in wanted:
        if one.masks is None:
            one.masks = _allowed(one.state, one.rows.checked)
        rows = sample_rows(one.rows, one.state.sampling, one.state.history, one.masks)
        certain = one.certain or (-1,) * len(rows)
        inputs += [row for row, token in zip(rows, certain, strict=True) if token < 0]
    drawn = iter(sample(logits, inputs) if inputs else [])
    found = {id(one.rows): _accepted(one, drawn) for one in wanted}
    return [
        _report(
            segment.volume,
            requests,
            [(rows, found.get(id(rows))) for rows in segment.volume.rows],
        )
        for segment in segments
    ]


def prepare(requests: RequestTable, results: Collection[SegmentResult]) -> None:
    """Find out which tokens may come next, before the next step asks; no one waits for it."""
    for result in results:
        if result.sampled is not None:
            forced = {each.request: each.tokens for each in result.sampled.forced}
            for request in {choice.request for choice in result.sampled.choices}:
                state = requests.get(request)
                if state is not None and state.constraint is not None:
                    state.constraint.prepare(forced.get(request, ()))


def _accepted(one: Wanted, drawn: Iterator[SampledToken | None]) -> Sequence[SampledToken]:
    drafts = one.rows.checked
    if not one.certain:
        return accepted(list(islice(drawn, 1 + len(drafts))), drafts)
    tokens = [SampledToken(token) if token >= 0 else next(drawn) for token in one.certain]
    return accepted(tokens, drafts)


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


def _forced(state: RequestState) -> Sequence[int]:
    """Tokens that its grammar leaves no choice about."""
    assert state.constraint is not None
    try:
        return state.constraint.forced(MAX_DRAFTS)
    except MolinkError:
        return ()  # the next step of it says why


def _report(
    volume: Volume,
    requests: RequestTable,
    pairs: Sequence[tuple[Rows, Sequence[SampledToken] | None]],
) -> SegmentResult:
    """Put a volume's tokens into messages, and into the history where penalties need it.

    ``None`` are those of a group of which none are wanted.
    """
    choices, tops, failed, forced = list[Choice](), list[TopLogprobs](), list[int](), list[Forced]()
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
            if tokens := _forced(state):
                forced.append(Forced(rows.request, tuple(tokens)))
        for position, token in enumerate(drawn, first):
            choices.append(Choice(rows.request, position, token.token, token.logprob))
            if token.top:
                ids, logprobs = zip(*token.top, strict=True)
                tops.append(TopLogprobs(rows.request, position, ids, logprobs))
    sampled = Sampled(volume.tick, tuple(choices), tuple(failed), tuple(forced))
    return SegmentResult(volume, None, sampled, tuple(tops))
