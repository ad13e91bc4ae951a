"""``molink plan``: predict a ring without starting anything."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from molink.checkpoint import hub
from molink.checkpoint.model_source import (
    DEMO_MODEL_NAME,
    find_demo_model,
    find_local_model,
    is_repository,
)
from molink.errors import UsageError
from molink.facts.memory_plan import format_size
from molink.facts.model import Objective
from molink.sim.profiles import LinkProfile
from molink.sim.swarm_plan import ModelDescription, SwarmPlan, plan_swarm
from molink.swarm.placement.placement import MAX_STAGES, PlacementGoal
from molinkd.cli.daemon_client import fetch_status, require_daemon
from molinkd.cli.live_plan import describe_prospects, explain_rings, print_plan
from molinkd.cli.swarm_verbs import HomeOption

_DEFAULT_PCS = 3
#: Maximum number of PCs in a plan.
_MAX_PCS = 64


def plan(
    stages: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_STAGES,
            help="Minimum number of stages; with a single device also the number of PCs.  "
            "[default: 3 PCs of one device]",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Device of each PC (name or .toml file), comma separated; join the devices of "
            "one PC with +: rtx3090+rtx3060,rtx4090."
        ),
    ] = "rtx4090",
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder (config.json is enough), GGUF file, or name of a model on this "
            "PC.  [default: --model-profile]"
        ),
    ] = None,
    model_profile: Annotated[
        str, typer.Option(help="Model shape: a name or a .toml file.")
    ] = "qwen-7b",
    objective: Annotated[
        Objective,
        typer.Option(help="Optimize for the latency of one stream or the throughput of many."),
    ] = "latency",
    bandwidth: Annotated[float, typer.Option(help="Bandwidth per link, in Mbps.")] = 100.0,
    latency: Annotated[float, typer.Option(help="One-way latency per link, in ms.")] = 30.0,
    streams: Annotated[int, typer.Option(help="Concurrent decoding requests.")] = 8,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt length of the simulated request.")
    ] = 512,
    output_tokens: Annotated[
        int, typer.Option(min=2, help="Answer length of the simulated request.")
    ] = 32,
    live: Annotated[bool, typer.Option("--live", help="Explain the running ring instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
) -> None:
    """Predict placement, micro-batches and speed of a ring from rooflines; starts nothing."""
    if live:
        _explain_live(home, as_json=as_json)
        return
    devices = [name.strip() for name in device.split(",")]
    if len(devices) == 1 and "+" not in device:
        devices *= stages or _DEFAULT_PCS
        stages = len(devices)
    if (
        not all(part.strip() for one in devices for part in one.split("+"))
        or len(devices) > _MAX_PCS
    ):
        raise UsageError(
            f"--device takes 1 to {_MAX_PCS} PCs, separated by commas (rtx3090+rtx3060: a "
            "PC with both)"
        )
    link = LinkProfile(bandwidth, latency)
    planned = plan_swarm(
        ModelDescription.from_profile(model_profile)
        if model is None
        else ModelDescription.from_folder(_find_folder(model)),
        devices,
        link,
        PlacementGoal(objective, stages or 1),
        streams=streams,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    if as_json:
        print(json.dumps(planned.as_json(), indent=2))
    else:
        _print_plan(planned, devices, link)


def _find_folder(model: str) -> Path:
    """Return the model's folder or GGUF file; nothing is fetched."""
    if model == DEMO_MODEL_NAME:
        return find_demo_model().path
    if find_local_model(model) is None and is_repository(model):
        cached = hub.find_cached(model)
        if cached is None:
            raise UsageError(
                f"{model} is not on this PC: download it with `molink pull {model}`, pass a "
                "folder with its config.json, or describe it with --model-profile"
            )
        return cached
    return Path(model)


def _explain_live(home: Path | None, *, as_json: bool) -> None:
    rings = explain_rings(fetch_status(require_daemon(home), scale_out=True))
    if as_json:
        plans = [one.as_json() for one in rings]
        print(json.dumps(plans[0] if len(plans) == 1 else plans, indent=2))
        return
    for one in rings:
        print_plan(one)


def _print_plan(planned: SwarmPlan, devices: list[str], link: LinkProfile) -> None:
    console, forecast = Console(highlight=False), planned.forecast
    counts = {name: devices.count(name) for name in dict.fromkeys(devices)}
    pcs = ", ".join(f"{count} x {name}" for name, count in counts.items())
    console.print(
        f"{planned.model} on {pcs},"
        f" links of {link.bandwidth_mbps:g} Mbps and {link.latency_ms:g} ms one way"
    )
    console.print(_stage_table(planned))
    if planned.spares:
        console.print(f"No stage, only the endpoint: {', '.join(planned.spares)}")
    console.print(f"Least time per token of such a ring: {1e3 * forecast.floor_s:.1f} ms")
    console.print(f"Bottleneck: {planned.bottleneck}")
    console.print(
        f"One request alone, {forecast.prompt_tokens} prompt tokens (simulated): first token after"
        f" {1e3 * forecast.ttft_s:.0f} ms, then one every {1e3 * forecast.tpot_s:.1f} ms"
    )
    for line in describe_prospects(planned.now, planned.more, planned.objective):
        console.print(line)
    console.print(f"With {forecast.streams} streams (< marks the scheduler's choice):")
    console.print(_micro_batch_table(planned))


def _stage_table(planned: SwarmPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "device", "layers", "weights", "KV capacity", "step", "link to next"):
        table.add_column(column, justify="right")
    for index, one in enumerate(planned.stages):
        first, last = one.layers
        table.add_row(
            str(index),
            one.device,
            f"{first}:{last}",
            format_size(one.weights),
            f"{one.kv_tokens} tokens",
            f"{1e3 * one.step_s:.1f} ms",
            f"{1e3 * one.link_s:.1f} ms" if one.link_s else "-",
        )
    return table


def _micro_batch_table(planned: SwarmPlan) -> Table:
    forecast = planned.forecast
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("micro-batches", "rows in each", "ms per token", "slowest stage busy"):
        table.add_column(column, justify="right")
    for each in forecast.curve:
        mark = " <" if each.count == forecast.micro_batches else ""
        busy = f"{100 * each.busy:.0f} %"
        table.add_row(str(each.count), str(each.rows), f"{1e3 * each.token_s:.1f}{mark}", busy)
    return table
