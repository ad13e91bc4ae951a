"""Compare preemption modes (FastServe, §6.3) with each other and with an upper bound."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

from molink.facts.settings import PREEMPTION_MODES
from molink.sim.scenario import Scenario
from tools.scheduling.requests import means_of, sizes_of
from tools.scheduling.serving import (
    Run,
    describe_ring,
    estimate_capacity,
    make_ring,
    measure_policy,
    print_run,
)

#: An oracle beside the modes: ``proactive-swap`` with free copies and unlimited host memory.
ORACLE = "nothing-lost"
SIDES = (*PREEMPTION_MODES, ORACLE)
#: Pairs whose latencies are divided.
PAIRS = (
    ("recompute", "proactive-swap"),
    ("reactive-swap", "proactive-swap"),
    ("recompute", ORACLE),
    ("reactive-swap", ORACLE),
)
_FOREVER_GB = 4096.0


def measure_preemption(options: argparse.Namespace) -> dict[str, Any]:
    """Measure latency per token by preemption mode, and its bound."""
    rows, against = [], []
    for policy, ratio, load in product(options.orders, options.ratios, options.loads):
        cell = {"policy": policy, "ratio": ratio, "load": load}
        found = [cell | row for row in _of_cell(options, policy, ratio, load)]
        rows += found
        against += [cell | pair for pair in compare_modes(found)]
    return {
        "ring": describe_ring(options),
        "seconds": options.seconds,
        "swap_gb": options.swap_gb,
        "against": against,
        "rows": rows,
    }


def _of_cell(
    options: argparse.Namespace, policy: str, ratio: float, load: float
) -> list[dict[str, Any]]:
    """Run all sides with all seeds; a ``ratio`` of 0 keeps the sizes."""
    rate = load * estimate_capacity(make_ring(options), *means_of("sharegpt", ratio or None))
    rows = []
    for seed in options.seeds:
        draw = sizes_of("sharegpt", ratio or None)
        for side in SIDES:
            scenario = _make_side(options, policy, side)
            found = print_run(
                measure_policy(scenario, draw, rate, options.seconds, seed), side, rate
            )
            rows.append({"rate": rate, "seed": seed, "side": side} | _list_figures(found))
    return rows


def _make_side(options: argparse.Namespace, policy: str, side: str) -> Scenario:
    if side != ORACLE:
        return make_ring(options, f"{policy}:{side}")
    scenario = make_ring(options, f"{policy}:proactive-swap")
    return replace(scenario, swap_gb=_FOREVER_GB, free_copies=True)


def _list_figures(found: Run) -> dict[str, float]:
    """Plain values of one run; ``waited`` is a share of the run's time."""
    return {
        "mean_s": found.mean,
        "p95_s": found.p95,
        "ttft_s": found.ttft_mean,
        "requests": found.requests,
        "preemptions": found.preemptions,
        "swaps": found.swaps,
        "till_first": found.till_first,
        "paused": found.paused,
        "waited": found.waited_s / found.seconds,
        "busy_s": found.busy_s,
        "recomputed": found.rows - 1,
    }


def compare_modes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divide mean latencies of each pair: mean, least and most over the seeds."""
    means = {(row["side"], row["seed"]): row["mean_s"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    found = []
    for slow, fast in PAIRS:
        ratios = [means[slow, seed] / means[fast, seed] for seed in seeds]
        found.append(
            {"slow": slow, "fast": fast}
            | {"times": fmean(ratios), "least": min(ratios), "most": max(ratios)}
        )
    return found
