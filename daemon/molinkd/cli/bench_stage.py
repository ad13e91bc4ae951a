"""``molink bench stage``: measure layers of a model on this PC."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from molink.checkpoint.model_folder import ModelFolder
from molink.checkpoint.model_source import DEMO_MODEL_NAME, find_model
from molink.errors import UsageError
from molink.facts.dtypes import DTypeChoice
from molink.facts.memory_plan import format_size
from molink.facts.model import LayerRange, Quantize
from molink.plaintext import printable
from molink.swarm.placement.placement import parse_layers
from molinkd.peer.agent.stage_bench import BenchPoint, StageBench, StageBenchResult, measure_stage
from molinkd.peer.home import Home

_DEVICE = re.compile(r"^(?:auto|cpu|cuda(?::\d{1,3})?)$")


def stage(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Folder, GGUF file, OWNER/NAME or molink-demo."),
    ] = DEMO_MODEL_NAME,
    layers: Annotated[str | None, typer.Option(help="Layer range A:B.  [default: all]")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    threads: Annotated[
        int, typer.Option("--threads", "-t", min=0, help="CPU threads; 0 = torch's default.")
    ] = 0,
    dtype: Annotated[DTypeChoice, typer.Option(help="Data type for computation.")] = "auto",
    quantize: Annotated[Quantize, typer.Option(help="Weight quantization.")] = "none",
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
    wanted = None
    if given is not None and (wanted := parse_layers(given)) is None:
        raise UsageError(f"--layers must be A:B, such as 0:12, not {given!r}")
    opened = ModelFolder.open(folder, wanted)
    return wanted or (0, opened.config.layers)


def print_result(found: StageBenchResult, console: Console) -> None:
    """Print the result as tables."""
    first, last = found.layers
    threads = f", {found.threads} threads" if found.threads else ""
    quantized = "" if found.quantize == "none" else f", {found.quantize}"
    lines = (
        f"{found.model}, layers {first}:{last}: {format_size(found.weight_bytes)} of weights "
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
