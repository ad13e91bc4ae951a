"""top_k, top_p and min_p as one threshold per row: every logit at or above it stays.

The semantics are those of Hugging Face's processors in the order top_k, top_p, min_p, except that
tokens as likely as the last one kept stay too: so the result does not depend on how a device
breaks ties.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.device_copy import gather_rows, upload_tensor
from molink.wire.messages.data_plane import SamplingParams

#: Below this only the likeliest token is left anyway, and float32 would not divide by it.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingFilters:
    """What the rows of a step ask for, as columns ``[n, 1]`` (float64) of one tensor."""

    numbers: Tensor

    @classmethod
    def from_sampling(
        cls, params_of_rows: Sequence[SamplingParams], vocabulary: int, device: torch.device
    ) -> "SamplingFilters":
        """The filters of all rows, in one copy to the device."""
        numbers = [
            [
                max(s.temperature, _MIN_TEMPERATURE),
                effective_top_k(s, vocabulary),
                s.top_p,
                math.log(s.min_p) if s.min_p else -math.inf,
            ]
            for s in params_of_rows
        ]
        return cls(upload_tensor(torch.tensor(numbers, dtype=torch.float64), device))

    def select_rows(self, rows: Sequence[int]) -> "SamplingFilters":
        """Those of some rows."""
        return (
            self
            if len(rows) == len(self.numbers)
            else SamplingFilters(gather_rows(self.numbers, rows))
        )

    @property
    def temperatures(self) -> Tensor:
        """Above 0."""
        return self.numbers[:, 0:1]

    @property
    def top_k(self) -> Tensor:
        """top_k; 0 is off."""
        return self.numbers[:, 1:2]

    @property
    def top_p(self) -> Tensor:
        """top_p; 1 is off."""
        return self.numbers[:, 2:3]

    @property
    def log_min_p(self) -> Tensor:
        """The logarithm of min_p; minus infinity is off."""
        return self.numbers[:, 3:4]


def effective_top_k(sampling_params: SamplingParams, vocabulary: int) -> int:
    """top_k, or 0 where it excludes nothing."""
    return sampling_params.top_k if 0 < sampling_params.top_k < vocabulary else 0


def needs_total(sampling_params: SamplingParams, vocabulary: int) -> bool:
    """Whether :func:`find_cutoff` needs the sum of all weights: top_p without top_k is a share of
    it."""
    return sampling_params.top_p < 1.0 and not effective_top_k(sampling_params, vocabulary)


def is_filtered(sampling_params: SamplingParams, vocabulary: int) -> bool:
    """Whether anything is excluded at all."""
    return (
        sampling_params.top_p < 1.0
        or sampling_params.min_p > 0
        or effective_top_k(sampling_params, vocabulary) > 0
    )


def find_cutoff(
    likeliest: Tensor, totals: Tensor, filters: SamplingFilters
) -> tuple[Tensor, Tensor]:
    """The least logits kept ``[n, 1]``, and whether ``likeliest`` has all that are kept ``[n]``.

    ``likeliest`` ``[n, c]`` are each row's greatest logits in descending order; ``totals``
    ``[n, 1]`` the sums of all weights of a row, used where :func:`needs_total`. A threshold means
    nothing where ``likeliest`` has not all that are kept, unless it is the whole row.
    """
    greatest, edge = likeliest[:, :1], likeliest[:, -1:]
    weights = weigh_logits(likeliest, greatest, filters)
    limited = filters.top_k > 0
    place = (filters.top_k.long() - 1).clamp(0, likeliest.shape[1] - 1)
    kth = likeliest.gather(1, place).where(limited, -math.inf)
    stays = likeliest >= kth
    total = (weights * stays).sum(dim=-1, keepdim=True).where(limited, totals)
    inside = weights.cumsum(dim=-1) - weights < filters.top_p * total
    inside |= filters.top_p >= 1.0
    inside[:, 0] = True
    last = (inside & stays).sum(dim=-1, keepdim=True) - 1
    floor = (greatest + filters.temperatures * filters.log_min_p).to(likeliest.dtype)
    threshold = torch.maximum(likeliest.gather(1, last), floor)
    # At the edge itself there may be more tokens just as likely; but none that can't come at all.
    return threshold, ((kth.where(limited, threshold) > edge) | edge.isneginf()).flatten()


def weigh_logits(logits: Tensor, greatest: Tensor, filters: SamplingFilters) -> Tensor:
    """Weights (float64) of few logits per row, relative to the greatest, so none overflows."""
    return (logits.double() - greatest).div_(filters.temperatures).exp_()
