"""Samples tokens for all rows of a step.

Penalties, biases and masks are applied first, then temperature and filters. Then one random number
per row, a function of (seed, position), picks a token from the cumulative distribution over kept
tokens in id order. Logprobs are of the raw logits, as in vLLM.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.device_copy import (
    download_tensors,
    gather_rows,
    upload_integers,
    upload_tensor,
)
from molink.stage.sampling.compiled_draws import DrawRows
from molink.stage.sampling.greedy import find_greedy
from molink.stage.sampling.logits_processors import (
    SampleRow,
    apply_masks,
    apply_penalties,
    is_plain,
)
from molink.stage.sampling.token_draws import TokenDraws, scatter_rows, uniform_noise
from molink.wire.messages.data_plane import SamplingParams

__all__ = ["SampleRow", "SampledToken", "sample_tokens"]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token; ``logprob`` is NaN if not requested, ``top`` has ids and logprobs, best first."""

    token: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def sample_tokens(
    logits: Tensor,
    rows: Sequence[SampleRow],
    greedy: Tensor | None = None,
    draw_rows: DrawRows | None = None,
) -> list[SampledToken | None]:
    """Sample a token per row of ``logits`` (float32 ``[n, V]``, not modified).

    Temperature 0 is greedy, with ties to the lowest id. ``greedy`` is the result of
    :func:`~molink.stage.sampling.greedy.find_greedy` for these logits, if known, ``draw_rows`` that
    of :func:`~molink.stage.sampling.create.create_draws`. A row's token is ``None`` if the row has
    NaN or infinity, or allows no token. Waits for a GPU once. Without ``draw_rows`` it waits again
    if a row's likeliest tokens don't suffice.
    """
    if not rows:
        return []
    random = [i for i, row in enumerate(rows) if row.sampling_params.temperature > 0]
    draws: TokenDraws | None = None
    if greedy is not None and all(map(is_plain, rows)):
        drawn = greedy
    elif draw_rows is not None:
        drawn = draw_rows(logits, rows)
    else:
        drawn, draws = _draw_by_torch(logits, rows, random, greedy)
    reports = _LogprobReports.from_tokens(logits, rows, drawn[:, 0])
    asked = () if reports is None else (reports.token_logprobs, reports.values, reports.ids)
    numbers, *parts = download_tensors([drawn, *asked])
    picked, usable, *certain = numbers.t().tolist()
    late: dict[int, int] = {}
    if draws is not None:
        unsettled = [n for n, i in enumerate(random) if usable[i] == 1 and not certain[0][i]]
        late = {random[n]: token for n, token in draws.draw_remaining(unsettled).items()}
        for index, token in late.items():
            picked[index] = token
    found = {} if reports is None else reports.read_tokens(picked, late, parts)
    # A copy that never arrived has no token.
    return [
        found.get(index, SampledToken(token)) if usable[index] == 1 and token >= 0 else None
        for index, token in enumerate(picked)
    ]


def _draw_by_torch(
    logits: Tensor, rows: Sequence[SampleRow], random: list[int], greedy: Tensor | None
) -> tuple[Tensor, TokenDraws | None]:
    """Return :func:`find_greedy`'s columns with drawn tokens, and whether each is final.

    Also returns how to draw the others.
    """
    final = apply_masks(apply_penalties(logits, rows), rows)
    if greedy is None or final is not logits:
        greedy = find_greedy(final, logits)
    if not random:
        return greedy, None
    tokens, finite = greedy.unbind(dim=1)
    draws = _prepare_draws(final, finite.bool(), rows, random)
    drawn, settled = draws.draw_candidates()
    tokens = scatter_rows(tokens.clone(), random, drawn)
    settled = scatter_rows(torch.ones_like(tokens), random, settled)
    return torch.stack((tokens, finite, settled), dim=1), draws


def _prepare_draws(
    final: Tensor, finite: Tensor, rows: Sequence[SampleRow], random: list[int]
) -> TokenDraws:
    """Prepare draws for rows that aren't greedy; non-finite rows count as zeros."""
    if final.device.type != "cpu" or not bool(finite.all()):
        final = final.masked_fill(~finite[:, None], 0.0)
    noise = [uniform_noise(rows[i].sampling_params.seed, rows[i].position) for i in random]
    return TokenDraws(gather_rows(final, random), [rows[i].sampling_params for i in random], noise)


def _known_ids(params: SamplingParams, vocabulary: int) -> list[int]:
    """Return the tokens of ``logprob_token_ids`` within the vocabulary, without duplicates."""
    return [token for token in dict.fromkeys(params.logprob_token_ids) if token < vocabulary]


@dataclass(frozen=True, slots=True)
class _LogprobReports:
    """Logprobs of rows that request them, on the device."""

    rows: list[int]
    counts: list[int]
    logprobs: Tensor
    token_logprobs: Tensor
    values: Tensor
    ids: Tensor

    @classmethod
    def from_tokens(
        cls, logits: Tensor, rows: Sequence[SampleRow], tokens: Tensor
    ) -> "_LogprobReports | None":
        """Compute logprobs of ``tokens`` (``[n]``, on the device), if any are requested."""
        wanted = [i for i, row in enumerate(rows) if row.sampling_params.logprobs >= 0]
        if not wanted:
            return None
        named = [_known_ids(rows[i].sampling_params, logits.shape[1]) for i in wanted]
        counts = [
            len(ids) or min(rows[i].sampling_params.logprobs, logits.shape[1])
            for i, ids in zip(wanted, named, strict=True)
        ]
        logprobs = gather_rows(logits, wanted).log_softmax(dim=-1)
        own = logprobs.gather(1, gather_rows(tokens, wanted)[:, None])
        values, ids = logprobs.topk(max(counts), dim=-1)
        for slot, given in enumerate(named):
            if given:
                ids[slot, : len(given)] = upload_integers(given, ids.device)
        if any(named):
            values = logprobs.gather(1, ids)
        return cls(wanted, counts, logprobs, own, values, ids)

    def read_tokens(
        self, picked: Sequence[int], late: Collection[int], parts: Sequence[Tensor]
    ) -> dict[int, SampledToken]:
        """Build tokens with logprobs from downloaded ``parts``: own logprobs, top values and ids.

        Rows sampled ``late`` need another download.
        """
        own, values, ids = (part.tolist() for part in parts)
        late_rows = [slot for slot, index in enumerate(self.rows) if index in late]
        if late_rows:
            tokens = [[picked[self.rows[slot]]] for slot in late_rows]
            chosen = upload_tensor(torch.tensor(tokens), self.token_logprobs.device)
            again = download_tensors([gather_rows(self.logprobs, late_rows).gather(1, chosen)])[
                0
            ].tolist()
            for slot, logprob in zip(late_rows, again, strict=True):
                own[slot] = logprob
        reports: dict[int, SampledToken] = {}
        for slot, (index, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            pairs = zip(ids[slot][:count], values[slot][:count], strict=True)
            top = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
            reports[index] = SampledToken(picked[index], own[slot][0], top)
        return reports
