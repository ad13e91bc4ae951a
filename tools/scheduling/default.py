"""Where the Gittins index is better than the default policy, and where it is worse."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from tools import routing
from tools.scheduling.order import SPAN
from tools.scheduling.requests import Draw, draw_means, means_of, sizes_in, sizes_of
from tools.scheduling.serving import NO_WORKLOAD, Run, capacity_of, measured, ring, told

DEFAULT, OTHER = "fcfs", "gittins"
#: Requests/s of three PCs in a ring at 100 Mbps, up to where KV blocks run out.
RING_RATES, RING_SECONDS = (0.05, 0.3, 0.7, 1.4), 120.0
#: Of arrivals, where prompts take seconds each.
LONG_SECONDS = 300.0
#: What is compared, of each run: seconds.
COMPARED = ("mean_s", "p95_s", "ttft_s", "gap_p95_s", "gap_max_s")


@dataclass(frozen=True, slots=True)
class Setting:
    """Requests of some sizes on a ring, at rates from hardly any load to far too much."""

    name: str
    scenario: Scenario
    draw: Draw
    rates: tuple[float, ...]
    #: Of arrivals.
    seconds: float


def default(options: argparse.Namespace) -> dict[str, Any]:
    """The default policy and the Gittins index at low and high loads: latencies, and worst gaps."""
    rows, against = [], []
    for setting in _settings(options):
        for rate in setting.rates:
            cell = {"setting": setting.name, "rate": rate}
            found = [cell | row for row in _of_cell(options, setting, rate)]
            rows += found
            against.append(cell | compared(found))
    return {"against": against, "rows": rows}


def _settings(options: argparse.Namespace) -> Iterator[Setting]:
    card = ring(options)
    for kind in options.kinds:
        full = capacity_of(card, *means_of(kind))
        rates, seconds = tuple(full * load for load in options.loads), SPAN[kind][0]
        yield Setting(kind, card, sizes_of(kind), rates, seconds)
    if options.trace is not None:
        draw = sizes_in(options.trace)
        full = capacity_of(card, *draw_means(draw))
        rates = tuple(full * load for load in options.loads)
        yield Setting("azure", card, draw, rates, SPAN["trace"][0])
        slow = replace(card, stages=3, link=LinkProfile(bandwidth_mbps=100, latency_ms=30))
        yield Setting("azure, 3 PCs at 100 Mbps", slow, draw, RING_RATES, RING_SECONDS)
    if options.conversations is not None:
        sizes = (routing.MAX_PROMPT, routing.MAX_OUTPUT)
        draw = sizes_in(options.conversations, *sizes)
        link = LinkProfile(1000, 0.5)
        large = Scenario(NO_WORKLOAD, 1, routing.DEVICE, link=link, shape=routing.MODEL)
        full = capacity_of(large, *draw_means(draw))
        rates = tuple(full * load for load in options.loads)
        yield Setting("mooncake", large, draw, rates, LONG_SECONDS)


def _of_cell(options: argparse.Namespace, setting: Setting, rate: float) -> list[dict[str, Any]]:
    rows = []
    for seed, policy in product(options.seeds, (DEFAULT, OTHER)):
        scenario = replace(setting.scenario, scheduling_policy=policy)
        usual = setting.rates[1]
        found = measured(scenario, setting.draw, rate, setting.seconds, seed, usual)
        told(found, f"{setting.name}: {policy}", rate)
        rows.append({"seed": seed, "policy": policy} | _figures(found))
    return rows


def _figures(found: Run) -> dict[str, float]:
    values = (found.mean, found.p95, found.ttft_mean, found.gap_p95, found.gap_max)
    return dict(zip(COMPARED, values, strict=True)) | {"preemptions": found.preemptions}


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times as long the Gittins index takes: mean over seeds, least, most."""
    seeds = sorted({row["seed"] for row in rows})
    by = {(row["policy"], row["seed"]): row for row in rows}
    found = {}
    for name in COMPARED:
        ratios = [by[OTHER, seed][name] / by[DEFAULT, seed][name] for seed in seeds]
        found[name] = (fmean(ratios), min(ratios), max(ratios))
    return found
