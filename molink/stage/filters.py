"""top_k, top_p and min_p as one threshold per row: every weight at or above it stays.

The semantics are those of Hugging Face's processors in the order top_k, top_p, min_p, except that
tokens that weigh exactly as much as the last one kept stay too: so the result does not depend on
how a device breaks ties.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from molink.wire.data import Sampling

#: Likeliest tokens looked at first; the whole vocabulary is sorted only where none suffices.
_CANDIDATES = (64, 2048)


def filter_weights(weights: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Weights ``[n, V]`` (each row's greatest is 1) with 0 for what the filters exclude."""
    limits = [s.top_k if 0 < s.top_k < weights.shape[1] else 0 for s in samplings]
    cut = [i for i, s in enumerate(samplings) if limits[i] or s.top_p < 1.0]
    if not cut and not any(s.min_p for s in samplings):
        return weights
    least = torch.tensor([s.min_p for s in samplings], device=weights.device)
    if cut:
        where = torch.tensor(cut, device=weights.device)
        found = _cut(weights[where], [limits[i] for i in cut], [samplings[i].top_p for i in cut])
        least[where] = torch.maximum(least[where], found)
    # A product, since masked_fill is several times slower on a CPU.
    return weights * (weights >= least[:, None])


def _cut(weights: Tensor, limits: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """The least weight that top_k (0 = off) and top_p keep, per row."""
    device, vocabulary = weights.device, weights.shape[1]
    counts = torch.tensor(limits, device=device)
    shares = torch.tensor([p if p < 1.0 else math.inf for p in top_p], device=device)
    least = weights.new_zeros(len(weights))
    left = torch.arange(len(weights), device=device)
    for candidates in (*(size for size in _CANDIDATES if size < vocabulary), vocabulary):
        found, enough = _cut_among(weights[left], counts[left], shares[left], candidates)
        least[left] = found
        left = left[~enough]
        if not len(left):
            break
    return least


def _cut_among(
    weights: Tensor, counts: Tensor, shares: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """Thresholds found among each row's likeliest tokens, and whether these were enough."""
    limited = counts > 0
    likeliest = weights.topk(candidates, dim=-1).values
    kth = likeliest.gather(1, (counts.clamp(1, candidates) - 1)[:, None]) * limited[:, None]
    # Tokens that tie with the k-th stay, wherever they are in the row.
    total = (weights * (weights >= kth)).sum(dim=-1, keepdim=True, dtype=torch.float64)
    before = likeliest.cumsum(dim=-1, dtype=torch.float64) - likeliest
    inside = before < shares[:, None] * total
    inside[:, 0] = True
    last = (inside & (likeliest >= kth)).sum(dim=-1, keepdim=True) - 1
    enough = torch.where(limited, counts <= candidates, ~inside[:, -1])
    return likeliest.gather(1, last)[:, 0], enough
