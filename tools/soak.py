"""Whether memory grows: sends requests to a running swarm and compares each process's RSS.

    .venv/bin/molink demo                      # in another terminal
    .venv/bin/python -m tools.soak --requests 500

Processes come from ``molink status --json`` of this PC: every daemon, its workers and their other
descendants. RSS is taken once the first ``--settle`` requests have completed, and at the end.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import psutil

from molink.bench.clock import MonotonicClock
from molink.bench.http import BenchClient, BenchTarget
from molink.bench.planned import PlannedRequest, plan_sizes
from molink.bench.report import summarize
from molink.bench.runner import run_plan
from molink.bench.sample import Sample
from tools.swarm_processes import swarm_processes

#: RSS at the end by RSS after the first requests, at most.
TARGET = 1.05


def main() -> int:
    """Run the soak and print its result as JSON; exit code 1 if it misses the target."""
    options = _options()
    processes, endpoints = swarm_processes()
    urls = options.url or endpoints
    samples, first = asyncio.run(_soak(urls, processes, options))
    report = summarize(samples, 0.0, policy="soak")
    rows = _compare(processes, first, _rss(processes))
    worst = max(row["ratio"] for row in rows)
    result = {
        "requests": len(samples),
        "failed": report.failed,
        "first_error": report.first_error,
        "worst_ratio": worst,
        "processes": rows,
    }
    print(json.dumps(result, indent=2))
    return 0 if worst <= TARGET and not report.failed else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--url", action="append", help="an endpoint; may be repeated; default: every peer's"
    )
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--settle", type=int, default=100, help="requests before the first look")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    options = parser.parse_args()
    if options.requests <= options.settle:
        parser.error("--requests has to be more than --settle")
    return options


def _rss(processes: dict[psutil.Process, str]) -> dict[psutil.Process, int]:
    return {process: process.memory_info().rss for process in processes}


async def _soak(
    urls: Sequence[str], processes: dict[psutil.Process, str], options: argparse.Namespace
) -> tuple[list[Sample], dict[psutil.Process, int]]:
    """All samples, and the RSS of each process after the first requests."""
    clock = MonotonicClock()
    plan = plan_sizes(
        options.input_tokens, options.output_tokens, float("inf"), options.requests, seed=0
    )
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(BenchClient(BenchTarget(url), clock)) for url in urls
        ]
        for client in clients:
            await client.prepare()

        async def send(request: PlannedRequest) -> Sample:
            return await clients[request.index % len(clients)].send(request)

        samples: list[Sample] = []
        looks: list[dict[psutil.Process, int]] = []
        for part in (plan[: options.settle], plan[options.settle :]):
            run = await run_plan(part, send, concurrency=options.concurrency, clock=clock)
            samples += run.samples
            looks.append(_rss(processes))
            print(f"{len(samples)} requests done", file=sys.stderr)
        return samples, looks[0]


def _compare(
    processes: dict[psutil.Process, str],
    first: dict[psutil.Process, int],
    last: dict[psutil.Process, int],
) -> list[dict[str, Any]]:
    return [
        {
            "pid": process.pid,
            "role": role,
            "rss_first": first[process],
            "rss_last": last[process],
            "ratio": round(last[process] / first[process], 4),
        }
        for process, role in processes.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
