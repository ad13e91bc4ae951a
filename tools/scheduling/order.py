"""Figures of scheduling policies: head-of-line blocking, load within an SLO, size ratios."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from molink.bench.workload import PlannedRequest
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from tools.scheduling.requests import Draw, means_of, sizes_in, sizes_of
from tools.scheduling.serving import (
    NO_WORKLOAD,
    Run,
    describe_ring,
    estimate_capacity,
    make_ring,
    measure_policy,
    print_run,
    simulate_plan,
)

#: FastServe's bound: about ten times the shortest iteration.
SLO_S = 0.3
#: The factor between rates of a search.
STEP = 2 ** (1 / 4)
#: Seconds of arrivals and first step of the search, by kind of sizes.
SPAN = {"sharegpt": (45.0, 12), "alpaca": (10.0, 26), "trace": (90.0, 4)}
#: Steps below the first one that count as low load.
LOW = 10


def short_behind_long(options: argparse.Namespace) -> dict[str, Any]:
    """Time a short prompt that arrives during a long one, at 20 Mbps."""
    link = LinkProfile(bandwidth_mbps=20, latency_ms=20)
    scenario = Scenario(NO_WORKLOAD, link=link)
    long, short = PlannedRequest(0, 0.0, 4096, 32), PlannedRequest(1, 2.0, 64, 32)
    alone = simulate_plan(scenario, [long])[0][0]
    rows = []
    for policy in options.policies:
        both = simulate_plan(replace(scenario, scheduling_policy=policy), [long, short])[0]
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


def measure_slo(options: argparse.Namespace) -> dict[str, Any]:
    """Find the highest rate with latency per token within the SLO, mean and p95."""
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
    return {"ring": describe_ring(options), "slo_s": SLO_S, "rows": rows}


def _within_slo(
    options: argparse.Namespace, kind: str, draw: Draw, policy: str
) -> dict[str, float]:
    seconds, first = SPAN[kind]

    @cache
    def at(step: int) -> Run:
        found = measure_policy(make_ring(options, policy), draw, STEP**step, seconds, options.seed)
        return print_run(found, policy, STEP**step)

    return {
        "seconds": seconds,
        "rate_mean": find_highest(lambda step: at(step).mean, SLO_S, first),
        "rate_p95": find_highest(lambda step: at(step).p95, SLO_S, first),
        "low_rate": STEP ** (first - LOW),
        "low_mean_s": at(first - LOW).mean,
        "low_p95_s": at(first - LOW).p95,
    }


def find_highest(value: Callable[[int], float], bound: float, first: int = 0) -> float:
    """Interpolate the highest rate whose rising ``value`` stays within ``bound``."""
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


def measure_ratios(options: argparse.Namespace) -> dict[str, Any]:
    """Measure latency per token as prompts grow relative to answers."""
    rows = []
    for ratio, seed in product(options.ratios, options.seeds):
        rate = options.load * estimate_capacity(make_ring(options), *means_of("sharegpt", ratio))
        draw = sizes_of("sharegpt", ratio)
        for policy in options.policies:
            found = measure_policy(make_ring(options, policy), draw, rate, options.seconds, seed)
            print_run(found, policy, rate)
            rows.append(
                {"ratio": ratio, "rate": rate, "seed": seed, "policy": policy}
                | {"mean_s": found.mean, "p95_s": found.p95, "preemptions": found.preemptions}
            )
    return {"ring": describe_ring(options), "load": options.load, "seconds": options.seconds} | {
        "rows": rows
    }
