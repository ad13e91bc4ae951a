"""Builds the content of ``molink status --json`` from the fleet."""

import json
import math
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from molink.facts.device import Device
from molink.facts.ring_times import HANDLING_S, TOKEN_BYTES, LinkFacts, RingTimes
from molink.swarm.artifacts.transfer import estimate_eta
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.formation import Formation, stage_layout
from molink.swarm.controller.holdings import describe_missing, missing_layers, whole_holders
from molink.swarm.controller.reconciler import Reconciler
from molink.swarm.controller.records import DesiredModel, MemberRecord, StageRecord
from molink.swarm.controller.registry import PeerSession
from molink.swarm.controller.scale_out import estimate_scale_out
from molink.swarm.membership.versions import PeerVersion, own_version
from molink.swarm.placement.placement import row_bytes
from molink.swarm.placement.ttft import predict_ttft
from molink.wire.messages.peer_reports import PeerReport, TransferState, WorkerState

#: Maximum payload of the reply, in bytes.
MAX_BYTES = 192 * 1024
#: Seconds for which a scale-out estimate is cached: computing it blocks the coordinator.
SCALE_OUT_INTERVAL = 5.0
#: Prompt length of the TTFT prediction, in tokens.
PROMPT_TOKENS = 512
#: Transitions shown: a screenful.
_MAX_TRANSITIONS = 20
#: Unreachable pairs shown.
_MAX_PAIRS = 64


def build_status(
    fleet: Fleet,
    swarm: str,
    addresses: Sequence[str],
    pid: int,
    blocked: Collection[str] = (),
    refused: Mapping[str, PeerVersion] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """The status of swarm ``swarm`` whose coordinator ``pid`` listens at ``addresses``.

    ``blocked`` members were banned for misbehaviour; ``refused`` ones speak another protocol
    version.
    """
    registry = fleet.registry
    served = [one for one in fleet.models if not one.stopped]
    first = served[0] if served else None
    peers = [
        _peer_status(member, registry.sessions.get(peer))
        | {"reason": fleet.explain_exclusion(peer)}
        for peer, member in registry.members.items()
    ]
    joined = {peer: at for at, peer in enumerate(registry.members)}
    peers.sort(key=lambda one: joined[registry.primary_peer(one["id"])])  # a PC's devices after it
    for peer in peers:
        if peer["id"] in refused:
            spoken = refused[peer["id"]]
            reason = f"refused: it runs {spoken}, the swarm runs {own_version()}"
            peer |= {"state": "refused", "version": spoken.version, "reason": reason}
    return {
        "swarm": swarm,
        "coordinator": {
            "addresses": list(addresses),
            "state": "running",
            "pid": pid,
            "version": own_version().version,
        },
        "model": first.facts.name if first is not None else None,
        "quantize": first.quantization if first is not None else "none",
        "objective": first.objective if first is not None else "latency",
        "models": [_model_status(fleet, desired) for desired in fleet.models],
        "peers": [peer | {"state": "blocked"} if peer["id"] in blocked else peer for peer in peers],
        "pipelines": [_pipeline_status(one) for one in fleet.deployments],
        "files": "; ".join(filter(None, (_files_warning(fleet, desired) for desired in served))),
        "trouble": fleet.reason,
        "unreachable": [
            list(pair) for pair in fleet.context.reachability.failed_pairs[:_MAX_PAIRS]
        ],
        "story": list(fleet.story[-_MAX_TRANSITIONS:]),
        "clock": round(fleet.clock, 1),
    }


def _model_status(fleet: Fleet, desired: DesiredModel) -> dict[str, Any]:
    """A desired model, and how many of its pipelines are ready."""
    mine = [one for one in fleet.deployments if one.key[0] == desired.facts.name]
    return {
        "name": desired.facts.name,
        "quantize": desired.quantization,
        "dtype": desired.dtype,
        "objective": desired.objective,
        "min_stages": desired.min_stages,
        "replicas": desired.replicas,
        "ready": sum(one.is_ready for one in mine),
        "applied": desired.applied,
        "stopped": desired.stopped,
    }


class CachedScaleOut:
    """What one more PC would bring, cached for a while."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last: dict[str, Any] = {}
        self._valid_until = -math.inf

    def estimate_at(self, now: float) -> dict[str, Any]:
        """Estimates by pipeline at ``now`` (seconds) or shortly before."""
        if now >= self._valid_until:
            found = {
                one.pipeline: build_scale_out(one, self._fleet.clock) | _ttft_status(one)
                for one in self._fleet.deployments
            }
            self._last, self._valid_until = found, now + SCALE_OUT_INTERVAL
        return self._last


def build_scale_out(reconciler: Reconciler, now: float) -> dict[str, Any]:
    """What one more PC would bring; empty if no ring serves or peers have named their layers."""
    registry, planner, formation = reconciler.registry, reconciler.planner, reconciler.formation
    if formation is None or not reconciler.is_ready:
        return {}
    devices = {
        peer: describe_device(session.report.device) for peer, session in registry.sessions.items()
    }
    candidates = planner.find_candidates(registry, formation, now)
    serving = stage_layout(formation.record.stages)
    return estimate_scale_out(planner, reconciler.desired, candidates, devices, serving)


def _ttft_status(reconciler: Reconciler) -> dict[str, Any]:
    """Predicted TTFT of a lone request; empty if no ring serves."""
    formation, desired = reconciler.formation, reconciler.desired
    if formation is None or not reconciler.is_ready:
        return {}
    stages, links = formation.record.stages, []
    for stage, after in zip(stages, stages[1:] + stages[:1], strict=True):
        latency, rate = reconciler.planner.links.latency_and_rate(stage.peer, after.peer)
        links.append(LinkFacts(latency + HANDLING_S, rate))
    times = RingTimes(
        [stage.profile for stage in stages],
        links if len(stages) > 1 else (),
        row_bytes(desired.facts, desired.dtype),
    )
    sessions = reconciler.registry.sessions
    slowdowns = [_stage_slowdown(sessions.get(stage.peer), formation.record.id) for stage in stages]
    return {"prompt": PROMPT_TOKENS, "first_token_s": predict_ttft(times, PROMPT_TOKENS, slowdowns)}


def encode_status(status: dict[str, Any]) -> bytes:
    """Encode as UTF-8 of at most :data:`MAX_BYTES`; the rest is dropped and marked ``truncated``.

    Stage loads go first: clients look up peers here by name.
    """
    text = json.dumps(status).encode("utf-8")
    if len(text) > MAX_BYTES:
        status = {
            **status,
            "peers": [_without_load(peer) for peer in status["peers"]],
            "truncated": True,
        }
        text = json.dumps(status).encode("utf-8")
    while len(text) > MAX_BYTES:
        status = {
            **status,
            "story": [],
            "peers": status["peers"][: len(status["peers"]) // 2],
            "truncated": True,
        }
        text = json.dumps(status).encode("utf-8")
    return text


def _without_load(peer: dict[str, Any]) -> dict[str, Any]:
    """A peer without its load."""
    workers = [{**worker, "load": None} for worker in peer.get("workers", ())]
    return {**peer, "workers": workers}


def _peer_status(member: MemberRecord, session: PeerSession | None) -> dict[str, Any]:
    told = member.announced
    shown: dict[str, Any] = {
        "id": member.peer,
        "name": member.name,
        "address": told.addresses[0] if told is not None and told.addresses else "",
        "endpoint": "",
        "state": "offline",
        "pc": told.primary_peer if told is not None else "",
        "device": "",
        "daemon_pid": 0,
        "workers": [],
        "transfers": [],
    }
    if session is not None:
        shown |= report_status(session.report)
    return shown


def report_status(report: PeerReport) -> dict[str, Any]:
    """What a live peer reports of itself."""
    return {
        "endpoint": report.api_address,
        "pc": report.primary_peer,
        "state": "online",
        "device": describe_device(report.device),
        "daemon_pid": report.daemon_pid,
        "version": report.version,
        "stage": report.stage,
        "paused": report.pause_reason,
        "memory": report.device.memory,
        "copied": report.replicated_percent,
        "held": {
            one.root[:16]: [list(layers) for layers in one.layers] for one in report.partial_models
        },
        "transfers": [_transfer_status(one) for one in report.transfers],
        "workers": [
            {
                "pid": worker.pid,
                "pipeline": worker.pipeline,
                "stage": worker.stage,
                "layers": list(worker.layers),
                "state": worker.state,
                "fetching": _byte_progress(worker, "fetching"),
                "loading": _load_progress(worker),
                "load": _stage_usage(report, worker),
            }
            for worker in report.workers
        ],
    }


def _byte_progress(worker: WorkerState, state: str) -> dict[str, Any] | None:
    """A worker's progress if it is in ``state`` and has reported any."""
    told = worker.state == state and worker.total
    return {"done": worker.done, "total": worker.total} if told else None


def _load_progress(worker: WorkerState) -> dict[str, Any] | None:
    """Like :func:`_byte_progress`, with bytes/s and the seconds left."""
    found = _byte_progress(worker, "loading")
    if found is None:
        return None
    seconds = estimate_eta(worker.total - worker.done, worker.rate)
    return found | {"rate": worker.rate, "eta_s": None if seconds is None else round(seconds, 1)}


def _stage_usage(report: PeerReport, worker: WorkerState) -> dict[str, Any] | None:
    """Load of a stage and its link; ``None`` if not reported."""
    told = () if report.load is None else report.load.stages
    name = worker.pipeline, worker.stage
    load = next((one for one in told if (one.pipeline, one.stage) == name), None)
    if load is None:
        return None
    return {
        "busy": load.busy,
        "bubbles": load.bubbles,
        "requests": load.requests,
        "weights": load.weight_bytes,
        "kv": load.kv_bytes,
        "link": {
            "latency_s": load.latency_us / 1e6,
            "rate": load.rate,
            "decode": {"queued": load.queued[0], "in_flight": load.in_flight[0]},
            "bulk": {"queued": load.queued[1], "in_flight": load.in_flight[1]},
        },
    }


def scheduler_status(report: PeerReport, pipeline: str) -> dict[str, Any] | None:
    """A peer's report on the scheduler of ``pipeline``; ``None`` if there is none."""
    told = () if report.load is None else report.load.schedulers
    head = next((one for one in told if one.pipeline == pipeline), None)
    if head is None:
        return None
    return {
        "running": head.running,
        "waiting": head.waiting,
        "blocks": head.blocks,
        "used": head.used_blocks,
        "micro_batches": head.micro_batches,
        "swapped": head.swapped,
        "host_blocks": head.host_blocks,
        "host_used": head.used_host_blocks,
        "swap_fallbacks": head.swap_fallbacks,
        "cached": head.cached_percent,
        "queues": list(head.queues),
        "requests": [
            {
                "peer": one.peer,
                "state": one.state,
                "prompt": one.prompt,
                "computed": one.computed,
                "generated": one.generated,
                "tokens_per_s": one.token_rate / 1000,
                "age_s": one.age,
                "resume_s": one.resume_ms / 1000,
            }
            for one in head.requests
        ],
    }


def _transfer_status(one: TransferState) -> dict[str, Any]:
    seconds = estimate_eta(one.total - one.done, one.rate)
    return {
        "model": one.model,
        "bytes": one.done,
        "total": one.total,
        "rate": one.rate,
        "eta_s": None if seconds is None else round(seconds, 1),
        "from": one.source,
        "copy": one.is_replica,
    }


def _files_warning(fleet: Fleet, desired: DesiredModel) -> str:
    """Warns if one PC's loss would lose model files; empty otherwise."""
    registry, facts, only_model = fleet.registry, desired.facts, len(fleet.models) == 1
    if len({registry.primary_peer(peer) for peer in registry.sessions}) < 2:
        return ""
    holders = whole_holders(facts, registry, only_model=only_model)
    if len(holders) > 1:
        return ""
    if holders:
        return f"Only {registry.name_of(holders[0])} has all files of {facts.name} so far"
    nobody = f"No connected PC has all files of {facts.name}"
    reports = [one.report for one in registry.sessions.values()]
    lacking = missing_layers(facts, reports, only_model=only_model)
    if lacking:
        return f"{nobody}, and none has those of {describe_missing(facts, lacking)}"
    return f"{nobody}; together they hold all layers" if only_model else nobody


def _pipeline_status(reconciler: Reconciler) -> dict[str, Any]:
    formation = reconciler.formation
    return {
        "id": reconciler.pipeline,
        "model": reconciler.desired.facts.name,
        "replica": reconciler.replica,
        "epoch": reconciler.epoch,
        "ready": reconciler.is_ready,
        "micro_batches": _micro_batches(formation),
        "stages": [] if formation is None else _stage_statuses(reconciler, formation),
        "blocks": formation.record.blocks if formation is not None else 0,
        "state": formation.state if formation is not None else "waiting",
        "reason": reconciler.reason,
        "phases": reconciler.phase_times.to_status(),
        "scheduler": None if formation is None else _first_stage_scheduler(reconciler, formation),
    }


def _first_stage_scheduler(reconciler: Reconciler, formation: Formation) -> dict[str, Any] | None:
    """The scheduler as reported by the first stage's peer; others are not trusted."""
    session = reconciler.registry.sessions.get(formation.peers[0])
    return None if session is None else scheduler_status(session.report, formation.record.id)


def _micro_batches(formation: Formation | None) -> int:
    """The configured number, or the scheduler's minimum."""
    if formation is None:
        return 0
    return formation.record.micro_batches or len(formation.record.stages)


def _stage_statuses(reconciler: Reconciler, formation: Formation) -> list[dict[str, Any]]:
    stages, links = formation.record.stages, reconciler.planner.links

    def shown(stage: StageRecord, after: StageRecord) -> dict[str, Any]:
        session = reconciler.registry.sessions.get(stage.peer)
        return {
            "peer": stage.peer,
            "layers": list(stage.layers),
            "device": describe_device(session.report.device) if session is not None else "",
            "decode_s": stage.profile.decode_s(1) * _stage_slowdown(session, formation.record.id),
            "link_s": link_s(stage, after) if after is not stage else 0.0,
            "link_measured": links.is_measured(stage.peer, after.peer),
        }

    def link_s(stage: StageRecord, after: StageRecord) -> float:
        """Seconds until a row, or its token, is at the next stage."""
        latency, rate = links.latency_and_rate(stage.peer, after.peer)
        row = row_bytes(reconciler.desired.facts, reconciler.desired.dtype)
        return latency + HANDLING_S + (TOKEN_BYTES if after is stages[0] else row) / rate

    return [
        shown(stage, after) for stage, after in zip(stages, stages[1:] + stages[:1], strict=True)
    ]


def _stage_slowdown(session: PeerSession | None, pipeline: str) -> float:
    """How much longer a peer's stage takes than its profile says; 1.0 if not reported."""
    workers = () if session is None else session.report.workers
    return next(
        (one.slowdown for one in workers if one.pipeline == pipeline and one.slowdown > 0), 1.0
    )


def describe_device(device: Device) -> str:
    """A device in a few words."""
    index = f" {device.index}" if device.kind == "cuda" else ""
    return f"{device.kind}{index}: {device.name}"
