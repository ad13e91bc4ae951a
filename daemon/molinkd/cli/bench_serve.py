"""``molink bench``: measure a running server, or a stage on this PC."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from molink.bench.client import BenchClient, BenchRoute, BenchTarget
from molink.bench.clock import MonotonicClock
from molink.bench.planned_requests import PlannedRequest, plan_sizes, plan_trace
from molink.bench.report import Report, report_table, summarize
from molink.bench.runner import Measurement, run_plan
from molink.bench.sample import Sample
from molink.bench.trace import read_trace
from molink.errors import Unavailable, UsageError
from molinkd.cli.bench_stage import stage

bench_app = typer.Typer(help="Benchmark a server, or this PC.", no_args_is_help=True)
bench_app.command("stage")(stage)

#: Exit code after Ctrl-C, as in shells.
INTERRUPTED = 130


TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="Sizes and arrivals from an Azure (.csv) or Mooncake (.jsonl) trace.  [default: none]"
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(
        help="Requests per second (Poisson), or inf for all at once.  [default: the trace's "
        "times; without a trace: inf]"
    ),
]
ModelOption = Annotated[str | None, typer.Option(help="Model name.  [default: first listed]")]
KeyOption = Annotated[
    str | None,
    typer.Option(envvar="MOLINK_API_KEY", help="API key of the server.  [default: none]"),
]
EosOption = Annotated[
    bool, typer.Option(help="Request full-length answers (an extension of vLLM and molink).")
]
PolicyOption = Annotated[
    str, typer.Option(help="Policy name to record in the result; servers don't report it.")
]


@bench_app.callback()
def bench() -> None:
    """Benchmark a server, or this PC."""


@bench_app.command("serve")
def serve(
    url: Annotated[str, typer.Option(help="URL of the server, with or without /v1.")],
    trace: TraceOption = None,
    input_tokens: Annotated[int | None, typer.Option(help="Prompt tokens.  [default: 128]")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Answer tokens.  [default: 64]")] = None,
    rate: RateOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Maximum number of requests.")] = 100,
    warmup: Annotated[int, typer.Option(min=0, help="Uncounted requests to send first.")] = 0,
    model: ModelOption = None,
    api_key: KeyOption = None,
    api: Annotated[BenchRoute, typer.Option(help="Route to use.")] = "chat",
    ignore_eos: EosOption = True,
    policy: PolicyOption = "unknown",
    seed: Annotated[int, typer.Option(help="Seed of arrivals and prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Benchmark an OpenAI-compatible endpoint.

    Reports TTFT, TPOT, ITL, latency and throughput.
    """
    plan = _make_plan(trace, input_tokens, output_tokens, rate, requests, seed)
    endpoint = BenchTarget(url, api, model, api_key, ignore_eos)
    notes = Console(stderr=True)
    with _progress_bar(notes, hidden=as_json and not notes.is_terminal) as progress:
        measurement = asyncio.run(_measure(endpoint, plan, warmup, concurrency, seed, progress))
    report = summarize(
        measurement.samples,
        measurement.duration,
        policy=policy,
        interrupted=measurement.interrupted,
    )
    _print_report(report, notes, as_json=as_json)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not report.completed:
        raise Unavailable(f"no request completed; first error: {report.first_error}")


def _make_plan(
    trace: Path | None,
    input_tokens: int | None,
    output_tokens: int | None,
    rate: float | None,
    requests: int,
    seed: int,
) -> list[PlannedRequest]:
    if trace is None:
        return plan_sizes(
            128 if input_tokens is None else input_tokens,
            64 if output_tokens is None else output_tokens,
            math.inf if rate is None else rate,
            requests,
            seed,
        )
    if input_tokens is not None or output_tokens is not None:
        raise UsageError("--trace defines the sizes: omit --input-tokens and --output-tokens")
    return plan_trace(read_trace(trace), rate, requests, seed)


async def _measure(
    endpoint: BenchTarget,
    plan: list[PlannedRequest],
    warmup: int,
    concurrency: int,
    seed: int,
    progress: Progress,
) -> Measurement:
    clock = MonotonicClock()
    async with BenchClient(endpoint, clock, seed) as client:
        if not await client.calibrate_prompts():
            progress.console.print(
                "The server reports no token counts (usage); sizes are approximate."
            )
        if warmup:
            first = plan[0]
            tries = [replace(first, index=-1 - number, arrival_s=0.0) for number in range(warmup)]
            warm = await _run_phase("warm-up", tries, client, concurrency, clock, progress)
            if warm.interrupted:
                return replace(warm, samples=())
        return await _run_phase(client.model, plan, client, concurrency, clock, progress)


async def _run_phase(
    title: str,
    plan: list[PlannedRequest],
    client: BenchClient,
    concurrency: int,
    clock: MonotonicClock,
    progress: Progress,
) -> Measurement:
    """Run one plan with a progress bar."""
    bar = progress.add_task(title, total=len(plan), failed="")
    failed = 0

    def count(sample: Sample) -> None:
        nonlocal failed
        failed += sample.error is not None
        progress.update(bar, advance=1, failed=f"{failed} failed" if failed else "")

    return await run_plan(plan, client.send, concurrency=concurrency, clock=clock, on_sample=count)


def _progress_bar(console: Console, *, hidden: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[red]{task.fields[failed]}"),
        console=console,
        disable=hidden,
    )


def _print_report(report: Report, notes: Console, *, as_json: bool) -> None:
    if report.failed:
        notes.print(
            f"{report.failed} requests failed; first error: {report.first_error}", markup=False
        )
    if report.interrupted:
        notes.print("Interrupted: partial results.")
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        Console().print(report_table(report))
