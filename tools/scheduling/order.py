"""What the order brings in which requests are served."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from molink.bench.planned_requests import PlannedRequest
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from tools.scheduling.requests import Draw, means_of, sizes_in, sizes_of
from tools.scheduling.serving import (
    NO_WORKLOAD,
    Run,
    capacity_of,
    measured,
    ring,
    ring_name,
    serve,
    told,
)

#: FastServe's, ten times its shortest iteration; here about ten times as well.
SLO_S = 0.3
#: Requests/s of a search: a step is a factor of this.
STEP = 2 ** (1 / 4)
#: For each kind of sizes: seconds of arrivals, and the step from which a search begins.
SPAN = {"sharegpt": (45.0, 12), "alpaca": (10.0, 26), "trace": (90.0, 4)}
#: Steps below that a ring has next to nothing to do.
LOW = 10


def short_behind_long(options: argparse.Namespace) -> dict[str, Any]:
    """A short prompt that comes while a long one is on its way, at 20 Mbps."""
    link = LinkProfile(bandwidth_mbps=20, latency_ms=20)
    scenario = Scenario(NO_WORKLOAD, link=link)
    long, short = PlannedRequest(0, 0.0, 4096, 32), PlannedRequest(1, 2.0, 64, 32)
    alone = serve(scenario, [long])[0][0]
    rows = []
    for policy in options.policies:
        both = serve(replace(scenario, scheduling_policy=policy), [long, short])[0]
        rows.append(
            {
                "policy": policy,
                "short_ttft_s": both[1].ttft,
                "long_ttft_s": both[0].ttft,
                "long_s": both[0].latency,
                "long_by_alone": both[0].latency / alone.latency,
            }
        )
    return {
        "ring": "3 x rtx4090, qwen-7b, 20 Mbps, 20 ms",
        "long_alone_s": alone.latency,
        "rows": rows,
    }


def slo(options: argparse.Namespace) -> dict[str, Any]:
    """The highest rate at which latency per token is within the SLO, by mean and by p95."""
    if "trace" in options.kinds and options.trace is None:
        raise SystemExit("--kinds trace needs --trace FILE")
    kinds = {
        kind: sizes_in(options.trace) if kind == "trace" else sizes_of(kind)
        for kind in options.kinds
    }
    rows = [
        {"sizes": kind, "policy": policy} | _within_slo(options, kind, draw, policy)
        for kind, draw in kinds.items()
        for policy in options.policies
    ]
    return {"ring": ring_name(options), "slo_s": SLO_S, "rows": rows}


def _within_slo(
    options: argparse.Namespace, kind: str, draw: Draw, policy: str
) -> dict[str, float]:
    seconds, first = SPAN[kind]

    @cache
    def at(step: int) -> Run:
        found = measured(ring(options, policy), draw, STEP**step, seconds, options.seed)
        return told(found, policy, STEP**step)

    return {
        "seconds": seconds,
        "rate_mean": highest(lambda step: at(step).mean, SLO_S, first),
        "rate_p95": highest(lambda step: at(step).p95, SLO_S, first),
        "low_rate": STEP ** (first - LOW),
        "low_mean_s": at(first - LOW).mean,
        "low_p95_s": at(first - LOW).p95,
    }


def highest(value: Callable[[int], float], bound: float, first: int = 0) -> float:
    """Up to which rate a value that rises with it is within ``bound``, between two steps."""
    low = first
    while value(low) > bound:
        low -= 2
    high = low + 2
    while value(high) <= bound:
        low, high = high, high + 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= bound else (low, middle)
    part = (bound - value(low)) / (value(high) - value(low))
    return float(STEP ** (low + part))


def ratios(options: argparse.Namespace) -> dict[str, Any]:
    """Latency per token where prompts are longer and longer compared with answers."""
    rows = []
    for ratio, seed in product(options.ratios, options.seeds):
        rate = options.load * capacity_of(ring(options), *means_of("sharegpt", ratio))
        draw = sizes_of("sharegpt", ratio)
        for policy in options.policies:
            found = measured(ring(options, policy), draw, rate, options.seconds, seed)
            told(found, policy, rate)
            rows.append(
                {"ratio": ratio, "rate": rate, "seed": seed, "policy": policy}
                | {"mean_s": found.mean, "p95_s": found.p95, "preemptions": found.preemptions}
            )
    return {"ring": ring_name(options), "load": options.load, "seconds": options.seconds} | {
        "rows": rows
    }
