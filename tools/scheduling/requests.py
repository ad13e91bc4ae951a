"""Random arrivals of requests with realistic sizes."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from molink.bench.workload import PlannedRequest, TraceRow, read_trace

#: Means of prompt and answer in tokens, and the spread of their logarithms.
SIZES = {"sharegpt": ((161.0, 1.2), (338.0, 1.0)), "alpaca": ((19.0, 0.6), (58.0, 0.9))}
MAX_PROMPT, MAX_OUTPUT = 2048, 1024
#: ``max_tokens`` of every request: it reveals nothing of the answer's length.
LIMIT = 4096
#: Uncounted requests before each run, as a share of capacity: they fill caches and teach policies
#: that learn.
EARLIER, EARLIER_LOAD = 256, 0.5

Plan = Sequence[PlannedRequest]
#: Sizes of the next request.
Draw = Callable[[random.Random], TraceRow]


def log_normal(rng: random.Random, mean: float, spread: float, maximum: int) -> int:
    """Draw tokens with that mean, then bound them."""
    value = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return max(1, min(maximum, round(value)))


def means_of(kind: str, ratio: float | None = None) -> tuple[float, float]:
    """Mean tokens of prompt and answer; ``ratio`` splits the same total as prompt / answer."""
    (prompt, _), (output, _) = SIZES[kind]
    if ratio is None:
        return prompt, output
    total = prompt + output
    return total * ratio / (1 + ratio), total / (1 + ratio)


def sizes_of(kind: str, ratio: float | None = None) -> Draw:
    """Make a draw of sizes with the kind's means."""
    (_, prompt_spread), (_, output_spread) = SIZES[kind]
    prompt, output = means_of(kind, ratio)

    def draw(rng: random.Random) -> TraceRow:
        return TraceRow(
            0.0,
            log_normal(rng, prompt, prompt_spread, MAX_PROMPT),
            log_normal(rng, output, output_spread, MAX_OUTPUT),
        )

    return draw


def sizes_in(path: Path) -> Draw:
    """Make a draw of sizes from a trace."""
    rows = [
        row
        for row in read_trace(path)
        if row.input_tokens <= MAX_PROMPT and row.output_tokens <= MAX_OUTPUT
    ]
    return lambda rng: rng.choice(rows)


def plan_poisson(draw: Draw, rate: float, seconds: float, seed: int) -> Plan:
    """Poisson arrivals for ``seconds``; request ``i`` has the same size at every rate."""
    sizes, arrivals = random.Random(seed), random.Random(seed + 1)
    plan: list[PlannedRequest] = []
    at = 0.0
    while True:
        at += arrivals.expovariate(rate)
        if at >= seconds and plan:
            return plan
        size = draw(sizes)
        plan.append(
            PlannedRequest(len(plan), at, size.input_tokens, size.output_tokens, max_tokens=LIMIT)
        )


def draw_means(draw: Draw) -> tuple[float, float]:
    """Estimate mean tokens of prompt and answer from a sample."""
    plan = plan_poisson(draw, 1.0, 2000.0, 0)
    return (
        fmean(request.input_tokens for request in plan),
        fmean(request.output_tokens for request in plan),
    )


def after_others(draw: Draw, plan: Plan, rate: float, seed: int) -> tuple[Plan, float]:
    """Put :data:`EARLIER` requests at ``rate`` before ``plan``; also return when it begins."""
    earlier = plan_poisson(draw, rate, 2 * EARLIER / rate, seed + 1000)[:EARLIER]
    begins = earlier[-1].arrival_s + 1 / rate
    later = [
        replace(request, index=EARLIER + request.index, arrival_s=begins + request.arrival_s)
        for request in plan
    ]
    return [*earlier, *later], begins
