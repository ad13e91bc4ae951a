"""What to send: sizes of requests, each with the moment it is due."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.bench.arrivals import poisson_arrivals
from molink.bench.trace import TraceRow
from molink.errors import UsageError


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: due ``at`` seconds after the start; sizes in tokens."""

    index: int
    at: float
    input_tokens: int
    output_tokens: int


def plan_sizes(
    input_tokens: int, output_tokens: int, rate: float, count: int, seed: int
) -> list[PlannedRequest]:
    """``count`` requests of one size, arriving as a Poisson process (``inf``: all at once)."""
    if input_tokens < 1 or output_tokens < 1:
        raise UsageError("--input-tokens and --output-tokens have to be at least 1")
    arrivals = poisson_arrivals(rate, count, seed)
    return [
        PlannedRequest(index, at, input_tokens, output_tokens) for index, at in enumerate(arrivals)
    ]


def plan_trace(
    rows: Sequence[TraceRow], rate: float | None, count: int, seed: int
) -> list[PlannedRequest]:
    """The first ``count`` requests of a trace, in its order and with its sizes.

    They arrive when the trace says, or with ``rate`` as a Poisson process of that rate.
    """
    chosen = rows[:count]
    times = (
        [row.at - chosen[0].at for row in chosen]
        if rate is None
        else poisson_arrivals(rate, len(chosen), seed)
    )
    return [
        PlannedRequest(index, at, row.input_tokens, row.output_tokens)
        for index, (at, row) in enumerate(zip(times, chosen, strict=True))
    ]
