"""Plans a hypothetical swarm: the ring that the coordinator would place.

Uses data sheets (:mod:`molink.sim.roofline`) instead of measurements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import get_args

from molink.errors import UsageError
from molink.facts.footprint import StageSetup
from molink.facts.layer_range import stage_number
from molink.facts.memory_plan import plan_memory
from molink.facts.model import KVCacheDType, Objective, Quantize
from molink.facts.ring_times import HANDLING_S, RingTimes
from molink.sim.data_sheet_candidates import USUAL_CPU, make_candidate
from molink.sim.forecast import RingForecast, plan_ring, ring_times
from molink.sim.model_description import ModelDescription
from molink.sim.profiles import LinkProfile, load_device
from molink.sim.roofline import HostShare
from molink.sim.scenario import Scenario
from molink.sim.workload import Workload
from molink.swarm.controller.estimates import estimate_ring
from molink.swarm.controller.status_schema import RingEstimate
from molink.swarm.placement.links import LOCAL_LATENCY, LOCAL_RATE, Links
from molink.swarm.placement.placement import (
    MICRO_BATCH_ROWS,
    PlacedStage,
    Placement,
    PlacementGoal,
    Unplaceable,
    place_model,
    stage_setup,
)
from molink.swarm.placement.rings import MICRO_BATCHES_PER_STAGE


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage: bytes of ``weights``, KV capacity in tokens, and the seconds of a one-row step.

    ``host_weights`` is the bytes of experts in RAM. ``link_s`` is the seconds to the next stage (0:
    no link).
    """

    device: str
    layers: tuple[int, int]
    weights: int
    host_weights: int
    kv_tokens: int
    step_s: float
    link_s: float


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """The ring, the PCs without a stage, and the effect of one more PC.

    ``more`` has an estimate for each additional PC, ``now`` the same for the ring itself. The plan
    assumes that weights stay low-bit on the cards in ``packing``.
    """

    model: str
    objective: Objective
    stages: tuple[PlannedStage, ...]
    spares: tuple[str, ...]
    bottleneck: str
    now: RingEstimate
    more: tuple[RingEstimate, ...]
    forecast: RingForecast
    packing: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return plain values, including the forecast's."""
        values = asdict(self)
        return {**values.pop("forecast"), **values}


def plan_swarm(
    model: ModelDescription,
    devices: Sequence[str],
    link: LinkProfile,
    aim: PlacementGoal,
    *,
    streams: int,
    prompt_tokens: int,
    output_tokens: int,
    kv_cache_dtype: KVCacheDType = "auto",
    expert_memory: Sequence[int] = (),
) -> SwarmPlan:
    """Place ``model`` on one PC for each of ``devices``, with equal links between all PCs.

    A PC with several devices is named with ``+`` between them; each device holds its own stage.
    ``expert_memory`` has the bytes of each PC's RAM for experts that don't fit its devices.

    Raises:
        UsageError: a device is unknown, the model doesn't fit, or a number is out of range.
    """
    setup = StageSetup(kv_cache_dtype=kv_cache_dtype)
    placed = _place_model(model, devices, link, aim, setup, expert_memory)
    if isinstance(placed, Unplaceable):
        raise UsageError(placed.reason)
    peers = {one.peer: one for one in _peers(devices, expert_memory)}
    names = {peer: one.device for peer, one in peers.items()}
    order = [peers[stage.peer] for stage in placed.stages]
    wide = replace(link, handling_ms=1000 * HANDLING_S)
    local = replace(wide, latency_ms=1000 * LOCAL_LATENCY, bandwidth_mbps=8 * LOCAL_RATE / 1e6)
    scenario = Scenario(
        Workload(1.0, 1.0, input_tokens=prompt_tokens, output_tokens=output_tokens),
        stages=len(placed.stages),
        model=model.name,
        link=wide,
        devices=tuple(one.device for one in order),
        links=tuple(
            local if one.pc == after.pc else wide
            for one, after in zip(order, order[1:] + order[:1], strict=True)
        ),
        layers=tuple(last - first for first, last in (one.layers for one in placed.stages)),
        shape=replace(model.shape, kv_cache_dtype=kv_cache_dtype),
        hosts=tuple(
            _share_experts(model, peers[stage.peer], stage, setup) for stage in placed.stages
        ),
    )
    forecast = plan_ring(scenario, streams, prompt_tokens, output_tokens)
    stages = _planned_stages(scenario, forecast)
    return SwarmPlan(
        model=model.name,
        objective=aim.objective,
        stages=stages,
        spares=tuple(names[peer] for peer in placed.spare_peers),
        bottleneck=_describe_bottleneck(stages, aim.objective, ring_times(scenario)),
        now=estimate_ring("", placed, aim.objective),
        more=() if expert_memory else tuple(_prospects(model, devices, link, aim, setup)),
        forecast=forecast,
        packing=tuple(dict.fromkeys(one.name for one in scenario.device_profiles if one.has_triton))
        if model.shape.block_bytes
        else (),
    )


def least_quantized(model: ModelDescription, devices: Sequence[str]) -> Quantize | None:
    """Return the least quantization that fits ``devices``; ``None`` if none does."""
    mode: Quantize
    for mode in get_args(Quantize):
        if isinstance(
            _place_model(model, devices, LinkProfile(), PlacementGoal(), StageSetup(quantize=mode)),
            Placement,
        ):
            return mode
    return None


@dataclass(frozen=True, slots=True)
class _DescribedDevice:
    """A device of a hypothetical PC and its part of the PC's RAM for experts, in bytes."""

    peer: str
    device: str
    pc: str
    expert_memory: int


def _peers(pcs: Sequence[str], expert_memory: Sequence[int]) -> list[_DescribedDevice]:
    memory = expert_memory or [0] * len(pcs)
    return [
        _DescribedDevice(
            f"pc{index}/{number}" if number else f"pc{index}",
            device.strip(),
            f"pc{index}",
            nbytes // len(devices.split("+")),
        )
        for index, (devices, nbytes) in enumerate(zip(pcs, memory, strict=True))
        for number, device in enumerate(devices.split("+"))
    ]


def _share_experts(
    model: ModelDescription, device: _DescribedDevice, stage: PlacedStage, setup: StageSetup
) -> HostShare | None:
    """Return the share of a stage's experts in host memory, as its daemon would plan it."""
    if model.facts.experts is None or not device.expert_memory:
        return None
    candidate = make_candidate(device.peer, device.device, device.expert_memory)
    plan = plan_memory(
        model.facts,
        stage.layers,
        stage_setup(candidate, setup),
        candidate.memory,
        expert_memory=device.expert_memory,
    )
    return HostShare(plan.host_experts / model.facts.experts.num_experts, load_device(USUAL_CPU))


def _place_model(
    model: ModelDescription,
    devices: Sequence[str],
    link: LinkProfile,
    aim: PlacementGoal,
    setup: StageSetup,
    expert_memory: Sequence[int] = (),
) -> Placement | Unplaceable:
    peers = _peers(devices, expert_memory)
    links = Links()
    for by in peers:
        links.set_primary_peer(by.peer, by.pc if by.peer != by.pc else "")
        for to in peers:
            if by.pc != to.pc:
                links.record_measurement(by.peer, to.peer, link.latency, link.rate)
    candidates = [make_candidate(one.peer, one.device, one.expert_memory) for one in peers]
    return place_model(model.facts, candidates, setup, goal=aim, links=links)


def _planned_stages(scenario: Scenario, forecast: RingForecast) -> tuple[PlannedStage, ...]:
    times = ring_times(scenario)
    return tuple(
        PlannedStage(
            device=device.name,
            layers=forecast.layers[index],
            weights=int(line.weight_bytes),
            host_weights=int(line.host_bytes),
            kv_tokens=line.kv_tokens(device),
            step_s=times.profiles[index].decode_s(1),
            link_s=times.link_s(index, 1) if times.links else 0.0,
        )
        for index, (device, line) in enumerate(
            zip(scenario.device_profiles, scenario.rooflines, strict=True)
        )
    )


def _describe_bottleneck(
    stages: Sequence[PlannedStage], objective: Objective, times: RingTimes
) -> str:
    """Describe for display what limits the ring."""
    links, steps = sum(one.link_s for one in stages), sum(one.step_s for one in stages)
    slowest = max(range(len(stages)), key=lambda index: stages[index].step_s)
    stage = f"stage {stage_number(slowest)} ({stages[slowest].device})"
    if objective == "throughput":
        rows = MICRO_BATCH_ROWS[objective]
        sends = max([times.send_s(index, rows) for index in range(len(times.links))], default=0.0)
        step = times.profiles[slowest].decode_s(rows)
        if max(sends, step) * MICRO_BATCHES_PER_STAGE * len(stages) > links + steps:
            name, busy = (stage, step) if step > sends else ("the rate of the links", sends)
            return f"{name}: {1e3 * busy:.1f} ms for each micro-batch of {rows} rows"
    share = f"{100 * max(links, steps) / (links + steps):.0f} % of the time per token"
    if links > steps:
        return f"the links' latency: {share}"
    return f"computing, most of it in {stage}: {share}"


def _prospects(
    model: ModelDescription,
    devices: Sequence[str],
    link: LinkProfile,
    aim: PlacementGoal,
    setup: StageSetup,
) -> Iterator[RingEstimate]:
    """Estimate the effect of one more PC of each kind, if a ring with it can be placed."""
    for device in dict.fromkeys(devices):
        placed = _place_model(model, [*devices, device], link, aim, setup)
        if isinstance(placed, Placement):
            yield estimate_ring(device, placed, aim.objective)
