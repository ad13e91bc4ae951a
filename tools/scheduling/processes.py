"""Compare the ranking of policies by real processes with the simulator's."""

import argparse
import asyncio
from statistics import fmean
from typing import Any

from molink.bench.client import BenchClient, BenchTarget
from molink.bench.report import Sample
from molink.bench.runner import MonotonicClock, run_plan
from molink.bench.workload import PlannedRequest
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import find_demo_model
from molink.sim.profiles import LinkProfile, ModelProfile
from molink.sim.scenario import Scenario
from tools.scheduling.requests import Plan
from tools.scheduling.serving import NO_WORKLOAD, simulate_plan
from tools.serving.process import molink_swarm

STAGES = 2
#: Requests that may hold KV blocks at once; few, so that others wait.
PLACES = 4
#: All requests arrive within this time, so the policy decides their order on any PC.
SECONDS = 0.2
#: Prompt and answer of long requests (every fourth) and of short ones.
LONG, SHORT = (200, 320), (24, 24)


def plan_burst(requests: int) -> Plan:
    """Plan long and short requests, evenly spaced; the first ones are long."""
    return [
        PlannedRequest(
            index, SECONDS * index / requests, *(LONG if index % 4 == 0 or index < 4 else SHORT)
        )
        for index in range(requests)
    ]


def measure_processes(options: argparse.Namespace) -> dict[str, Any]:
    """Measure latency by policy on two real stages of the bundled model, and simulated."""
    plan, rows = plan_burst(options.requests), []
    for policy in options.policies:
        real = asyncio.run(_measure_served(policy, plan))
        expected = simulate_plan(simulate_ring(policy), plan)[0]
        row = {
            "policy": policy,
            "real_s": mean_latency(real),
            "simulated_s": mean_latency(expected),
        }
        print(row, flush=True)
        rows.append(row)
    ranked = [sorted(rows, key=lambda row: row[side]) for side in ("real_s", "simulated_s")]
    orders = [[row["policy"] for row in each] for each in ranked]
    return {"requests": len(plan), "real": orders[0], "simulated": orders[1], "rows": rows}


def mean_latency(samples: list[Sample]) -> float:
    """Mean seconds of latency per output token."""
    return fmean(sample.latency / sample.output_tokens for sample in samples)


async def _measure_served(policy: str, plan: Plan) -> list[Sample]:
    settings = {"MOLINK_MAX_NUM_SEQS": str(PLACES), "MOLINK_SCHEDULING_POLICY": policy}
    with molink_swarm(find_demo_model().path, STAGES, settings=settings) as url:
        clock = MonotonicClock()
        async with BenchClient(BenchTarget(url, "completions"), clock) as client:
            await client.calibrate_prompts()
            done = await run_plan(plan, client.send, concurrency=len(plan), clock=clock)
    failed = [sample.error for sample in done.samples if sample.error is not None]
    if failed:
        raise SystemExit(f"{policy}: {failed[0]}")
    return list(done.samples)


def simulate_ring(policy: str) -> Scenario:
    """The same ring in the simulator."""
    facts = ModelFolder.open(find_demo_model().path).config
    shape = ModelProfile(
        "demo",
        "config.json",
        facts.layers,
        facts.hidden_size,
        facts.intermediate_size,
        facts.heads,
        facts.kv_heads,
        facts.head_dim,
        facts.vocab_size,
    )
    return Scenario(
        NO_WORKLOAD,
        STAGES,
        "cpu-8core",
        "demo",
        LinkProfile(bandwidth_mbps=1000, latency_ms=0.1),
        max_num_seqs=PLACES,
        scheduling_policy=policy,
        shape=shape,
    )
