"""The requests of a run: their sizes and arrival times."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from molink.bench.trace import TraceRow
from molink.errors import UsageError


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request that arrives ``arrival_s`` seconds after the start. Sizes are in tokens.

    ``hash_ids`` are those of :class:`TraceRow`. A simulated client may set ``max_tokens`` above
    ``output_tokens``, which hides the answer's length from the scheduler; 0: no such limit.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    max_tokens: int = 0

    @property
    def last_position(self) -> int:
        """The position of the last token."""
        return self.input_tokens + self.output_tokens - 1


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return ``count`` ascending arrival times in seconds from the start; the first is 0.

    Gaps are exponential with mean ``1 / rate`` (requests/s); ``inf`` puts all at 0. Equal seeds
    give equal times.

    Raises:
        UsageError: ``rate`` is not positive, or ``count`` is below 1.
    """
    if math.isnan(rate) or rate <= 0:
        raise UsageError(f"--rate must be a positive number of requests/s or inf, not {rate:g}")
    if count < 1:
        raise UsageError(f"--requests must be at least 1, not {count}")
    if math.isinf(rate):
        return [0.0] * count
    source = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + source.expovariate(rate))
    return times


def plan_sizes(
    input_tokens: int, output_tokens: int, rate: float, count: int, seed: int
) -> list[PlannedRequest]:
    """Plan ``count`` requests of one size with Poisson arrivals (``inf``: all at once)."""
    if input_tokens < 1 or output_tokens < 1:
        raise UsageError("--input-tokens and --output-tokens must be at least 1")
    arrivals = poisson_arrivals(rate, count, seed)
    return [
        PlannedRequest(index, at, input_tokens, output_tokens) for index, at in enumerate(arrivals)
    ]


def plan_trace(
    rows: Sequence[TraceRow], rate: float | None, count: int, seed: int
) -> list[PlannedRequest]:
    """Plan the first ``count`` requests of a trace, with its sizes and in its order.

    They arrive at the trace's times, or as a Poisson process if ``rate`` is given.
    """
    chosen = rows[:count]
    times = (
        [row.arrival_s - chosen[0].arrival_s for row in chosen]
        if rate is None
        else poisson_arrivals(rate, len(chosen), seed)
    )
    return [
        PlannedRequest(index, at, row.input_tokens, row.output_tokens)
        for index, (at, row) in enumerate(zip(times, chosen, strict=True))
    ]
