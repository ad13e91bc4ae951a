"""What scheduling policies of the head bring, in virtual time; one figure for each sub-command.

    python -m tools.scheduling short-behind-long
    python -m tools.scheduling slo                # load that is served within 0.3 s a token
    python -m tools.scheduling slo --kinds trace --trace FILE   # sizes of a trace (Azure's CSV)
    python -m tools.scheduling ratios             # prompts of one to sixteen times the answer
    python -m tools.scheduling preemption         # what becomes of KV that gives way

Each writes ``docs/results/scheduling-NAME.json``, or to ``--out``. Requests arrive as a
Poisson process. Their sizes are log-normal: the means are those that the vLLM paper (2023, §6.1)
gives for ShareGPT (161 and 338 tokens) and Alpaca (19 and 58), the spread is assumed (``SIZES``).
*Latency per token* is FastServe's (§6.1): from a request's arrival to its last token, by its output
tokens; ``mean`` and ``p95`` are over requests.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from molink.bench.planned import PlannedRequest
from molink.bench.report import percentile
from molink.bench.sample import Sample
from molink.bench.trace import TraceRow, read_trace
from molink.facts.preemption import PREEMPTION_MODES
from molink.facts.profile import MAX_CHUNK_ROWS
from molink.sim.blueprint import BLOCK_SIZE, Blueprint
from molink.sim.pipeline import Pipeline
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.simulate import no_collector
from molink.sim.workload import Workload

RESULTS = Path(__file__).parents[1] / "docs" / "results"
#: FastServe's, ten times its shortest iteration; here about ten times as well.
SLO_S = 0.3
#: Means of prompt and answer in tokens, and the spread of their logarithms.
SIZES = {"sharegpt": ((161.0, 1.2), (338.0, 1.0)), "alpaca": ((19.0, 0.6), (58.0, 0.9))}
MAX_PROMPT, MAX_OUTPUT = 2048, 1024
#: Requests/s of a search: a step is a factor of this.
STEP = 2 ** (1 / 4)
#: For each kind of sizes: seconds of arrivals, and the step from which a search begins.
SPAN = {"sharegpt": (45.0, 12), "alpaca": (10.0, 26), "trace": (90.0, 4)}
#: Steps below that a ring has next to nothing to do.
LOW = 10
#: What is simulated has no workload of its own here: the plan is given.
_NO_WORKLOAD = Workload(1.0, 1.0)

Plan = Sequence[PlannedRequest]
#: Sizes of the next request.
Draw = Callable[[random.Random], TraceRow]


@dataclass(frozen=True, slots=True)
class Run:
    """What one policy made of a plan: seconds per output token, and preemptions."""

    mean: float
    p95: float
    ttft_mean: float
    ttft_p95: float
    preemptions: int
    #: Of these, requests that went to host memory, and seconds that steps waited for copies.
    swaps: int
    waited_s: float
    #: From the first arrival to the last token.
    seconds: float
    requests: int


def serve(scenario: Scenario, plan: Plan) -> tuple[list[Sample], Pipeline]:
    """Every request to its end, however late, and what served them."""
    pipeline = Pipeline(scenario, plan)
    with no_collector():
        pipeline.run(1e6)
    samples = pipeline.clients.samples(0.0)
    failed = [sample.error for sample in samples if sample.error is not None]
    if pipeline.trouble or failed:
        raise SystemExit(f"{scenario.scheduling_policy}: {pipeline.trouble or failed[0]}")
    return samples, pipeline


def run(scenario: Scenario, plan: Plan) -> Run:
    """Figures of one simulation."""
    samples, pipeline = serve(scenario, plan)
    tokens = sorted(sample.latency / sample.output_tokens for sample in samples)
    ttft = sorted(sample.ttft for sample in samples)
    return Run(
        sum(tokens) / len(tokens),
        percentile(tokens, 95),
        sum(ttft) / len(ttft),
        percentile(ttft, 95),
        pipeline.preemptions,
        pipeline.swaps[0],
        max(pipeline.waited_s),
        max(sample.finished for sample in samples) - plan[0].at,
        len(plan),
    )


# --- requests ------------------------------------------------------------------------------------


def log_normal(rng: random.Random, mean: float, spread: float, maximum: int) -> int:
    """Tokens with that mean, before they are bounded."""
    value = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return max(1, min(maximum, round(value)))


def sizes_of(kind: str, ratio: float | None = None) -> Draw:
    """Draws sizes; with a ``ratio`` of prompt to answer as many tokens in all, shared out so."""
    (prompt, prompt_spread), (output, output_spread) = SIZES[kind]
    if ratio is not None:
        total = prompt + output
        prompt, output = total * ratio / (1 + ratio), total / (1 + ratio)

    def draw(rng: random.Random) -> TraceRow:
        return TraceRow(
            0.0,
            log_normal(rng, prompt, prompt_spread, MAX_PROMPT),
            log_normal(rng, output, output_spread, MAX_OUTPUT),
        )

    return draw


def sizes_in(path: Path) -> Draw:
    """Draws sizes of a trace."""
    rows = [
        row
        for row in read_trace(path)
        if row.input_tokens <= MAX_PROMPT and row.output_tokens <= MAX_OUTPUT
    ]
    return lambda rng: rng.choice(rows)


def poisson(draw: Draw, rate: float, seconds: float, seed: int) -> Plan:
    """Requests of so many seconds; request ``i`` is of the same size at every rate."""
    sizes, arrivals = random.Random(seed), random.Random(seed + 1)
    plan, at = [], 0.0
    while True:
        at += arrivals.expovariate(rate)
        if at >= seconds and plan:
            return plan
        size = draw(sizes)
        plan.append(PlannedRequest(len(plan), at, size.input_tokens, size.output_tokens))


# --- figures -------------------------------------------------------------------------------------


def short_behind_long(options: argparse.Namespace) -> dict[str, Any]:
    """A short prompt that comes while a long one is on its way, at 20 Mbps."""
    link = LinkProfile(bandwidth_mbps=20, latency_ms=20)
    scenario = Scenario(_NO_WORKLOAD, link=link)
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


def ring(options: argparse.Namespace) -> Scenario:
    """Where answers are many, and memory is what is short."""
    link = LinkProfile(bandwidth_mbps=1000, latency_ms=0.5)
    return Scenario(
        _NO_WORKLOAD, options.stages, options.device, options.model, link, max_running=256
    )


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
    return {"ring": _ring_name(options), "slo_s": SLO_S, "rows": rows}


def _within_slo(
    options: argparse.Namespace, kind: str, draw: Draw, policy: str
) -> dict[str, float]:
    scenario = replace(ring(options), scheduling_policy=policy)
    seconds, first = SPAN[kind]

    @cache
    def at(step: int) -> Run:
        plan = poisson(draw, STEP**step, seconds, options.seed)
        return _told(run(scenario, plan), policy, STEP**step)

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
    for ratio in options.ratios:
        total = SIZES["sharegpt"][0][0] + SIZES["sharegpt"][1][0]
        capacity = capacity_of(ring(options), total * ratio / (1 + ratio), total / (1 + ratio))
        rate = options.load * capacity
        plan = poisson(sizes_of("sharegpt", ratio), rate, options.seconds, options.seed)
        for policy in options.policies:
            found = _told(run(replace(ring(options), scheduling_policy=policy), plan), policy, rate)
            rows.append(
                {"ratio": ratio, "rate": rate, "policy": policy}
                | {"mean_s": found.mean, "p95_s": found.p95, "preemptions": found.preemptions}
            )
    return {"ring": _ring_name(options), "load": options.load, "seconds": options.seconds} | {
        "rows": rows
    }


def preemption(options: argparse.Namespace) -> dict[str, Any]:
    """Latency per token by what becomes of the KV of those that give way."""
    total = SIZES["sharegpt"][0][0] + SIZES["sharegpt"][1][0]
    rows = []
    for ratio in options.ratios:
        capacity = capacity_of(ring(options), total * ratio / (1 + ratio), total / (1 + ratio))
        for load in options.loads:
            rate = load * capacity
            plan = poisson(sizes_of("sharegpt", ratio), rate, options.seconds, options.seed)
            for mode in PREEMPTION_MODES:
                scenario = replace(
                    ring(options), scheduling_policy="skip-join-mlfq", preemption_mode=mode
                )
                found = _told(run(scenario, plan), mode, rate)
                rows.append(
                    {"ratio": ratio, "load": load, "rate": rate, "mode": mode}
                    | {"mean_s": found.mean, "p95_s": found.p95, "ttft_s": found.ttft_mean}
                    | {"preemptions": found.preemptions, "swaps": found.swaps}
                    | {"waited": found.waited_s / found.seconds}
                )
    return {"ring": _ring_name(options), "seconds": options.seconds, "rows": rows}


def capacity_of(scenario: Scenario, prompt: float, output: float) -> float:
    """Requests/s of these sizes that a ring of one stage could serve, about: memory always full."""
    blueprint = Blueprint.of(scenario)
    (stage,) = blueprint.profiles
    context = prompt + output / 2
    streams = int(blueprint.blocks * BLOCK_SIZE / context)
    chunk = stage.prefill_s(MAX_CHUNK_ROWS) / MAX_CHUNK_ROWS
    return 1 / (prompt * chunk + output * stage.decode_s(streams, context) / streams)


def _ring_name(options: argparse.Namespace) -> str:
    links = ", 1 Gbps, 0.5 ms" if options.stages > 1 else ""
    return f"{options.stages} x {options.device}, {options.model}{links}"


def _told(found: Run, policy: str, rate: float) -> Run:
    print(
        f"  {policy:15} {rate:6.2f}/s {found.requests:5} requests: {found.mean:.3f} s a token,"
        f" p95 {found.p95:.3f}; first token {found.ttft_mean:.2f} s, p95 {found.ttft_p95:.2f};"
        f" {found.preemptions} preempted, {found.seconds:.0f} s",
        flush=True,
    )
    return found


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
    )
    commands = parser.add_subparsers(required=True)
    all_policies = ["fcfs", "mlfq", "fixed-priority", "skip-join-mlfq", "srpt"]
    figures: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "short-behind-long": short_behind_long,
        "slo": slo,
        "ratios": ratios,
        "preemption": preemption,
    }
    for name, figure in figures.items():
        command = commands.add_parser(name, help=(figure.__doc__ or "").splitlines()[0])
        command.add_argument("--policies", type=lambda text: text.split(","), default=all_policies)
        command.add_argument("--out", type=Path, default=RESULTS / f"scheduling-{name}.json")
        command.add_argument("--seconds", type=float, default=40.0, help="of arrivals")
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--stages", type=int, default=1)
        command.add_argument("--device", default="rtx4090")
        command.add_argument("--model", default="qwen-7b")
        command.add_argument("--kinds", type=lambda text: text.split(","), default=list(SIZES))
        command.add_argument("--trace", type=Path)
        command.add_argument("--load", type=float, default=1.5, help="by what could be served")
        command.add_argument("--loads", type=_numbers, default=[1.5, 3.0])
        command.add_argument(
            "--ratios",
            type=_numbers,
            default=[1, 2, 4, 8, 16],
        )
        command.set_defaults(figure=figure)
    options = parser.parse_args()
    began = time.process_time()
    result = options.figure(options)
    for row in result["rows"]:
        print(
            " | ".join(
                f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()
            )
        )
    print(f"{time.process_time() - began:.0f} s of CPU time")
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
