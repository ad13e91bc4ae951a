"""A ring that serves requests to their end, and what came of it."""

import argparse
from dataclasses import dataclass, replace
from itertools import pairwise

from molink.bench.report import percentile
from molink.bench.sample import Sample
from molink.facts.preemption import PREEMPTION_MODES
from molink.facts.profile import MAX_CHUNK_ROWS
from molink.sim.pipeline import SimPipeline
from molink.sim.profiles import LinkProfile
from molink.sim.ring_template import BLOCK_SIZE, RingTemplate
from molink.sim.scenario import Scenario
from molink.sim.simulate import disable_gc
from molink.sim.workload import Workload
from tools.scheduling.requests import (
    EARLIER_LOAD,
    Draw,
    Plan,
    after_others,
    draw_means,
    poisson,
)

#: What is simulated has no workload of its own here: the plan is given.
NO_WORKLOAD = Workload(1.0, 1.0)
#: The policy that is told how long answers will be.
_KNOWS_ANSWERS = "srpt"
#: Seconds between two tokens from which on a request counts as having given way to others.
_PAUSE_S = 0.3


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
    #: From the first arrival to the last token, and in which the slowest stage computed.
    seconds: float
    busy_s: float
    requests: int
    #: Shares of all requests' latency: until the first token, and given way to others after it.
    till_first: float
    paused: float
    #: The longest pause between two tokens of a request: 95th percentile of requests, and of all.
    gap_p95: float
    gap_max: float
    #: Rows of prompts and of what was lost, by the tokens of the prompts.
    rows: float


@dataclass(frozen=True, slots=True)
class _Counts:
    """What a pipeline has done so far; see :class:`Run`."""

    preemptions: int = 0
    swaps: int = 0
    waited_s: float = 0.0
    busy_s: float = 0.0
    rows: int = 0

    @classmethod
    def of(cls, pipeline: SimPipeline) -> "_Counts":
        return cls(
            pipeline.num_preemptions,
            pipeline.swap_counts[0],
            max(pipeline.waited_s),
            max(pipeline.computed_s),
            pipeline.num_prefill_rows,
        )


def serve(
    scenario: Scenario, plan: Plan, since: float = 0.0
) -> tuple[list[Sample], _Counts, SimPipeline]:
    """Every request to its end, however late.

    Returns:
        What those measured that came ``since`` then, what had been done before, and what did it.
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


def run(scenario: Scenario, plan: Plan, since: float = 0.0) -> Run:
    """Figures of one simulation, of those that came ``since`` then."""
    samples, before, pipeline = serve(scenario, plan, since)
    done = _Counts.of(pipeline)
    tokens = sorted(sample.latency / sample.output_tokens for sample in samples)
    ttft = sorted(sample.ttft for sample in samples)
    latency = sum(sample.latency for sample in samples)
    gaps = [[b - a for a, b in pairwise(sample.piece_times)] for sample in samples]
    longest = sorted(max(each, default=0.0) for each in gaps)
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
        percentile(longest, 95),
        longest[-1],
        (done.rows - before.rows) / sum(sample.input_tokens for sample in samples),
    )


def told(found: Run, policy: str, rate: float) -> Run:
    """``found``, printed."""
    print(
        f"  {policy:15} {rate:6.2f}/s {found.requests:5} requests: {found.mean:.3f} s a token,"
        f" p95 {found.p95:.3f}; first token {found.ttft_mean:.2f} s, p95 {found.ttft_p95:.2f};"
        f" {found.preemptions} preempted, {found.seconds:.0f} s",
        flush=True,
    )
    return found


def ring(options: argparse.Namespace, side: str = "fcfs") -> Scenario:
    """Where answers are many, and memory is what is short; ``side`` is ``POLICY[:MODE]``."""
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


def measured(
    scenario: Scenario, draw: Draw, rate: float, seconds: float, seed: int, usual: float = 0.0
) -> Run:
    """So many seconds of requests at ``rate``, after others at the ``usual`` one.

    That is half of what a ring of one stage can serve, if it isn't given.
    """
    plan = poisson(draw, rate, seconds, seed)
    usual = usual or EARLIER_LOAD * capacity_of(scenario, *draw_means(draw))
    return run(scenario, *after_others(draw, plan, usual, seed))


def ring_name(options: argparse.Namespace) -> str:
    """What :func:`ring` is, in words."""
    links = ", 1 Gbps, 0.5 ms" if options.stages > 1 else ""
    return f"{options.stages} x {options.device}, {options.model}{links}"


def capacity_of(scenario: Scenario, prompt: float, output: float) -> float:
    """Requests/s of these sizes that a ring of one stage could serve, about: memory always full."""
    blueprint = RingTemplate.from_scenario(scenario)
    (stage,) = blueprint.profiles
    context = prompt + output / 2
    streams = int(blueprint.num_blocks * BLOCK_SIZE / context)
    chunk = stage.prefill_s(MAX_CHUNK_ROWS) / MAX_CHUNK_ROWS
    return 1 / (prompt * chunk + output * stage.decode_s(streams, context) / streams)
