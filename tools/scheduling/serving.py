"""Simulate a ring until every request has ended, and summarize latencies."""

import argparse
from dataclasses import dataclass, replace
from itertools import pairwise

from molink.bench.report import Sample, percentile
from molink.facts.profile import MAX_CHUNK_ROWS
from molink.facts.settings import PREEMPTION_MODES
from molink.sim.profiles import LinkProfile
from molink.sim.ring_template import BLOCK_SIZE, RingTemplate
from molink.sim.scenario import Scenario
from molink.sim.simulate import SimPipeline, disable_gc
from molink.sim.workload import Workload
from tools.scheduling.requests import (
    EARLIER_LOAD,
    Draw,
    Plan,
    after_others,
    draw_means,
    plan_poisson,
)

#: Unused: requests come from a plan.
NO_WORKLOAD = Workload(1.0, 1.0)
#: The policy that knows answer lengths.
_KNOWS_ANSWERS = "srpt"
#: A gap between tokens of at least this many seconds counts as a preemption pause.
_PAUSE_S = 0.3


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one policy: seconds per output token, preemptions, times."""

    mean: float
    p95: float
    ttft_mean: float
    ttft_p95: float
    preemptions: int
    #: Requests swapped to host memory, and seconds steps waited for copies.
    swaps: int
    waited_s: float
    #: From the first arrival to the last token, and busy time of the slowest stage.
    seconds: float
    busy_s: float
    requests: int
    #: Shares of total latency: before the first token, and paused after it.
    till_first: float
    paused: float
    #: Prefill rows, recomputed ones included, divided by prompt tokens.
    rows: float


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters of a pipeline; see :class:`Run`."""

    preemptions: int = 0
    swaps: int = 0
    waited_s: float = 0.0
    busy_s: float = 0.0
    rows: int = 0

    @classmethod
    def of(cls, pipeline: SimPipeline) -> "_Counts":
        counters = pipeline.counters
        return cls(
            int(counters["scheduler_preemptions_total"]),
            int(counters["scheduler_swaps_out_total"]),
            max(pipeline.ring.waited_s),
            max(pipeline.computed_s),
            int(counters["scheduler_prefill_rows_total"]),
        )


def simulate_plan(
    scenario: Scenario, plan: Plan, since: float = 0.0
) -> tuple[list[Sample], _Counts, SimPipeline]:
    """Simulate ``plan`` until every request has ended.

    Returns:
        Samples of requests that arrived after ``since``, counters at that time, and the pipeline.
    """
    if scenario.scheduling_policy == _KNOWS_ANSWERS:
        plan = [replace(request, max_tokens=0) for request in plan]
    pipeline, before = SimPipeline(scenario, plan), [_Counts()]
    if since:
        pipeline.event_queue.schedule_at(since, lambda: before.append(_Counts.of(pipeline)))
    with disable_gc():
        pipeline.run(1e6)
    samples = pipeline.clients.collect_samples(since)
    failed = [sample.error for sample in samples if sample.error is not None]
    if pipeline.failure or failed:
        raise SystemExit(f"{scenario.scheduling_policy}: {pipeline.failure or failed[0]}")
    return samples, before[-1], pipeline


def run_plan(scenario: Scenario, plan: Plan, since: float = 0.0) -> Run:
    """Simulate ``plan`` and summarize requests that arrived after ``since``."""
    samples, before, pipeline = simulate_plan(scenario, plan, since)
    done = _Counts.of(pipeline)
    tokens = sorted(sample.latency / sample.output_tokens for sample in samples)
    ttft = sorted(sample.ttft for sample in samples)
    latency = sum(sample.latency for sample in samples)
    gaps = [[b - a for a, b in pairwise(sample.piece_times)] for sample in samples]
    return Run(
        sum(tokens) / len(tokens),
        percentile(tokens, 95),
        sum(ttft) / len(ttft),
        percentile(ttft, 95),
        done.preemptions - before.preemptions,
        done.swaps - before.swaps,
        done.waited_s - before.waited_s,
        max(sample.finished_at for sample in samples) - samples[0].sent_at,
        done.busy_s - before.busy_s,
        len(samples),
        sum(ttft) / latency,
        sum(gap for each in gaps for gap in each if gap > _PAUSE_S) / latency,
        (done.rows - before.rows) / sum(sample.input_tokens for sample in samples),
    )


def print_run(found: Run, policy: str, rate: float) -> Run:
    """Print a run and return it."""
    print(
        f"  {policy:15} {rate:6.2f}/s {found.requests:5} requests: {found.mean:.3f} s a token,"
        f" p95 {found.p95:.3f}; first token {found.ttft_mean:.2f} s, p95 {found.ttft_p95:.2f};"
        f" {found.preemptions} preempted, {found.seconds:.0f} s",
        flush=True,
    )
    return found


def make_ring(options: argparse.Namespace, side: str = "fcfs") -> Scenario:
    """A ring short of KV memory; ``side`` is ``POLICY[:PREEMPTION_MODE]``."""
    policy, _, mode = side.partition(":")
    link = LinkProfile(bandwidth_mbps=1000, latency_ms=0.5)
    stages, device, model = options.stages, options.device, options.model
    scenario = Scenario(NO_WORKLOAD, stages, device, model, link, max_num_seqs=256)
    scenario = replace(scenario, scheduling_policy=policy, swap_gb=options.swap_gb)
    if not mode:
        return scenario
    if mode not in PREEMPTION_MODES:
        raise SystemExit(f"{side}: the mode is one of {', '.join(PREEMPTION_MODES)}")
    return replace(scenario, preemption_mode=mode)


def measure_policy(scenario: Scenario, draw: Draw, rate: float, seconds: float, seed: int) -> Run:
    """Simulate ``seconds`` of requests at ``rate``, after others at half of the ring's capacity."""
    plan = plan_poisson(draw, rate, seconds, seed)
    earlier = EARLIER_LOAD * estimate_capacity(scenario, *draw_means(draw))
    return run_plan(scenario, *after_others(draw, plan, earlier, seed))


def describe_ring(options: argparse.Namespace) -> str:
    """Describe :func:`make_ring` for a report."""
    links = ", 1 Gbps, 0.5 ms" if options.stages > 1 else ""
    return f"{options.stages} x {options.device}, {options.model}{links}"


def estimate_capacity(scenario: Scenario, prompt: float, output: float) -> float:
    """Estimate requests/s of these sizes that one stage serves with full KV memory."""
    blueprint = RingTemplate.from_scenario(scenario)
    (stage,) = blueprint.profiles
    context = prompt + output / 2
    streams = int(blueprint.num_blocks * BLOCK_SIZE / context)
    chunk = stage.prefill_s(MAX_CHUNK_ROWS) / MAX_CHUNK_ROWS
    return 1 / (prompt * chunk + output * stage.decode_s(streams, context) / streams)
