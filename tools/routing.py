"""Prefix-aware routing over four pipelines in virtual time, and its speed.

    python -m tools.routing --all --trace FILE      # latencies, then decisions per second
    python -m tools.routing latency --workloads tools
    python -m tools.routing latency --routers e2 --policies fcfs,cached-share --workloads tools
    python -m tools.routing speed

Both add to ``docs/results/routing.json`` (``--out``) and replace equal runs. Each pipeline has its
own prefix cache. Workloads:

- ``conversation``: Mooncake's conversation trace (``--trace``, JSONL) with its arrivals and shared
  prefixes, thinned by conversation to a sixteenth per seed.
- ``tools``: 200 tools with prompts of 2048 to 6144 tokens, chosen by Zipf (1.1), each time with
  another question.
- ``alone``: the trace's sizes without shared prefixes.

``oracle`` knows all requests and assigns tools or conversations to pipelines by equal work.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from molink.bench.report import percentile
from molink.bench.workload import HASH_BLOCK_TOKENS, PlannedRequest, TraceRow, read_trace
from molink.routing.base import PipelineLoad, RoutedPrompt, Router
from molink.routing.cache_report import SPAN_TOKENS, CacheReport, span_digests
from molink.routing.create import create_router
from molink.routing.e2 import E2Router
from molink.sim.fleet import FleetOutcome, FleetScenario, simulate_fleet
from molink.sim.profiles import LinkProfile, ModelProfile
from molink.sim.scenario import Scenario
from molink.sim.workload import Workload

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "routing.json"
PIPELINES = 4
DEVICE = "rtx5090"
#: Qwen2.5-7B-Instruct by its config.json.
MODEL = ModelProfile("qwen2.5-7b", "config.json", 28, 3584, 18_944, 28, 4, 128, 152_064)
MAX_PROMPT, MAX_OUTPUT = 131_072, 4096
#: One in this many conversations is used.
THINNED = 16
TOOLS, ZIPF = 200, 1.1
#: Requests of a run by workload.
COUNTS = {"conversation": 800, "tools": 1500, "alone": 400}
#: Share of uncounted requests at the start.
WARM_UP = 0.2
#: Prompts with a smaller cached share count as new.
NEW = 0.5
RATES = {"conversation": 2.0, "tools": 24.0, "alone": 1.2}
ROUTERS = ("round-robin", "least-loaded", "e2", "oracle")

Rows = tuple[TraceRow, ...]


def family_of(row: TraceRow | PlannedRequest) -> int:
    """The tool or conversation of a request."""
    return (*row.hash_ids, 0, 0)[1]


def draw_conversations(rows: Sequence[TraceRow], seed: int) -> Rows:
    """A sixteenth of all conversations, each whole."""
    kept = [
        row for row in rows if random.Random(family_of(row)).randrange(THINNED) == seed % THINNED
    ]
    return tuple(kept[: COUNTS["conversation"]])


def draw_tools(rows: Sequence[TraceRow], seed: int, requests: int = COUNTS["tools"]) -> Rows:
    """Questions to tools: hashes of the tool's prompt, then one of the question."""
    rng = random.Random(f"tools {seed}")
    parts = [rng.randrange(4, 13) for _ in range(TOOLS)]
    weights = [1 / rank**ZIPF for rank in range(1, TOOLS + 1)]
    found = []
    for index, tool in enumerate(rng.choices(range(TOOLS), weights, k=requests)):
        first = 1000 * (tool + 1)
        ids = (*range(first, first + parts[tool]), 10_000_000 + index)
        question = rng.randrange(32, 256)
        tokens = HASH_BLOCK_TOKENS * parts[tool] + question
        found.append(TraceRow(float(index), tokens, rng.randrange(16, 160), ids))
    return tuple(found)


def draw_singles(rows: Sequence[TraceRow], seed: int) -> Rows:
    """Sizes of the trace in random order, without shared prefixes."""
    chosen = random.Random(f"alone {seed}").sample(rows, COUNTS["alone"])
    return tuple(
        replace(
            row,
            arrival_s=float(index),
            hash_ids=tuple(range(1000 * index, 1000 * index + len(row.hash_ids))),
        )
        for index, row in enumerate(chosen)
    )


WORKLOADS: dict[str, Callable[[Sequence[TraceRow], int], Rows]] = {
    "conversation": draw_conversations,
    "tools": draw_tools,
    "alone": draw_singles,
}


class Oracle(Router):
    """Assigns families of requests to pipelines by equal work."""

    def __init__(self, rows: Rows, per_answer: float) -> None:
        """An output token costs ``per_answer`` prompt tokens."""
        self._rows = rows
        seen = set[tuple[int, ...]]()
        work: dict[int, float] = {}
        for row in rows:
            new = sum(row.hash_ids[: end + 1] not in seen for end in range(len(row.hash_ids)))
            seen.update(row.hash_ids[: end + 1] for end in range(len(row.hash_ids)))
            work[family_of(row)] = (
                work.get(family_of(row), 0)
                + HASH_BLOCK_TOKENS * new
                + per_answer * row.output_tokens
            )
        loads = [0.0] * PIPELINES
        self._places: dict[int, int] = {}
        for each, tokens in sorted(work.items(), key=lambda item: -item[1]):
            place = self._places[each] = loads.index(min(loads))
            loads[place] += tokens

    def choose_pipeline(
        self, prompt: RoutedPrompt, up: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        """The pipeline of its family."""
        row = self._rows[int(prompt.key) % len(self._rows)]  # a trace may begin again
        return up[self._places[family_of(row)]]


class Watched(E2Router):
    """E2 that records waits of prompts new to their pipeline."""

    def __init__(self, since: float) -> None:
        super().__init__()
        self._since = since
        self._asked: dict[str, tuple[float, int]] = {}
        self.waits: list[float] = []

    def choose_pipeline(
        self, prompt: RoutedPrompt, up: Sequence[PipelineLoad], now: float
    ) -> PipelineLoad:
        """Choose as E2 does."""
        self._asked[prompt.key] = now, prompt.num_tokens
        return super().choose_pipeline(prompt, up, now)

    def on_first_token(self, key: str, cached: int, now: float) -> None:
        """Record the wait for the first token."""
        at, tokens = self._asked[key]
        if at >= self._since and cached < NEW * tokens:
            self.waits.append(now - at)
        super().on_first_token(key, cached, now)


def run_router(
    workload: str, rows: Rows, router: str, rate: float, seed: int, policy: str = "fcfs"
) -> dict[str, float]:
    """Simulate one router and return its figures."""
    arrivals = "trace" if workload == "conversation" else "poisson"
    # A tenth of the rows stays unused, so that no run repeats them.
    seconds = len(rows) / rate * (1.0 if arrivals == "trace" else 0.9)
    load = Workload(
        rate,
        (1 - WARM_UP) * seconds,
        WARM_UP * seconds,
        trace_rows=rows,
        arrivals=arrivals,  # type: ignore[arg-type]
        seed=seed,
        max_prompt=MAX_PROMPT,
        max_output=MAX_OUTPUT,
    )
    link = LinkProfile(1000, 0.5)
    ring = Scenario(load, 1, DEVICE, link=link, shape=MODEL, scheduling_policy=policy)
    watched = Watched(load.warmup)
    others = {"e2": watched, "oracle": Oracle(rows, 1.0)}
    known = "round-robin" if router == "oracle" else router
    fleet = FleetScenario(ring, PIPELINES, router=known)
    found = list_figures(simulate_fleet(fleet, others.get(router) or create_router(router)))
    if watched.waits:
        found |= {"new": len(watched.waits), "new_ttft_mean_s": fmean(watched.waits)}
        found["new_ttft_p99_s"] = percentile(sorted(watched.waits), 99)
    return found


def list_figures(outcome: FleetOutcome) -> dict[str, float]:
    """Plain values in seconds."""
    report = outcome.report
    if outcome.num_lost or report.latency_s.mean is None:
        raise SystemExit(f"{outcome.num_lost} requests failed: {report.first_error}")
    named = (("latency", report.latency_s), ("ttft", report.ttft_s))
    return {
        f"{name}_{which}_s": getattr(summary, which)
        for name, summary in named
        for which in ("mean", "p50", "p99")
    } | {"cached_share": outcome.cached_share, "busy": fmean(outcome.busy_shares)}


def measure_latency(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all routers on all workloads, a row per seed."""
    trace = read_trace(options.trace) if options.trace is not None else []
    if not trace and set(options.workloads) != {"tools"}:
        raise SystemExit("conversation and alone need --trace mooncake_conversation.jsonl")
    found = []
    for name, seed in product(options.workloads, options.seeds):
        rate, rows = options.rate or RATES[name], WORKLOADS[name](trace, seed)
        if options.requests and name == "tools":
            rows = draw_tools((), seed, options.requests)
        for router, policy in product(options.routers, options.policies):
            if router == "oracle" and name == "alone":  # nothing to partition
                continue
            row = {"workload": name, "rate": rate, "seed": seed, "router": router, "policy": policy}
            row |= {"requests": len(rows)} | run_router(name, rows, router, rate, seed, policy)
            found.append(row)
            values = [
                f"{value:.2f}" if isinstance(value, float) else value for value in row.values()
            ]
            print(*values, flush=True)
    return found


def against_e2(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Latency relative to E2 with ``fcfs``: mean over seeds, least, most."""
    names = ("latency_mean_s", "latency_p99_s", "ttft_mean_s", "ttft_p99_s")
    new = ("new_ttft_mean_s", "new_ttft_p99_s")
    mine = {_workload_key(row): row for row in rows if _router_key(row) == ("e2", "fcfs")}
    others: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if _router_key(row) != ("e2", "fcfs") and _workload_key(row) in mine:
            count = row["requests"] if row["requests"] > COUNTS[row["workload"]] else 0
            kind = row["workload"], row["rate"], count, *_router_key(row)
            others.setdefault(kind, []).append(row)
    return [
        {"workload": workload, "rate": rate, "router": router, "policy": policy}
        | ({"requests": count} if count else {})
        | {"seeds": len(group)}
        | {
            name: (fmean(each), min(each), max(each))
            for name in (*names, *(new if router == "e2" else ()))
            for each in [[row[name] / mine[_workload_key(row)][name] for row in group]]
        }
        for (workload, rate, count, router, policy), group in others.items()
    ]


def _workload_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["workload"], row["rate"], row["seed"], row["requests"]


def _router_key(row: dict[str, Any]) -> tuple[str, str]:
    return row["router"], row.get("policy", "fcfs")


def merge_results(
    out: Path, rows: Sequence[dict[str, Any]], speed: dict[str, float] | None
) -> None:
    """Merge rows into a results file."""
    before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    known = {
        (*_workload_key(row), *_router_key(row)): row for row in [*before.get("rows", ()), *rows]
    }
    ordered = [known[key] for key in sorted(known)]
    result = {
        "pipelines": f"{PIPELINES} of 1 x {DEVICE}, {MODEL.name}",
        "by_e2": against_e2(ordered),
        "speed": speed or before.get("speed"),
        "rows": ordered,
    }
    for row in against_e2(rows):
        print(row)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure_speed(options: argparse.Namespace) -> dict[str, float]:
    """Measure decisions per CPU second with a tree of a million tokens."""
    rows = draw_tools((), 1)
    up = [PipelineLoad(str(number)) for number in range(PIPELINES)]
    tracemalloc.start()
    router, now = E2Router(), 0.0
    rng = random.Random(1)
    for load in up:
        room = options.tree_tokens // PIPELINES
        digests = tuple(rng.getrandbits(64) for _ in range(room // SPAN_TOKENS))
        router.on_cache_report(load.name, CacheReport(1, True, digests, (), room), now)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    prompts: list[tuple[int, ...]] = []
    for row in rows:
        tokens = [part for part in row.hash_ids for _ in range(HASH_BLOCK_TOKENS)][
            : row.input_tokens
        ]
        prompts.append(tuple(tokens))
    began = time.process_time()
    for index, token_ids in enumerate(prompts):
        now += 0.01
        prompt = RoutedPrompt(str(index), len(token_ids), span_digests(token_ids))
        load = router.choose_pipeline(prompt, up, now)
        router.on_first_token(prompt.key, 0, now)
        router.on_request_end(prompt.key, 100, now)
        load.total_sent += 1
    seconds = time.process_time() - began
    router.validate()
    tokens_in_all = sum(router.cached_tokens(load.name) for load in up)
    result = {
        "decisions_per_s": len(prompts) / seconds,
        "tokens_of_a_prompt": fmean(len(tokens) for tokens in prompts),
        "tree_tokens": tokens_in_all,
        "tree_mb": size / 1e6,
    }
    print({name: round(value, 2) for name, value in result.items()})
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figure", nargs="?", choices=("latency", "speed"), default="latency")
    parser.add_argument("--all", action="store_true", help="latency of all, and speed")
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace")
    names: dict[str, Sequence[str]] = {"workloads": tuple(WORKLOADS), "routers": ROUTERS}
    for name, known in names.items():
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=list(known))
    parser.add_argument(
        "--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3]
    )
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=["fcfs"],
        help="scheduling policies",
    )
    parser.add_argument("--requests", type=int, help="of the tools workload, instead of 1500")
    parser.add_argument("--rate", type=float, help="requests/s instead of the workload's")
    parser.add_argument("--tree-tokens", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = measure_latency(options) if options.all or options.figure == "latency" else []
    quickness = measure_speed(options) if options.all or options.figure == "speed" else None
    merge_results(options.out, rows, quickness)


if __name__ == "__main__":
    main()
