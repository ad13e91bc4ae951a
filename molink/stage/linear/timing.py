"""Times projections against their fallbacks."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Acceptable slowdown with many rows (CPUs with AMX beat compiled products).
_MAX_SLOWDOWN = 1.1
#: Trial matrices: together they exceed caches with one row, and compute dominates with many rows.
TRIED, _TRIED_MANY, _REPEATED = 8, 2, 5
COLUMNS, DEPTH, _MANY = 4096, 1024, 64
#: Trials that a kernel must lose to count as slow; a single one would be decided by noise on a busy
#: CPU.
_TRIALS = 3

#: Projections ``[…, DEPTH]`` → ``[…, COLUMNS]``, :data:`TRIED` of each kind, called with ``rows``.
Sides = Sequence[Sequence[Callable[..., Tensor]]]


def is_slower(sides: Sides, dtype: torch.dtype) -> bool:
    """Return whether the first of two kinds is slower than the second, for rows of ``dtype``."""
    for _ in range(_TRIALS):
        few, many = time_sides(sides, dtype)
        if few < 1 and many < _MAX_SLOWDOWN:
            return False
    return True


def time_sides(sides: Sides, dtype: torch.dtype) -> tuple[float, float]:
    """Return the first kind's time relative to the second's, with one row and with many.

    Both use the fastest of alternating runs.
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
