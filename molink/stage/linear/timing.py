"""Times projections beside their fallback."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Acceptable slowdown with many rows (CPUs with AMX beat compiled products).
_MAX_SLOWDOWN = 1.1
#: Trial matrices: with one row enough to exceed caches; with many rows compute dominates.
TRIED, _TRIED_MANY, _REPEATED = 8, 2, 5
COLUMNS, DEPTH, _MANY = 4096, 1024, 64
#: Trials that a kernel must lose to count as slow: one is not enough, since on a busy CPU noise
#: would decide.
_TRIALS = 3

#: Projections ``[…, DEPTH]`` → ``[…, COLUMNS]``, :data:`TRIED` of each kind, called with ``rows``.
Sides = Sequence[Sequence[Callable[..., Tensor]]]


def is_slower(sides: Sides, dtype: torch.dtype) -> bool:
    """Whether the first of two kinds is slower than the second, for rows of ``dtype``."""
    for _ in range(_TRIALS):
        few, many = time_sides(sides, dtype)
        if few < 1 and many < _MAX_SLOWDOWN:
            return False
    return True


def time_sides(sides: Sides, dtype: torch.dtype) -> tuple[float, float]:
    """Time of the first kind relative to the second, with one row and with many.

    Uses the fastest of alternating runs.
    """
    ratios = []
    for count, tried in ((1, TRIED), (_MANY, _TRIED_MANY)):
        rows = torch.ones(count, DEPTH, dtype=dtype)
        fastest = [float("inf")] * 2
        for _ in range(_REPEATED):
            for index in range(tried):
                for side, projections in enumerate(sides):
                    begin = time.perf_counter()
                    projections[index](rows=rows)
                    fastest[side] = min(fastest[side], time.perf_counter() - begin)
        ratios.append(fastest[0] / fastest[1])
    return ratios[0], ratios[1]
