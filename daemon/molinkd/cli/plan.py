"""``molink plan``: what a ring would do, without starting anything."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from molink.sim.forecast import RingForecast, plan_ring
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.workload import Workload


def plan(
    stages: Annotated[int, typer.Option(min=1, help="PCs in the ring.")] = 3,
    device: Annotated[
        str, typer.Option(help="Device of each: a name, or a .toml file.")
    ] = "rtx4090",
    model_profile: Annotated[
        str, typer.Option(help="Shape of the model: a name, or a .toml file.")
    ] = "qwen-7b",
    bandwidth: Annotated[float, typer.Option(help="Of each link, in Mbps.")] = 100.0,
    latency: Annotated[float, typer.Option(help="Of each link, one way, in ms.")] = 30.0,
    streams: Annotated[int, typer.Option(help="Requests that decode at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of the request looked at.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Of its answer.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Placement, micro-batches and predicted times of a ring, by rooflines: nothing is started."""
    scenario = Scenario(
        Workload(rate=1.0, duration=1.0),
        stages=stages,
        device=device,
        model=model_profile,
        link=LinkProfile(bandwidth, latency),
    )
    planned = plan_ring(scenario, streams, prompt_tokens, output_tokens)
    if as_json:
        print(json.dumps(planned.as_json(), indent=2))
    else:
        _show(planned, scenario)


def _show(planned: RingForecast, scenario: Scenario) -> None:
    console = Console(highlight=False)
    link = scenario.link
    ring = ", ".join(f"layers {first}:{last}" for first, last in planned.layers)
    console.print(
        f"{scenario.model} on {scenario.stages} x {scenario.device},"
        f" links of {link.bandwidth_mbps:g} Mbps and {link.latency_ms:g} ms one way"
    )
    console.print(f"Stages: {ring}")
    console.print(f"Least time per token of such a ring: {1e3 * planned.floor_s:.1f} ms")
    console.print(
        f"One request alone, {planned.prompt_tokens} prompt tokens (simulated): first token after"
        f" {1e3 * planned.ttft_s:.0f} ms, then one every {1e3 * planned.tpot_s:.1f} ms"
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("micro-batches", "rows in each", "ms per token", "slowest stage busy"):
        table.add_column(column, justify="right")
    for each in planned.curve:
        mark = " <" if each.count == planned.micro_batches else ""
        busy = f"{100 * each.busy:.0f} %"
        table.add_row(str(each.count), str(each.rows), f"{1e3 * each.token_s:.1f}{mark}", busy)
    console.print(f"With {planned.streams} streams (< is what the head takes):")
    console.print(table)
