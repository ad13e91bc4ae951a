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

from molink.stage.filters import filter_weights
from molink.stage.noise import uniform
from molink.stage.penalties import SampleRow, penalize

__all__ = ["SampleRow", "SampledToken", "sample"]

#: Below this only the likeliest token is left anyway, and float32 would not divide by it.
_LEAST_TEMPERATURE = 1e-6


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
    greatest, tokens = final.max(dim=-1)
    usable = (greatest.isfinite() & logits.amin(dim=-1).isfinite()).tolist()
    picked = tokens.tolist()
    random = [i for i, row in enumerate(rows) if row.sampling.temperature > 0 and usable[i]]
    if random:
        subset = final if len(random) == len(rows) else final[random]
        for index, token in zip(random, _draw(subset, [rows[i] for i in random]), strict=True):
            picked[index] = token
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs >= 0 and usable[i]]
    reports = _report(logits, rows, picked, wanted)
    return [
        reports.get(index, SampledToken(token)) if usable[index] else None
        for index, token in enumerate(picked)
    ]


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Sample every row of finite logits ``[n, V]`` with a temperature above 0."""
    device = logits.device
    temperatures = [[max(row.sampling.temperature, _LEAST_TEMPERATURE)] for row in rows]
    # Relative to the greatest, a small temperature can't overflow.
    relative = logits - logits.amax(dim=-1, keepdim=True)
    weights = relative.div_(torch.tensor(temperatures, device=device)).exp_()
    kept = filter_weights(weights, [row.sampling for row in rows])
    cumulative = kept.cumsum(dim=-1, dtype=torch.float64)
    noise = [[uniform(row.sampling.seed, row.position)] for row in rows]
    aims = cumulative[:, -1:] * torch.tensor(noise, dtype=torch.float64, device=device)
    found: list[int] = torch.searchsorted(cumulative, aims, right=True).flatten().tolist()
    return found


def _report(
    logits: Tensor, rows: Sequence[SampleRow], picked: Sequence[int], wanted: Sequence[int]
) -> dict[int, SampledToken]:
    """Tokens with logprobs, for the rows ``wanted``."""
    if not wanted:
        return {}
    chosen = torch.tensor([[picked[index]] for index in wanted], device=logits.device)
    logprobs = logits[list(wanted)].log_softmax(dim=-1)
    own = logprobs.gather(1, chosen).flatten().tolist()
    most = min(max(rows[index].sampling.logprobs for index in wanted), logits.shape[1])
    values, ids = (part.tolist() for part in logprobs.topk(most, dim=-1))
    reports: dict[int, SampledToken] = {}
    for place, index in enumerate(wanted):
        pairs = sorted(zip(ids[place], values[place], strict=True), key=lambda p: (-p[1], p[0]))
        top = tuple(pairs[: rows[index].sampling.logprobs])
        reports[index] = SampledToken(picked[index], own[place], top)
    return reports
