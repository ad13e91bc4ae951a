"""Selects the positions that rows attend to (DeepSeek-V3.2, arXiv 2512.02556, §2.1)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Scores computed at once: 64 MiB in float32.
_MAX_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """Index queries of a forward's rows, and the location of index keys.

    ``queries`` is ``[T, n, dim]``, ``weights`` float32 ``[T, n]``. An index key is ``part`` of a
    position's key. A row attends to the ``top_k`` positions with the largest sums of ``weight *
    max(0, query · key)``.
    """

    queries: Tensor
    weights: Tensor
    part: slice
    top_k: int

    def restrict_mask(self, mask: Tensor, rows: Tensor | slice, keys: Tensor) -> Tensor:
        """Mask the visible positions that ``rows`` don't select.

        ``mask`` is additive, ``[R, P]``; ``keys`` is ``[R, P, head_dim]``, or ``[1, P, head_dim]``
        if all rows share the keys.
        """
        if keys.shape[1] <= self.top_k:
            return mask
        queries, weights = self.queries[rows].float(), self.weights[rows].unsqueeze(1)
        index_keys = keys[..., self.part].float().transpose(1, 2)
        index_keys = index_keys.expand(len(mask), -1, -1)
        slab = max(1, _MAX_SCORES // (queries.shape[1] * keys.shape[1]))
        restricted = torch.full_like(mask, -math.inf)
        for first in range(0, len(mask), slab):
            some = slice(first, first + slab)
            scores = torch.matmul(queries[some], index_keys[some]).relu_()
            total = torch.matmul(weights[some], scores).squeeze(1).add_(mask[some])
            chosen = total.topk(self.top_k, dim=-1).indices
            # A row may see fewer positions than it can select.
            restricted[some].scatter_(-1, chosen, mask[some].gather(-1, chosen))
        return restricted
