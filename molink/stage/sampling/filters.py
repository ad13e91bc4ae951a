"""Computes top_k, top_p and min_p as one logit threshold per row.

Semantics are Hugging Face's in the order top_k, top_p, min_p, except that ties with the last kept
token are kept, so that results don't depend on how a device breaks ties.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.device_copy import gather_rows, upload_tensor
from molink.wire.messages.data_plane import SamplingParams

#: Lower temperatures are equivalent to greedy, and would overflow float32.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """Filter parameters and noise of rows, as columns ``[n, 1]`` (float64) of one tensor.

    Without ``has_top_k`` or ``has_min_p`` no row has that filter.
    """

    numbers: Tensor
    has_top_k: bool
    has_min_p: bool

    @classmethod
    def from_sampling(
        cls,
        params_of_rows: Sequence[SamplingParams],
        noise: Sequence[float],
        vocabulary: int,
        device: torch.device,
    ) -> "SamplingFilters":
        """Copy the filters of all rows, with a random number each, to the device."""
        numbers = [
            filter_numbers(s, each, vocabulary)
            for s, each in zip(params_of_rows, noise, strict=True)
        ]
        return cls(
            upload_tensor(torch.tensor(numbers, dtype=torch.float64), device),
            any(effective_top_k(s, vocabulary) for s in params_of_rows),
            any(s.min_p for s in params_of_rows),
        )

    def select_rows(self, rows: Sequence[int]) -> "SamplingFilters":
        """Select some rows."""
        if len(rows) == len(self.numbers):
            return self
        return SamplingFilters(gather_rows(self.numbers, rows), self.has_top_k, self.has_min_p)

    @property
    def temperatures(self) -> Tensor:
        """Temperatures, above 0."""
        return self.numbers[:, 0:1]

    @property
    def top_k(self) -> Tensor:
        """top_k; 0 = off."""
        return self.numbers[:, 1:2]

    @property
    def top_p(self) -> Tensor:
        """top_p; 1 = off."""
        return self.numbers[:, 2:3]

    @property
    def log_min_p(self) -> Tensor:
        """Logarithm of min_p; minus infinity = off."""
        return self.numbers[:, 3:4]

    @property
    def noise(self) -> Tensor:
        """Random numbers in [0, 1)."""
        return self.numbers[:, 4:5]


def filter_numbers(
    sampling_params: SamplingParams, noise: float, vocabulary: int
) -> tuple[float, float, float, float, float]:
    """Return a row's temperature, top_k, top_p, logarithm of min_p, and random number."""
    return (
        max(sampling_params.temperature, _MIN_TEMPERATURE),
        effective_top_k(sampling_params, vocabulary),
        sampling_params.top_p,
        math.log(sampling_params.min_p) if sampling_params.min_p else -math.inf,
        noise,
    )


def effective_top_k(sampling_params: SamplingParams, vocabulary: int) -> int:
    """top_k, or 0 if it excludes nothing."""
    return sampling_params.top_k if 0 < sampling_params.top_k < vocabulary else 0


def needs_total(sampling_params: SamplingParams, vocabulary: int) -> bool:
    """Whether :func:`find_cutoff` needs the sum of all weights: for top_p without top_k."""
    return sampling_params.top_p < 1.0 and not effective_top_k(sampling_params, vocabulary)


def is_filtered(sampling_params: SamplingParams, vocabulary: int) -> bool:
    """Whether any token is excluded."""
    return (
        sampling_params.top_p < 1.0
        or sampling_params.min_p > 0
        or effective_top_k(sampling_params, vocabulary) > 0
    )


def find_cutoff(
    likeliest: Tensor, totals: Tensor, filters: SamplingFilters
) -> tuple[Tensor, Tensor]:
    """Return the smallest kept logit ``[n, 1]``, and whether it is valid ``[n]``.

    ``likeliest`` ``[n, c]`` has each row's largest logits in descending order; ``totals`` ``[n,
    1]`` are sums of all weights, used if :func:`needs_total`. A threshold is valid only if
    ``likeliest`` has all kept tokens.
    """
    greatest, edge = likeliest[:, :1], likeliest[:, -1:]
    weights = weigh_logits(likeliest, greatest, filters)
    if filters.has_top_k:
        limited = filters.top_k > 0
        last_index = (filters.top_k.long() - 1).clamp(0, likeliest.shape[1] - 1)
        kth = likeliest.gather(1, last_index).where(limited, -math.inf)
        stays = likeliest >= kth
        totals = (weights * stays).sum(dim=-1, keepdim=True).where(limited, totals)
    inside = weights.cumsum(dim=-1) - weights < filters.top_p * totals
    inside |= filters.top_p >= 1.0
    inside[:, 0] = True
    last = (inside & stays if filters.has_top_k else inside).sum(dim=-1, keepdim=True) - 1
    threshold = likeliest.gather(1, last)
    if filters.has_min_p:
        floor = (greatest + filters.temperatures * filters.log_min_p).to(likeliest.dtype)
        threshold = torch.maximum(threshold, floor)
    certain = kth.where(limited, threshold) if filters.has_top_k else threshold
    # Ties at the edge may continue beyond it, unless they are impossible.
    return threshold, ((certain > edge) | edge.isneginf()).flatten()


def weigh_logits(logits: Tensor, greatest: Tensor, filters: SamplingFilters) -> Tensor:
    """Return float64 weights of logits ``[rows, vocab]`` relative to the largest ``[rows, 1]``."""
    return (logits.double() - greatest).div_(filters.temperatures).exp_()
