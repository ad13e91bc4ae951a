"""``molink bench``: measure a running server, or a stage on this PC."""

import asyncio
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from molink.bench.client import BenchClient, BenchRoute, BenchTarget
from molink.bench.report import Report, Sample, report_table, summarize
from molink.bench.runner import Measurement, MonotonicClock, run_plan
from molink.bench.workload import PlannedRequest, plan_sizes, plan_trace, read_trace
from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_names import DEMO_MODEL_NAME
from molink.checkpoint.model_source import find_model
from molink.errors import Unavailable, UsageError
from molink.facts.dtypes import DTypeChoice
from molink.facts.layer_range import format_layers, parse_layers
from molink.facts.memory_plan import format_size
from molink.facts.model import KVCacheDType, LayerRange, Quantize
from molink.plaintext import printable
from molinkd.cli.daemon_client import own_api_key
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.agent.stage_bench import BenchPoint, StageBench, StageBenchResult, measure_stage
from molinkd.peer.home import Home

_DEVICE = re.compile(r"^(?:auto|cpu|cuda(?::\d{1,3})?)$")


def stage(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Short name, OWNER/NAME, folder or GGUF file."),
    ] = DEMO_MODEL_NAME,
    layers: Annotated[str | None, typer.Option(help="Layers A-B.  [default: all]")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    threads: Annotated[
        int, typer.Option("--threads", "-t", min=0, help="CPU threads; 0 = torch's default.")
    ] = 0,
    dtype: Annotated[DTypeChoice, typer.Option(help="Data type for computation.")] = "auto",
    quantize: Annotated[Quantize, typer.Option(help="Weight quantization.")] = "none",
    kv_cache_dtype: Annotated[
        KVCacheDType, typer.Option(help="Keys and values of requests.")
    ] = "auto",
    host_experts: Annotated[
        int,
        typer.Option(min=0, help="Experts of each layer in RAM, computed by the CPU."),
    ] = 0,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600.0, help="Maximum measuring time in seconds.")
    ] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Benchmark one stage on this PC and show its bottleneck.

    Compares the steps with the measured memory bandwidth and matrix throughput of the device.
    """
    if _DEVICE.match(device) is None:
        raise UsageError(f"--device must be auto, cpu or cuda:N, not {device!r}")
    source = find_model(model, unpack_into=Home.find_home().unpacked)
    order = StageBench(
        source.path,
        _parse_layers(source.path, layers),
        device=device,
        dtype=dtype,
        quantize=quantize,
        kv_cache_dtype=kv_cache_dtype,
        host_experts=host_experts,
        threads=threads,
        seconds=seconds,
    )
    notes = Console(stderr=True)
    with notes.status(f"loading and measuring {printable(source.name)} …"):
        found = msgspec.structs.replace(measure_stage(order), model=source.name)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode("utf-8"))
    else:
        print_result(found, Console(highlight=False))


def _parse_layers(folder: Path, given: str | None) -> LayerRange:
    """Parse the layer range and check it against the model."""
    layers = None
    if given is not None and (layers := parse_layers(given)) is None:
        raise UsageError(f"--layers must be A-B, such as 1-12, not {given!r}")
    opened = ModelFolder.open(folder, layers)
    return layers or (0, opened.config.layers)


def print_result(found: StageBenchResult, console: Console) -> None:
    """Print the result as tables."""
    threads = f", {found.threads} threads" if found.threads else ""
    quantized = "" if found.quantize == "none" else f", {found.quantize}"
    quantized += ", KV int8" * (found.kv_cache_dtype == "int8")
    layers = format_layers(found.layers)
    beside = found.host_expert_bytes
    quantized += f", {format_size(beside)} of experts in RAM" if beside else ""
    lines = (
        f"{found.model}, layers {layers}: {format_size(found.weight_bytes)} of weights "
        f"({found.dtype}{quantized})",
        f"{found.device}: {found.device_name}{threads}, torch {found.torch}",
    )
    for line in lines:
        console.print(printable(line), markup=False)
    console.print(
        f"\n[bold]T_d[/bold]: a decode step; each stream has {found.context} tokens of context"
    )
    console.print(_points_table("streams", found.decode))
    console.print("\n[bold]T_p[/bold]: the first prefill chunk of a prompt")
    console.print(_points_table("rows", found.prefill))
    read, compute = found.read, found.compute
    tile = f"in steps of {found.tile} rows" if found.tile > 1 else "without steps"
    console.print(
        f"\nMatrix products grow {tile}.\n"
        f"Decode of one stream reads {format_size(read.bytes)} at {read.bytes_per_s / 1e9:.1f} "
        "GB/s: "
        f"{read.share:.0%} of the {read.peak_bytes_per_s / 1e9:.1f} GB/s measured.\n"
        f"Prefill of {compute.rows} rows computes {compute.flops_per_s / 1e12:.2f} TFLOP/s: "
        f"{compute.share:.0%} of the {compute.peak_flops_per_s / 1e12:.2f} TFLOP/s measured."
    )


def _points_table(rows: str, points: Sequence[BenchPoint]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in (rows, "ms", "tokens/s"):
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(f"{point.rows}", f"{point.seconds * 1000:.2f}", f"{point.tokens_per_s:.1f}")
    return table


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
    typer.Option(
        envvar="MOLINK_API_KEY",
        help="API key of the server.  [default: this PC's, for its own endpoint]",
    ),
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
    home: HomeOption = None,
) -> None:
    """Benchmark an OpenAI-compatible endpoint.

    Reports TTFT, TPOT, ITL, latency and throughput.
    """
    plan = _make_plan(trace, input_tokens, output_tokens, rate, requests, seed)
    key = api_key or own_api_key(Home.find_home(home), url)
    endpoint = BenchTarget(url, api, model, key, ignore_eos)
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
