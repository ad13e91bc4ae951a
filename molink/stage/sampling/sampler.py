"""Picks tokens from logits, for all rows of a step at once.

Penalties and biases come first, then the temperature, then the filters, and then one number per
row, a function of (seed, position), picks from the cumulative distribution over the kept tokens in
order of their ids. Logprobs are those of the model itself: of the logits before any of this, as
vLLM reports them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.sampling.draw import BLOCK, block_maxima, draw
from molink.stage.sampling.noise import uniform
from molink.stage.sampling.penalties import SampleRow, penalize
from molink.stage.to_device import take_rows, upload_integers

__all__ = ["SampleRow", "SampledToken", "sample"]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token; ``logprob`` is NaN if not asked for, ``top`` pairs ids and logprobs, best first."""

    token: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | None]:
    """Pick a token per row of ``logits`` (float32 ``[n, V]``, left unchanged).

    Greedy where the temperature is 0, the lowest id winning a tie. ``None`` where a row has a NaN
    or an infinity.
    """
    if not rows:
        return []
    final = penalize(logits, rows)
    greatest, tokens = _greatest(final)
    finite = greatest.isfinite() & logits.amin(dim=-1).isfinite()
    picked, usable = torch.stack((tokens, finite.to(tokens.dtype))).tolist()
    random = [i for i, row in enumerate(rows) if row.sampling.temperature > 0 and usable[i]]
    if random:
        subset = take_rows(final, random)
        noise = [uniform(rows[i].sampling.seed, rows[i].position) for i in random]
        drawn = draw(subset, [rows[i].sampling for i in random], noise)
        for index, token in zip(random, drawn, strict=True):
            picked[index] = token
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs >= 0 and usable[i]]
    reports = _report(logits, rows, picked, wanted)
    return [
        reports.get(index, SampledToken(token)) if usable[index] else None
        for index, token in enumerate(picked)
    ]


def _greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest logit of each row and the lowest id that has it, ``[n]`` each."""
    maxima = block_maxima(logits)
    if maxima is None:
        values, ids = logits.max(dim=-1)
        return values, ids
    # A CPU looks for a place ten times slower than for a value: so only in the block that has it.
    values, blocks = maxima.max(dim=-1)
    index = blocks[:, None, None].expand(-1, -1, BLOCK)
    chosen = logits.view(len(logits), -1, BLOCK).gather(1, index)[:, 0]
    return values, blocks * BLOCK + chosen.argmax(dim=-1)


def _report(
    logits: Tensor, rows: Sequence[SampleRow], picked: Sequence[int], wanted: Sequence[int]
) -> dict[int, SampledToken]:
    """Tokens with logprobs, for the rows ``wanted``."""
    if not wanted:
        return {}
    chosen = upload_integers([picked[index] for index in wanted], logits.device)[:, None]
    logprobs = take_rows(logits, wanted).log_softmax(dim=-1)
    own = logprobs.gather(1, chosen).flatten().tolist()
    maximum = min(max(rows[index].sampling.logprobs for index in wanted), logits.shape[1])
    values, ids = (part.tolist() for part in logprobs.topk(maximum, dim=-1))
    reports: dict[int, SampledToken] = {}
    for place, index in enumerate(wanted):
        pairs = sorted(zip(ids[place], values[place], strict=True), key=lambda p: (-p[1], p[0]))
        top = tuple(pairs[: rows[index].sampling.logprobs])
        reports[index] = SampledToken(picked[index], own[place], top)
    return reports
