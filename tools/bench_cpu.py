"""CPU time that each process of a running swarm on this PC takes for a token.

    .venv/bin/molink demo                      # in another terminal
    .venv/bin/python -m tools.bench_cpu

With the bundled model hardly anything is computed, so it is what molink itself costs. Of a worker,
``loop_ms`` is its event loop alone (Linux), ``loop_share`` that as a share of what its other
threads took, the steps above all: the two rise and fall together on a busy PC, so the share tells
two versions apart where times don't.
"""

import argparse
import asyncio
import json
import sys

import psutil

from molink.bench.client import BenchClient, BenchTarget
from molink.bench.clock import MonotonicClock
from molink.bench.planned_requests import plan_sizes
from molink.bench.runner import run_plan
from tools.swarm_processes import swarm_processes

#: Seconds of CPU time: of a process, and of its first thread, which has the event loop.
Times = tuple[float, float]


def main() -> int:
    """Send requests to the first peer's endpoint; print what they took as JSON."""
    options = _options()
    processes, urls = swarm_processes()
    result = asyncio.run(_measure(processes, urls[0], options))
    print(json.dumps(result, indent=2))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    return parser.parse_args()


async def _measure(
    processes: dict[psutil.Process, str], url: str, options: argparse.Namespace
) -> list[dict[str, object]]:
    clock = MonotonicClock()
    count = options.warmup + options.requests
    plan = plan_sizes(options.input_tokens, options.output_tokens, float("inf"), count, seed=0)
    async with BenchClient(BenchTarget(url), clock) as client:
        await client.calibrate_prompts()
        for part in (plan[: options.warmup], plan[options.warmup :]):
            before = {process: _times(process) for process in processes}
            run = await run_plan(part, client.send, concurrency=options.concurrency, clock=clock)
    tokens = sum(sample.output_tokens for sample in run.samples)
    return [
        _row(role, before[process], _times(process), tokens) for process, role in processes.items()
    ]


def _times(process: psutil.Process) -> Times:
    times = process.cpu_times()
    first = [each for each in process.threads() if each.id == process.pid]
    return times.user + times.system, sum(each.user_time + each.system_time for each in first)


def _row(role: str, before: Times, after: Times, tokens: int) -> dict[str, object]:
    whole, loop = (
        1000 * (late - early) / tokens for early, late in zip(before, after, strict=True)
    )
    row: dict[str, object] = {"role": role, "ms": round(whole, 3)}
    if role.startswith("stage") and 0 < loop < whole:
        row |= {"loop_ms": round(loop, 3), "loop_share": round(loop / (whole - loop), 3)}
    return row


if __name__ == "__main__":
    sys.exit(main())
