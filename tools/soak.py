"""Growth of memory and descriptors in a long-running swarm.

    .venv/bin/molink demo                      # in another terminal
    .venv/bin/python -m tools.soak --requests 500
    .venv/bin/python -m tools.soak --minutes 30

``--requests`` sends requests to the running swarm and measures its processes (daemons, workers and
other descendants) after ``--settle`` requests and at the end.

``--minutes`` starts three PCs (:mod:`tools.chaos`) under steady load; each minute a fourth joins
and leaves. The three are measured before each join, from a fifth of the time on. Texts must not
change.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

from molink.bench.client import BenchClient, BenchTarget
from molink.bench.report import Sample, summarize
from molink.bench.runner import MonotonicClock, run_plan
from molink.bench.workload import PlannedRequest, plan_sizes
from molink.facts.layer_range import stage_number
from tools.chaos.churn import run_churn
from tools.chaos.usage import Usage, measure_usage

#: Largest allowed ratio of final to first usage.
TARGET = 1.05


def main() -> int:
    """Print the result as JSON; exit code 1 if the target is missed."""
    options = _parse_options()
    # Clean up on SIGTERM too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = _soak_churning(options) if options.minutes else _soak_running(options)
    print(json.dumps(result, indent=2))
    return 0 if result["worst_ratio"] <= TARGET and not result["failed"] else 1


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--url", action="append", help="endpoint, repeatable; default: every peer's"
    )
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument(
        "--settle", type=int, default=100, help="requests before the first measurement"
    )
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument(
        "--minutes", type=float, help="start a swarm that a PC joins and leaves each minute"
    )
    parser.add_argument("--keep", type=Path, help="folder for that swarm's homes, which stays")
    options = parser.parse_args()
    if options.requests <= options.settle:
        parser.error("--requests has to be more than --settle")
    return options


def _soak_running(options: argparse.Namespace) -> dict[str, Any]:
    """Load the running swarm."""
    processes, endpoints = swarm_processes()
    urls = options.url or endpoints
    samples, first = asyncio.run(_run_soak(urls, processes, options))
    report = summarize(samples, 0.0, policy="soak")
    rows = compare_usage(first, _measure_roles(processes))
    return {
        "requests": len(samples),
        "failed": report.failed,
        "first_error": report.first_error,
        "worst_ratio": worst_ratio(rows),
        "processes": rows,
    }


def _soak_churning(options: argparse.Namespace) -> dict[str, Any]:
    """Run a swarm of three that a fourth PC joins and leaves."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        root = options.keep or Path(folder)
        found = asyncio.run(run_churn(root, options.minutes * 60.0, streams=options.concurrency))
    rows = compare_usage(found.settled, found.last)
    return {
        "seconds": round(time.monotonic() - begun),
        "joins": found.joins,
        "requests": found.requests,
        "failed": len(found.troubles),
        "first_error": found.troubles[0] if found.troubles else None,
        "worst_ratio": worst_ratio(rows),
        "processes": rows,
    }


def swarm_processes() -> tuple[dict[psutil.Process, str], list[str]]:
    """Find all processes of the running swarm with their roles, and its endpoints."""
    command = [sys.executable, "-m", "molinkd", "status", "--json"]
    # The exit code also tells readiness.
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, encoding="utf-8")
    if not done.stdout:
        raise SystemExit(f"`molink status` ended with exit code {done.returncode}")
    peers: list[dict[str, Any]] = json.loads(done.stdout)["peers"]
    found: dict[psutil.Process, str] = {}
    for peer in peers:
        daemon = psutil.Process(peer["daemon_pid"])
        found[daemon] = f"daemon of {peer['name']}"
        workers = {worker["pid"]: worker["stage"] for worker in peer["workers"]}
        for child in daemon.children(recursive=True):
            stage = workers.get(child.pid)
            child_role = f"child of {peer['name']}"
            found[child] = child_role if stage is None else f"stage {stage_number(stage)}"
    return found, [peer["endpoint"] for peer in peers if peer["endpoint"]]


def _measure_roles(processes: Mapping[psutil.Process, str]) -> dict[str, Usage]:
    return {
        f"{role} ({process.pid})": measure_usage([process]) for process, role in processes.items()
    }


async def _run_soak(
    urls: Sequence[str], processes: dict[psutil.Process, str], options: argparse.Namespace
) -> tuple[list[Sample], dict[str, Usage]]:
    """All samples, and usage after the first requests."""
    clock = MonotonicClock()
    plan = plan_sizes(
        options.input_tokens, options.output_tokens, float("inf"), options.requests, seed=0
    )
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(BenchClient(BenchTarget(url), clock)) for url in urls
        ]
        for client in clients:
            await client.calibrate_prompts()

        async def send(request: PlannedRequest) -> Sample:
            return await clients[request.index % len(clients)].send(request)

        samples: list[Sample] = []
        looks: list[dict[str, Usage]] = []
        for part in (plan[: options.settle], plan[options.settle :]):
            run = await run_plan(part, send, concurrency=options.concurrency, clock=clock)
            samples += run.samples
            looks.append(_measure_roles(processes))
            print(f"{len(samples)} requests done", file=sys.stderr)
        return samples, looks[0]


def compare_usage(first: Mapping[str, Usage], last: Mapping[str, Usage]) -> list[dict[str, Any]]:
    """A row per role that exists at both times."""
    return [
        {
            "role": role,
            "rss_first": first[role].rss,
            "rss_last": last[role].rss,
            "rss_ratio": round(last[role].rss / first[role].rss, 4),
            "descriptors_first": first[role].descriptors,
            "descriptors_last": last[role].descriptors,
            "descriptors_ratio": round(last[role].descriptors / first[role].descriptors, 4),
        }
        for role in first.keys() & last.keys()
    ]


def worst_ratio(rows: Sequence[Mapping[str, Any]]) -> float:
    """The largest ratio."""
    return max(float(row[key]) for row in rows for key in ("rss_ratio", "descriptors_ratio"))


if __name__ == "__main__":
    sys.exit(main())
