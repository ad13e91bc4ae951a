"""Estimates from measurements: the gain from one more PC, and the time to first token."""

import math
from collections.abc import Sequence
from dataclasses import replace

from molink.facts.device import Device
from molink.facts.model import LayerRange, Objective
from molink.facts.ring_times import HANDLING_S, LinkFacts, RingTimes
from molink.scheduler.chunk_size import ChunkSize
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.formation import Formation, stage_layout
from molink.swarm.controller.planner import find_askers
from molink.swarm.controller.reconciler import Reconciler
from molink.swarm.controller.registry import PeerSession
from molink.swarm.controller.status_schema import RingEstimate, ScaleOutStatus
from molink.swarm.placement.placement import (
    MICRO_BATCH_ROWS,
    Candidate,
    Placement,
    PlacementGoal,
    Unplaceable,
    place_model,
    row_bytes,
)

#: Maximum kinds of PCs tried, since one placement over many peers takes most of a second.
MAX_KINDS = 3
#: Seconds for which estimates are cached, since computing them blocks the coordinator.
CACHE_INTERVAL = 5.0
#: Prompt length of the TTFT prediction, in tokens.
PROMPT_TOKENS = 512
_NEW_PEER = "one more"


class CachedEstimates:
    """Cached estimates of all pipelines."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last: dict[str, ScaleOutStatus] = {}
        self._valid_until = -math.inf

    def estimate_at(self, now: float) -> dict[str, ScaleOutStatus]:
        """Return estimates by pipeline, as of ``now`` (seconds) or shortly before."""
        if now >= self._valid_until:
            self._last = {
                one.pipeline: estimate_scale_out(one, self._fleet.clock)
                for one in self._fleet.deployments
            }
            self._valid_until = now + CACHE_INTERVAL
        return self._last


def estimate_scale_out(reconciler: Reconciler, now: float) -> ScaleOutStatus:
    """Estimate the gain from one more PC, and the TTFT of a lone request; empty if no ring serves.

    There are no ring estimates if peers have named their layers.
    """
    formation = reconciler.formation
    if formation is None or not reconciler.is_ready:
        return ScaleOutStatus()
    times = _ring_times(reconciler, formation)
    sessions = reconciler.registry.sessions
    slowdowns = [
        stage_slowdown(sessions.get(stage.peer), formation.record.id)
        for stage in formation.record.stages
    ]
    ttft = predict_ttft(times, PROMPT_TOKENS, slowdowns)
    ring, more = _estimate_rings(reconciler, formation, now)
    return ScaleOutStatus(ring, more, PROMPT_TOKENS, ttft)


def _estimate_rings(
    reconciler: Reconciler, formation: Formation, now: float
) -> tuple[RingEstimate | None, tuple[RingEstimate, ...]]:
    """Estimate the current ring, and one ring for each kind of PC added."""
    planner, desired, registry = reconciler.planner, reconciler.desired, reconciler.registry
    found = planner.find_candidates(registry, formation, now)
    candidates = planner.read_rates.apply_rates(found)
    links = planner.links.with_newcomer(_NEW_PEER, [one.peer for one in candidates])
    goal = PlacementGoal(desired.objective, desired.target_stages)

    def place(
        candidates: Sequence[Candidate], serving: Sequence[tuple[str, LayerRange]] = ()
    ) -> Placement | Unplaceable:
        return place_model(
            desired.facts,
            candidates,
            desired.setup,
            goal=goal,
            links=links,
            serving=serving,
            askers=find_askers(registry),
        )

    ring = place(candidates, stage_layout(formation.record.stages))
    if not isinstance(ring, Placement) or not ring.cost:
        return None, ()
    kinds = {
        describe_device(registry.sessions[one.peer].report.device): one
        for one in candidates
        if one.stage == "auto"
    }
    more = []
    for device, one in list(kinds.items())[:MAX_KINDS]:
        added = replace(one, peer=_NEW_PEER, name=_NEW_PEER, unreachable=frozenset())
        larger = place([*candidates, added])
        if isinstance(larger, Placement):
            more.append(estimate_ring(device, larger, desired.objective))
    return estimate_ring("", ring, desired.objective), tuple(more)


def estimate_ring(device: str, placed: Placement, objective: Objective) -> RingEstimate:
    """Create the estimate for a placement with one more ``device`` (empty: none)."""
    seconds = placed.round_trip_time if objective == "latency" else placed.cost
    rate = MICRO_BATCH_ROWS[objective] / seconds
    return RingEstimate(device, len(placed.stages), placed.round_trip_time, rate)


def _ring_times(reconciler: Reconciler, formation: Formation) -> RingTimes:
    stages, links, desired = formation.record.stages, [], reconciler.desired
    for stage, after in zip(stages, stages[1:] + stages[:1], strict=True):
        latency, rate = reconciler.planner.links.latency_and_rate(stage.peer, after.peer)
        links.append(LinkFacts(latency + HANDLING_S, rate))
    return RingTimes(
        [stage.profile for stage in stages],
        links if len(stages) > 1 else (),
        row_bytes(desired.facts, desired.dtype),
    )


def predict_ttft(times: RingTimes, prompt: int, slowdowns: Sequence[float] = ()) -> float:
    """Predict the seconds to the first token of a ``prompt`` (in tokens); 0 if a stage is
    unmeasured.

    Uses the scheduler's own chunks: a stage computes a chunk when it has finished the previous one,
    and links send likewise. Overlap within a chunk is ignored, so slow links are faster than
    predicted. ``slowdowns`` has each stage's current step time relative to its profile.
    """
    if not all(profile.prefill for profile in times.profiles):
        return 0.0
    stages = len(times.profiles)
    chunks = ChunkSize(0, times.profiles, stages)
    stage_free, link_free = [0.0] * stages, [0.0] * stages
    done, there = 0, 0.0
    while done < prompt:
        rows = min(prompt - done, chunks.choose_rows(0, prompt - done, done))
        there = 0.0
        for index, profile in enumerate(times.profiles):
            step = profile.prefill_s(rows, done) * (slowdowns[index] if slowdowns else 1.0)
            there = stage_free[index] = max(there, stage_free[index]) + step
            if index < stages - 1:
                link_free[index] = max(there, link_free[index]) + times.send_s(index, rows)
                there = link_free[index] + times.link_s(index, 0)
        done += rows
    return there + (times.link_s(stages - 1, 1) if times.links else 0.0)


def stage_slowdown(session: PeerSession | None, pipeline: str) -> float:
    """Return a stage's step time relative to its profile; 1.0 if not reported."""
    workers = () if session is None else session.report.workers
    reported = (one.slowdown for one in workers if one.pipeline == pipeline and one.slowdown > 0)
    return next(reported, 1.0)


def describe_device(device: Device) -> str:
    """Describe a device in a few words."""
    index = f" {device.index}" if device.kind == "cuda" else ""
    return f"{device.kind}{index}: {device.name}"
