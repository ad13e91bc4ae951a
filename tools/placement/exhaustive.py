"""The best ring of all, by trying every order of every set of PCs and every split of the layers.

It shares with molink's search the size and the step time of a stage, and nothing else. Orders are
extended PC by PC; one is given up only when the links so far and the fastest possible rest already
take longer than a known ring. Splits are a dynamic program over layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from molink.swarm.placement.partition import StageHost

_Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RingCosts:
    """Times in seconds: ``rows[i][j]`` and ``tokens[i][j]`` of a row and of a token's way from PC
    ``i`` to ``j``, ``prompts[i][j]`` of a prompt's rows over that link for each token of an answer,
    and ``asks[i]`` per token if PC ``i`` holds the first stage."""

    rows: Sequence[Sequence[float]]
    tokens: Sequence[Sequence[float]]
    prompts: Sequence[Sequence[float]]
    asks: Sequence[float]

    def path_s(self, order: Sequence[int]) -> float:
        """Seconds per token of all hops of a ring, of asking, and of the slowest link's prompts."""
        if len(order) == 1:
            return self.asks[order[0]]
        hops = sum(self.rows[i][j] for i, j in pairwise(order))
        prompts = max(self.prompts[i][j] for i, j in pairwise(order))
        return hops + self.tokens[order[-1]][order[0]] + prompts + self.asks[order[0]]


class ExhaustiveSearch:
    """One search for the least time per token of one stream."""

    def __init__(
        self, layers: int, hosts: Sequence[StageHost], costs: RingCosts, max_stages: int
    ) -> None:
        self._layers, self._costs = layers, costs
        self._count, self._max_stages = len(hosts), max_stages
        ends = [(opens, closes) for opens in (False, True) for closes in (False, True)]
        #: Step times of each host by layers, for each position in the ring; infinite: no room.
        self._steps = [{end: self._step_times(host, *end) for end in ends} for host in hosts]
        middle = np.array([steps[False, False] for steps in self._steps])
        #: Minimum remaining seconds by layers so far: the remaining layers times the fastest one.
        gains = np.diff(np.where(np.isinf(middle), np.nan, middle), axis=1)[:, 1:]
        fastest = 0.0 if not gains.size or np.isnan(gains).all() else float(np.nanmin(gains))
        self._rest = np.arange(layers, -1, -1) * fastest
        self._best = inf
        self._best_order: tuple[int, ...] = ()
        at = np.arange(layers + 1)
        #: For every number of layers so far and in the next stage: how many were before.
        self._before = at[:, None] - at[None, :]

    def find_best(self, known: float = inf) -> tuple[float, tuple[int, ...]]:
        """Seconds per token of the best ring, and its order; empty if none beats ``known``."""
        self._best = known
        for first in range(self._count):
            asks = self._costs.asks[first]
            alone = self._steps[first][True, True][self._layers] + asks
            if alone < self._best:
                self._best, self._best_order = float(alone), (first,)
            self._extend((first,), asks, 0.0, self._steps[first][True, False])
        return self._best, self._best_order

    def _step_times(self, host: StageHost, opens: bool, closes: bool) -> _Times:
        most = host.max_layers(opens=opens, closes=closes)
        return np.array(
            [
                host.step_time(count, opens=opens, closes=closes) if 1 <= count <= most else inf
                for count in range(self._layers + 1)
            ]
        )

    def _extend(self, order: tuple[int, ...], hops: float, prompts: float, done: _Times) -> None:
        """Try all rings that begin with ``order``; ``done[n]`` are the least step times of its
        stages with ``n`` layers, and ``prompts`` the time of its slowest link."""
        least = hops + prompts + float(np.min(done + self._rest))
        if len(order) == self._max_stages or least >= self._best:
            return
        for after in range(self._count):
            if after in order:
                continue
            way = hops + self._costs.rows[order[-1]][after]
            slowest = max(prompts, self._costs.prompts[order[-1]][after])
            closed = way + slowest + self._costs.tokens[after][order[0]]
            last = self._steps[after][False, True]
            total = closed + float(np.min(done + last[::-1]))
            if total < self._best:
                self._best, self._best_order = total, (*order, after)
            further = self._add_stage(done, self._steps[after])
            self._extend((*order, after), way, slowest, further)

    def _add_stage(self, done: _Times, steps: dict[tuple[bool, bool], _Times]) -> _Times:
        sums = np.where(self._before >= 0, done[self._before], inf) + steps[False, False][None, :]
        return np.asarray(np.min(sums, axis=1))
