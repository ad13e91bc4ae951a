"""``molink plan``: predict a ring, or explain the running one from measurements."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from molink.checkpoint import hub
from molink.checkpoint.model_names import DEMO_MODEL_NAME
from molink.checkpoint.model_source import (
    check_model_name,
    find_catalog_entry,
    find_demo_model,
    find_local_model,
    is_repository,
)
from molink.errors import Unavailable, UsageError
from molink.facts.layer_range import format_layers, stage_number
from molink.facts.memory_plan import format_size
from molink.facts.model import KVCacheDType, Objective
from molink.plaintext import printable
from molink.sim.model_description import ModelDescription
from molink.sim.profiles import LinkProfile
from molink.sim.swarm_plan import SwarmPlan, plan_swarm
from molink.swarm.controller.status_schema import RingEstimate
from molink.swarm.placement.placement import MAX_STAGES, PlacementGoal
from molinkd.cli.daemon_client import fetch_status, require_daemon
from molinkd.cli.swarm_verbs import HomeOption
from molinkd.peer.settings import parse_size


@dataclass(frozen=True, slots=True)
class LiveStage:
    """A stage: ``step_s`` per decode row, and ``link_s`` to send a row to the next stage.

    ``measured``: the link was measured, not assumed. ``weights`` and ``kv`` are bytes of the
    ``memory`` that molink may use on the device; 0: unknown.
    """

    peer: str
    device: str
    layers: tuple[int, int]
    step_s: float
    link_s: float
    measured: bool
    weights: int
    kv: int
    memory: int


@dataclass(frozen=True, slots=True)
class LivePlan:
    """A ring in order; ``idle_peers`` maps peers without a stage to the reason.

    ``round_trip_s`` is the minimum time per token, of a single request. Its first token takes
    ``first_token_s`` for ``prompt_tokens``; 0 if unknown.
    """

    model: str
    objective: str
    stages: tuple[LiveStage, ...]
    round_trip_s: float
    bottleneck: str
    idle_peers: dict[str, str]
    prompt_tokens: int
    first_token_s: float
    #: Estimates of the placement, now and with one more PC of each kind.
    current: RingEstimate | None = None
    prospects: tuple[RingEstimate, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return asdict(self)


def explain_rings(status: dict[str, Any]) -> list[LivePlan]:
    """Return the plan of each ready ring, from ``molink status --json``.

    Raises:
        Unavailable: no ring is ready.
    """
    pipelines = [one for one in status["pipelines"] if one.get("ready") and one["stages"]]
    if not pipelines:
        reasons = [one.get("reason", "") for one in status["pipelines"]]
        why = next((reason for reason in reasons if reason), status.get("trouble", ""))
        raise Unavailable(f"no ring is ready: {why or 'no model is served'}")
    names = {peer["id"]: printable(peer["name"]) for peer in status["peers"]}
    used = {one["peer"] for pipeline in pipelines for one in pipeline["stages"]}
    idle_peers = {
        names[peer["id"]]: printable(peer.get("reason", ""))
        for peer in status["peers"]
        if peer["state"] == "online" and peer["id"] not in used
    }
    objectives = {one["name"]: one.get("objective", "") for one in status.get("models", ())}
    return [_make_plan(one, status, names, idle_peers, objectives) for one in pipelines]


def _make_plan(
    pipeline: dict[str, Any],
    status: dict[str, Any],
    names: dict[str, str],
    idle_peers: dict[str, str],
    objectives: dict[str, str],
) -> LivePlan:
    peers = {peer["id"]: peer for peer in status["peers"]}
    stages = tuple(
        LiveStage(
            peer=names.get(one["peer"], one["peer"]),
            device=printable(one["device"]),
            layers=(one["layers"][0], one["layers"][1]),
            step_s=one["decode_s"],
            link_s=one.get("link_s", 0.0),
            measured=one.get("link_measured", False),
            **_stage_memory(peers.get(one["peer"], {}), pipeline["id"], number),
        )
        for number, one in enumerate(pipeline["stages"])
    )
    model = pipeline.get("model") or status["model"]
    round_trip_s = sum(one.step_s + one.link_s for one in stages)
    objective = objectives.get(model) or status.get("objective", "latency")
    scale_out = status.get("scale_out", {}).get(pipeline["id"], {})
    prospects = tuple(RingEstimate(**one) for one in scale_out.get("more", ()))
    return LivePlan(
        model,
        objective,
        stages,
        round_trip_s,
        _find_bottleneck(stages),
        idle_peers,
        scale_out.get("prompt", 0),
        scale_out.get("first_token_s", 0.0),
        RingEstimate(**scale_out["now"]) if prospects else None,
        tuple(replace(one, device=printable(one.device)) for one in prospects),
    )


def _stage_memory(peer: dict[str, Any], pipeline: str, stage: int) -> dict[str, int]:
    """Return the memory use of a stage, as its PC reports it."""
    for worker in peer.get("workers", ()):
        if (worker["pipeline"], worker["stage"]) == (pipeline, stage) and worker["load"]:
            load = worker["load"]
            return {"weights": load["weights"], "kv": load["kv"], "memory": peer["memory"]}
    return {"weights": 0, "kv": 0, "memory": 0}


def print_plan(plan: LivePlan) -> None:
    """Print a plan."""
    console = Console(highlight=False)
    console.print(f"{printable(plan.model)}, placed for {plan.objective}", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "PC", "device", "layers", "weights + KV", "step", "link to next"):
        table.add_column(column)
    for index, one in enumerate(plan.stages):
        link = f"{1e3 * one.link_s:.1f} ms{'' if one.measured else ' (assumed)'}"
        step = f"{1e3 * one.step_s:.1f} ms" if one.step_s else "not measured"
        memory = f"{format_size(one.weights)} + {format_size(one.kv)} of {format_size(one.memory)}"
        memory = memory if one.memory else "unknown"
        row = (
            str(stage_number(index)),
            one.peer,
            one.device,
            format_layers(one.layers),
            memory,
            step,
            link,
        )
        table.add_row(*(row if len(plan.stages) > 1 else (*row[:-1], "-")))
    console.print(table)
    asked = start = ""
    if plan.first_token_s:
        asked = f", {plan.prompt_tokens} prompt tokens"
        start = f"first token in about {1e3 * plan.first_token_s:.0f} ms, then "
    console.print(
        f"One request alone{asked}: {start}one token every {1e3 * plan.round_trip_s:.1f} ms"
    )
    console.print(f"Bottleneck: {plan.bottleneck}", markup=False)
    if plan.current is not None:
        for line in describe_prospects(
            plan.current, plan.prospects, plan.objective, plan.round_trip_s
        ):
            console.print(f"{line} (estimated)", markup=False)
    for name, why in plan.idle_peers.items():
        console.print(f"No stage: {name}{f' ({why})' if why else ''}", markup=False)


def describe_prospects(
    current: RingEstimate, prospects: Iterable[RingEstimate], objective: str, round_trip_s: float
) -> Iterator[str]:
    """Describe the effect of one more PC of each kind.

    ``round_trip_s`` is the time per token of the present ring. Estimates of placement read only the
    bytes of each step, so they change it by their ratio.
    """
    scale = round_trip_s / current.round_trip_s if current.round_trip_s else 0.0

    def text(one: RingEstimate) -> str:
        if objective == "latency":
            return f"{1e3 * scale * one.round_trip_s:.1f} ms per token"
        return f"{one.tokens_per_s:.0f} tokens/s in total"

    for one in prospects:
        stages = "1 stage" if one.stages == 1 else f"{one.stages} stages"
        if objective == "latency":
            helps = one.round_trip_s < current.round_trip_s
        else:
            helps = one.tokens_per_s > current.tokens_per_s
        if not helps or text(one) == text(current):
            yield f"Another {one.device} would not help"
        else:
            yield f"Another {one.device}: {stages}, {text(one)} instead of {text(current)}"


def _find_bottleneck(stages: tuple[LiveStage, ...]) -> str:
    steps, links = sum(one.step_s for one in stages), sum(one.link_s for one in stages)
    total = steps + links
    if not total:
        return "nothing measured yet"
    if links > steps:
        worst = max(stages, key=lambda one: one.link_s)
        after = stages[(stages.index(worst) + 1) % len(stages)]
        what = f"network, mostly {worst.peer} to {after.peer}"
        return f"{what}: {100 * links / total:.0f} % of the time per token"
    slowest = max(stages, key=lambda one: one.step_s)
    what = f"computation, mostly on {slowest.peer}"
    return f"{what}: {100 * steps / total:.0f} % of the time per token"


_DEFAULT_PCS = 3
#: Maximum number of PCs in a plan.
_MAX_PCS = 64
StagesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_STAGES,
        help="Minimum number of stages; with a single device also the number of PCs.  "
        "[default: 3 PCs of one device]",
    ),
]
DevicesOption = Annotated[
    str,
    typer.Option(
        help="Device of each PC (name or .toml file), comma separated; join the devices of "
        "one PC with +: rtx3090+rtx3060,rtx4090."
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Short name (`molink search`), model folder (config.json is enough), GGUF file, "
        "or name of a model on this PC.  [default: --model-profile]"
    ),
]
ExpertMemoryOption = Annotated[
    str | None,
    typer.Option(
        help="RAM of each PC for experts that don't fit its GPU: 48GB, or 56GB,26GB for each.  "
        "[default: none]"
    ),
]


def plan(
    stages: StagesOption = None,
    device: DevicesOption = "rtx4090",
    model: ModelOption = None,
    model_profile: Annotated[
        str, typer.Option(help="Model shape: a name or a .toml file.")
    ] = "qwen-7b",
    objective: Annotated[
        Objective,
        typer.Option(help="Optimize for the latency of one stream or the throughput of many."),
    ] = "latency",
    kv_cache_dtype: Annotated[
        KVCacheDType, typer.Option(help="Keys and values of requests.")
    ] = "auto",
    expert_memory: ExpertMemoryOption = None,
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
    devices = _parse_devices(device, stages or _DEFAULT_PCS)
    link = LinkProfile(bandwidth, latency)
    planned = plan_swarm(
        _describe_model(model, model_profile),
        devices,
        link,
        PlacementGoal(objective, len(devices) if _is_single(device) else stages or 1),
        streams=streams,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        kv_cache_dtype=kv_cache_dtype,
        expert_memory=_parse_expert_memory(expert_memory, len(devices)),
    )
    if as_json:
        print(json.dumps(planned.as_json(), indent=2))
    else:
        _print_plan(planned, devices, link)


def _is_single(device: str) -> bool:
    """Whether one device stands for that of several equal PCs."""
    return "," not in device and "+" not in device


def _parse_devices(text: str, num_pcs: int) -> list[str]:
    """Return the devices of each PC; a single device stands for ``num_pcs`` PCs.

    Raises:
        UsageError: a name is missing, or there are too many PCs.
    """
    devices = [name.strip() for name in text.split(",")]
    if _is_single(text):
        devices *= num_pcs
    is_complete = all(part.strip() for one in devices for part in one.split("+"))
    if not is_complete or len(devices) > _MAX_PCS:
        raise UsageError(
            f"--device takes 1 to {_MAX_PCS} PCs, separated by commas (rtx3090+rtx3060: a "
            "PC with both)"
        )
    return devices


def _parse_expert_memory(text: str | None, num_pcs: int) -> list[int]:
    """Return the bytes of each PC; one amount is that of all.

    Raises:
        UsageError: an amount is none, or there are not as many as PCs.
    """
    if text is None:
        return []
    amounts = [parse_size(part.strip()) for part in text.split(",")]
    if len(amounts) == 1:
        amounts *= num_pcs
    if len(amounts) != num_pcs:
        raise UsageError(f"--expert-memory has {len(amounts)} amounts for {num_pcs} PCs")
    return amounts


def _describe_model(model: str | None, profile: str) -> ModelDescription:
    if model is None:
        return ModelDescription.from_profile(profile)
    entry = find_catalog_entry(model)
    if entry is not None:
        return ModelDescription.from_catalog(entry)
    return ModelDescription.from_folder(_find_folder(model))


def _find_folder(model: str) -> Path:
    """Return the model's folder or GGUF file; nothing is fetched."""
    if model == DEMO_MODEL_NAME:
        return find_demo_model().path
    if find_local_model(model) is None:
        check_model_name(model)
        cached = hub.find_cached(model) if is_repository(model) else None
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
    if planned.packing:
        console.print(
            f"Weights stay packed on {', '.join(planned.packing)} if the card passes molink's"
            " check (molink doctor); otherwise they take 2 bytes each"
        )
    if planned.spares:
        console.print(f"No stage, only the endpoint: {', '.join(planned.spares)}")
    console.print(f"Bottleneck: {planned.bottleneck}")
    console.print(
        f"One request alone, {forecast.prompt_tokens} prompt tokens (simulated): first token after"
        f" {1e3 * forecast.ttft_s:.0f} ms, then one every {1e3 * forecast.tpot_s:.1f} ms"
    )
    for line in describe_prospects(planned.now, planned.more, planned.objective, forecast.tpot_s):
        console.print(line)
    console.print(f"With {forecast.streams} streams (< marks the scheduler's choice):")
    console.print(_micro_batch_table(planned))


def _stage_table(planned: SwarmPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("stage", "device", "layers", "weights", "KV capacity", "step", "link to next"):
        table.add_column(column, justify="right")
    for index, one in enumerate(planned.stages):
        table.add_row(
            str(stage_number(index)),
            one.device,
            format_layers(one.layers),
            format_size(one.weights)
            + (f" + {format_size(one.host_weights)} in RAM" if one.host_weights else ""),
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
