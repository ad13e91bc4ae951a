"""``molink simulate``: run a trace, or requests of one size, in virtual time."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from molink.bench.workload import TraceRow, read_trace
from molink.errors import UsageError
from molink.link.policies.create import create_policy
from molink.link.recording import ReplayDifference, replay_recording
from molink.sim.fleet import FleetOutcome, FleetScenario, simulate_fleet
from molink.sim.profiles import LinkProfile, load_link
from molink.sim.scenario import Scenario
from molink.sim.simulate import SimulationOutcome, simulate_scenario, simulate_scenarios
from molink.sim.timeline import Timeline, draw_timelines
from molink.sim.workload import Workload
from molinkd.cli import simulate_options as options


def fleet_options(
    pipelines: int | None,
    peers: int | None,
    peers_per_uplink: int | None,
    router: str | None,
    departures_per_hour: float | None,
    away_s: float | None,
) -> dict[str, Any] | None:
    """Return the given options (numbers, seconds) by field of :class:`FleetScenario`.

    ``None`` stands for a single ring.

    Raises:
        UsageError: an option needs ``--pipelines``.
    """
    given = {
        "peers": ("--peers", peers),
        "peers_per_uplink": ("--peers-per-uplink", peers_per_uplink),
        "router": ("--router", router),
        "departures_per_hour": ("--churn", departures_per_hour),
        "away_s": ("--away", away_s),
    }
    found = {name: value for name, (_, value) in given.items() if value is not None}
    if pipelines is None and found:
        option = given[next(iter(found))][0]
        raise UsageError(f"{option} needs --pipelines")
    return None if pipelines is None else {"pipelines": pipelines, **found}


def show_fleets(rings: Sequence[Scenario], options: dict[str, Any], as_json: bool) -> None:
    """Simulate a fleet of each of ``rings`` and print the results."""
    found: list[tuple[FleetOutcome, float]] = []
    for ring in rings:
        fleet = FleetScenario(ring, **options)
        with Console(stderr=True).status("simulating …"):
            began = time.process_time()
            outcome = simulate_fleet(fleet)
            found.append((outcome, time.process_time() - began))
    if as_json:
        values = [{**outcome.as_json(), "cpu_s": round(cpu, 2)} for outcome, cpu in found]
        print(json.dumps(values if len(values) > 1 else values[0], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for outcome, _ in found:
        table.add_column(outcome.report.policy, justify="right")
    rows = [dict(_outcome_rows(*each)) for each in found]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    Console().print(table)


def _outcome_rows(outcome: FleetOutcome, cpu: float) -> Iterator[tuple[str, str]]:
    """Yield the rows of a result."""
    report, pipelines = outcome.report, outcome.pipelines
    yield "requests done", str(report.completed)
    yield "lost", str(outcome.num_lost)
    yield "resubmitted", str(outcome.num_resubmitted)
    yield "PCs that left", str(outcome.num_departures)
    yield "rings lost / formed", f"{_total(pipelines, 'lost')} / {_total(pipelines, 'formed')}"
    yield "rings that failed on their own", str(outcome.num_broken)
    for name, summary, places in (("TTFT", report.ttft_s, 2), ("TPOT", report.tpot_s, 4)):
        values = (summary.mean, summary.p50, summary.p90, summary.p99)
        shown = " / ".join(format_seconds(value, places) for value in values)
        yield f"{name}, s: mean / p50 / p90 / p99", shown
    loads = [each.requests for each in pipelines]
    spread = f"{min(loads)} / {fmean(loads):.1f} / {max(loads)}"
    yield "requests per pipeline: least / mean / most", spread
    busy = [100 * share for share in outcome.busy_shares]
    yield (
        "PC busy: least / mean / most",
        f"{min(busy):.0f} / {fmean(busy):.0f} / {max(busy):.0f} %",
    )
    yield "prompt tokens cached", f"{100 * outcome.cached_share:.0f} %"
    yield "virtual minutes", f"{outcome.virtual_s / 60:.1f}"
    yield "CPU seconds per virtual minute", f"{60 * cpu / outcome.virtual_s:.2f}"


def _total(pipelines: Sequence[Any], name: str) -> int:
    return sum(getattr(each, name) for each in pipelines)


def format_seconds(value: float | None, places: int) -> str:
    """Format seconds for a table."""
    return "–" if value is None else f"{value:.{places}f}"


#: Default length of a timeline, in seconds.
_WINDOW_S = 3.0
#: Maximum number of printed differences of a replay.
_MAX_DIFFERENCES = 20


def simulate_command(
    trace: options.Trace = None,
    rate: options.Rate = 0.5,
    duration: options.Duration = 200.0,
    warmup: options.Warmup = 0.0,
    arrivals: options.Arrivals = "poisson",
    max_prompt: options.MaxTokens = 2048,
    max_output: options.MaxTokens = 1024,
    input_tokens: options.InputTokens = None,
    output_tokens: options.OutputTokens = None,
    seed: options.Seed = 0,
    stages: options.Stages = 3,
    device: options.Device = "rtx4090",
    model_profile: options.ModelProfile = "qwen-7b",
    link: options.Link = "wan-100mbps-30ms",
    bandwidth: options.Bandwidth = None,
    latency: options.Latency = None,
    congestion: options.Congestion = None,
    max_num_seqs: options.MaxNumSeqs = 256,
    pipelines: options.Pipelines = None,
    peers: options.Peers = None,
    peers_per_uplink: options.PeersPerUplink = None,
    router: options.Router = None,
    churn: options.Churn = None,
    away: options.Away = None,
    policy: options.Policy = "adaptive",
    scheduling_policy: options.SchedulingPolicy = "fcfs",
    preemption_mode: options.Preemption = "recompute",
    cut_through: options.CutThrough = True,
    compression: options.Compression = "lossless",
    micro_batches: options.MicroBatches = "auto",
    prefill_only_batches: options.PrefillOnlyBatches = True,
    max_num_batched_tokens: options.MaxNumBatchedTokens = "auto",
    tensors: options.Tensors = 1,
    as_json: options.Json = False,
    timeline: options.Timeline = None,
    window: options.Window = None,
    recording: options.Replay = None,
) -> None:
    """Simulate a trace on a ring of stages in virtual time, using molink's real schedulers.

    Devices are rooflines from data sheets. Links have a bandwidth and latency, and optionally TCP's
    congestion control; see the profiles. --pipelines simulates many rings together.
    """
    if recording is not None:
        _replay_recording(recording, as_json=as_json)
        return
    fleet = fleet_options(pipelines, peers, peers_per_uplink, router, churn, away)
    _check_options(trace, arrivals, timeline, window, is_fleet=fleet is not None)
    rows, sizes = _read_requests(trace, input_tokens, output_tokens)
    load = Workload(rate, duration, warmup, rows, arrivals, seed, *sizes, max_prompt, max_output)
    scenario = Scenario(
        load,
        stages,
        device,
        model_profile,
        _make_link(link, bandwidth, latency, congestion),
        cut_through=cut_through,
        compression=compression,
        micro_batches=_parse_count("--micro-batches", micro_batches),
        tensors_per_row=tensors,
        max_num_batched_tokens=_parse_count("--max-num-batched-tokens", max_num_batched_tokens),
        max_num_seqs=max_num_seqs,
        scheduling_policy=scheduling_policy,
        preemption_mode=preemption_mode,
        prefill_only_batches=prefill_only_batches,
    )
    scenarios = [replace(scenario, policy=name) for name in _parse_policies(policy)]
    if fleet is not None:
        show_fleets(scenarios, fleet, as_json)
    else:
        _show_rings(scenarios, timeline, window, as_json=as_json)


def _check_options(
    trace: Path | None, arrivals: str, picture: Path | None, window: str | None, *, is_fleet: bool
) -> None:
    """Check options that depend on each other."""
    if trace is None and arrivals == "trace":
        raise UsageError("--arrivals trace needs a --trace with times")
    if window is not None and picture is None:
        raise UsageError("--window needs --timeline FILE.svg")
    if is_fleet and picture is not None:
        raise UsageError("--timeline draws a single ring: omit --pipelines")


def _read_requests(
    trace: Path | None, input_tokens: int | None, output_tokens: int | None
) -> tuple[tuple[TraceRow, ...], tuple[int, int]]:
    """Return the rows of the trace, and the sizes of requests without one."""
    if trace is None:
        tokens = 512 if input_tokens is None else input_tokens
        return (), (tokens, 128 if output_tokens is None else output_tokens)
    if input_tokens is not None or output_tokens is not None:
        raise UsageError("--trace defines the sizes: omit --input-tokens and --output-tokens")
    return tuple(read_trace(trace)), (512, 128)


def _parse_policies(names: str) -> list[str]:
    policies = [name.strip() for name in names.split(",")]
    for name in policies:
        create_policy(name)
    return policies


def _make_link(
    name: str, bandwidth: float | None, latency: float | None, congestion: str | None
) -> LinkProfile:
    """Load a link profile and apply overrides."""
    link = load_link(name)
    return replace(
        link,
        bandwidth_mbps=link.bandwidth_mbps if bandwidth is None else bandwidth,
        latency_ms=link.latency_ms if latency is None else latency,
        congestion=link.congestion if congestion is None else congestion,
    )


def _parse_count(option: str, value: str) -> int:
    """Parse a number, or 0 for ``auto``."""
    if value.strip().lower() == "auto":
        return 0
    if not value.isdecimal() or int(value) == 0:
        raise UsageError(f"{option} must be a positive number or auto, not {value!r}")
    return int(value)


def _show_rings(
    scenarios: Sequence[Scenario], picture: Path | None, window: str | None, *, as_json: bool
) -> None:
    with Console(stderr=True).status("simulating …"):
        outcomes = _run_scenarios(scenarios, picture, window)
    _print_outcomes(outcomes, as_json=as_json)


def _run_scenarios(
    scenarios: Sequence[Scenario], picture: Path | None, window: str | None
) -> list[SimulationOutcome]:
    if picture is None:
        return simulate_scenarios(scenarios)
    if picture.suffix.lower() != ".svg":
        raise UsageError(f"--timeline must be an .svg file, not {picture}")
    begin, end = _parse_window(window, scenarios[0].workload)
    timelines = [Timeline(begin, end) for _ in scenarios]
    outcomes = [simulate_scenario(*pair) for pair in zip(scenarios, timelines, strict=True)]
    panels = [(each.policy, seen) for each, seen in zip(scenarios, timelines, strict=True)]
    try:
        picture.write_text(draw_timelines(panels, scenarios[0].stages), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write {picture}: {error.strerror or error}") from error
    return outcomes


def _parse_window(text: str | None, workload: Workload) -> tuple[float, float]:
    """Parse the window of the timeline; by default it starts in the middle of the run."""
    if text is None:
        middle = workload.warmup + workload.duration / 2
        return middle, middle + _WINDOW_S
    try:
        begin, end = (float(part) for part in text.split(":"))
    except ValueError:
        begin = end = 0.0
    if not 0 <= begin < end < float("inf"):
        raise UsageError(f"--window must be A:B in seconds with A < B, not {text!r}")
    return begin, end


def _print_outcomes(outcomes: Sequence[SimulationOutcome], *, as_json: bool) -> None:
    if as_json:
        found = [outcome.as_json() for outcome in outcomes]
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
        return
    table = Table(
        caption=(
            "In seconds; idle: share of the time with requests in which a stage does not "
            "compute. Minimum time per token of this ring: "
            f"{1000 * outcomes[0].floor_s:.1f} ms"
        ),
        caption_justify="left",
        caption_style="",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("policy", no_wrap=True)
    for column in ("done", "failed", "K", "TTFT", "p99", "TPOT", "p99", "latency", "idle"):
        table.add_column(column, justify="right", no_wrap=True)
    for outcome in outcomes:
        report = outcome.report
        idle = sum(outcome.bubble_share) / len(outcome.bubble_share)
        table.add_row(
            report.policy,
            str(report.completed),
            str(report.failed),
            str(outcome.micro_batches),
            format_seconds(report.ttft_s.mean, 2),
            format_seconds(report.ttft_s.p99, 2),
            format_seconds(report.tpot_s.mean, 4),
            format_seconds(report.tpot_s.p99, 4),
            format_seconds(report.latency_s.mean, 1),
            f"{100 * max(0.0, idle):.0f} %",
        )
    Console().print(table)
    for report in (outcome.report for outcome in outcomes if outcome.report.failed):
        print(f"{report.policy}: {report.failed} failed; first error: {report.first_error}")


def _replay_recording(recording: Path, *, as_json: bool) -> None:
    try:
        with recording.open("rb") as lines:
            differences = replay_recording(lines)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"can't read the recording {recording}: {why}") from error
    if as_json:
        found = [_difference_json(each) for each in differences]
        print(json.dumps({"recording": str(recording), "differences": found}, indent=2))
    elif not differences:
        print("All decisions match.")
    else:
        for each in differences[:_MAX_DIFFERENCES]:
            print(f"line {each.line}: recorded {each.recorded}, now {each.replayed}")
        print(f"{len(differences)} decisions differ.")
    if differences:
        raise typer.Exit(1)


def _difference_json(each: ReplayDifference) -> dict[str, object]:
    return {
        "line": each.line,
        "at": each.at,
        "recorded": str(each.recorded),
        "replayed": str(each.replayed),
    }
