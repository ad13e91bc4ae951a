"""Builds ``molink status --json`` from the fleet and the peers' reports."""

import types
from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec import structs

from molink.facts.ring_times import HANDLING_S, TOKEN_BYTES
from molink.swarm.artifacts.transfer import estimate_eta
from molink.swarm.controller.estimates import describe_device, stage_slowdown
from molink.swarm.controller.fleet import Fleet
from molink.swarm.controller.formation import Formation
from molink.swarm.controller.holdings import describe_missing, full_holders, missing_layers
from molink.swarm.controller.reconciler import Reconciler
from molink.swarm.controller.records import DesiredModel, MemberRecord, StageRecord
from molink.swarm.controller.status_schema import (
    ByteProgress,
    ChannelStatus,
    CoordinatorStatus,
    LinkStatus,
    LoadProgress,
    ModelStatus,
    PeerStatus,
    PipelineStatus,
    RequestStatus,
    SchedulerStatus,
    StageStatus,
    StageUsage,
    SwarmStatus,
    TransferStatus,
    WorkerStatus,
)
from molink.swarm.membership.versions import PeerVersion, own_version
from molink.swarm.placement.placement import row_bytes
from molink.wire.messages.peer_reports import PeerReport, TransferState, WorkerState

#: Maximum payload of the reply, in bytes.
MAX_BYTES = 192 * 1024
#: Maximum transitions shown, a screenful.
_MAX_TRANSITIONS = 20
#: Maximum unreachable pairs shown.
_MAX_PAIRS = 64


def build_status(
    fleet: Fleet,
    swarm: str,
    addresses: Sequence[str],
    pid: int,
    banned: Collection[str] = (),
    refused: Mapping[str, PeerVersion] = types.MappingProxyType({}),
) -> SwarmStatus:
    """Build the status of swarm ``swarm``, whose coordinator ``pid`` listens at ``addresses``.

    ``banned`` members misbehaved; ``refused`` members speak another protocol version.
    """
    registry = fleet.registry
    served = [one for one in fleet.models if not one.stopped]
    first = served[0] if served else None
    joined = {peer: at for at, peer in enumerate(registry.members)}
    # A PC is followed by its further devices.
    order = sorted(registry.members, key=lambda peer: joined[registry.primary_peer(peer)])
    peers = []
    for peer in order:
        status = _member_status(fleet, registry.members[peer])
        if peer in refused:
            version = refused[peer]
            reason = f"refused: it runs {version}, the swarm runs {own_version()}"
            status = structs.replace(
                status, state="refused", version=version.version, reason=reason
            )
        peers.append(structs.replace(status, state="banned") if peer in banned else status)
    return SwarmStatus(
        swarm=swarm,
        coordinator=CoordinatorStatus("running", tuple(addresses), pid, own_version().version),
        model=first.facts.name if first is not None else None,
        quantize=first.quantization if first is not None else "none",
        objective=first.objective if first is not None else "latency",
        models=tuple(_model_status(fleet, desired) for desired in fleet.models),
        peers=tuple(peers),
        pipelines=tuple(map(_pipeline_status, fleet.deployments)),
        files="; ".join(filter(None, (_files_warning(fleet, desired) for desired in served))),
        trouble=fleet.reason,
        unreachable=tuple(fleet.context.reachability.failed_pairs[:_MAX_PAIRS]),
        story=fleet.story[-_MAX_TRANSITIONS:],
        events=fleet.context.events,
        clock=round(fleet.clock, 1),
    )


def encode_status(status: SwarmStatus) -> bytes:
    """Encode as UTF-8 of at most :data:`MAX_BYTES`; drop the rest and mark it ``truncated``.

    Stage loads are dropped first, since clients look up peers by name.
    """
    text = msgspec.json.encode(status)
    if len(text) > MAX_BYTES:
        peers = tuple(
            structs.replace(
                peer, workers=tuple(structs.replace(one, load=None) for one in peer.workers)
            )
            for peer in status.peers
        )
        status = structs.replace(status, peers=peers, truncated=True)
        text = msgspec.json.encode(status)
    while len(text) > MAX_BYTES:
        half = status.peers[: len(status.peers) // 2]
        status = structs.replace(status, story=(), events=(), peers=half)
        text = msgspec.json.encode(status)
    return text


# --- models --------------------------------------------------------------------------------------


def _model_status(fleet: Fleet, desired: DesiredModel) -> ModelStatus:
    mine = [one for one in fleet.deployments if one.key[0] == desired.facts.name]
    return ModelStatus(
        name=desired.facts.name,
        quantize=desired.quantization,
        dtype=desired.dtype,
        kv_cache_dtype=desired.kv_cache_dtype,
        objective=desired.objective,
        min_stages=desired.min_stages,
        replicas=desired.replicas,
        ready=sum(one.is_ready for one in mine),
        applied=desired.applied,
        stopped=desired.stopped,
    )


def _files_warning(fleet: Fleet, desired: DesiredModel) -> str:
    """Warn if the loss of one PC would lose model files; empty otherwise."""
    registry, facts, only_model = fleet.registry, desired.facts, len(fleet.models) == 1
    if len({registry.primary_peer(peer) for peer in registry.sessions}) < 2:
        return ""
    holders = full_holders(facts, registry, only_model=only_model)
    if len(holders) > 1:
        return ""
    if holders:
        return f"Only {registry.name_of(holders[0])} has all files of {facts.name} so far"
    missing_text = f"No connected PC has all files of {facts.name}"
    reports = [one.report for one in registry.sessions.values()]
    missing = missing_layers(facts, reports, only_model=only_model)
    if missing:
        return f"{missing_text}, and none has those of {describe_missing(facts, missing)}"
    return f"{missing_text}; together they hold all layers" if only_model else missing_text


# --- peers ---------------------------------------------------------------------------------------


def _member_status(fleet: Fleet, member: MemberRecord) -> PeerStatus:
    session = fleet.registry.sessions.get(member.peer)
    if session is not None:
        return peer_status(member.peer, session.report, fleet.explain_exclusion(member.peer))
    info = member.announced
    return PeerStatus(
        id=member.peer,
        name=member.name,
        state="offline",
        address=info.addresses[0] if info is not None and info.addresses else "",
        pc=info.primary_peer if info is not None else "",
    )


def peer_status(peer: str, report: PeerReport, reason: str = "") -> PeerStatus:
    """Describe a live peer from its own report; ``reason`` says why it has no stage."""
    return PeerStatus(
        id=peer,
        name=report.name,
        state="online",
        address=report.addresses[0] if report.addresses else "",
        endpoint=report.api_address,
        version=report.version,
        device=describe_device(report.device),
        memory=report.device.memory,
        capacity=report.device,
        daemon_pid=report.daemon_pid,
        stage=report.stage,
        paused=report.pause_reason,
        reason=reason,
        copied=report.replicated_percent,
        held={one.root[:16]: one.layers for one in report.partial_models},
        pc=report.primary_peer,
        transfers=tuple(map(_transfer_status, report.transfers)),
        workers=tuple(_worker_status(report, worker) for worker in report.workers),
    )


def _transfer_status(one: TransferState) -> TransferStatus:
    return TransferStatus(
        model=one.model,
        bytes=one.done,
        total=one.total,
        rate=one.rate,
        eta_s=_eta_s(one.total - one.done, one.rate),
        source=one.source,
        copy=one.is_replica,
    )


def _worker_status(report: PeerReport, worker: WorkerState) -> WorkerStatus:
    done, total = worker.done, worker.total
    fetching = ByteProgress(done, total) if worker.state == "fetching" and total else None
    loading = None
    if worker.state == "loading" and total:
        loading = LoadProgress(done, total, worker.rate, _eta_s(total - done, worker.rate))
    return WorkerStatus(
        layers=worker.layers,
        pipeline=worker.pipeline,
        stage=worker.stage,
        state=worker.state,
        pid=worker.pid,
        fetching=fetching,
        loading=loading,
        load=_stage_usage(report, worker),
    )


def _eta_s(left: int, rate: float) -> float | None:
    seconds = estimate_eta(left, rate)
    return None if seconds is None else round(seconds, 1)


def _stage_usage(report: PeerReport, worker: WorkerState) -> StageUsage | None:
    """Return the load of a stage and its link; ``None`` if not reported."""
    loads = () if report.load is None else report.load.stages
    for load in loads:
        if (load.pipeline, load.stage) == (worker.pipeline, worker.stage):
            decode, bulk = map(ChannelStatus, load.queued, load.in_flight)
            return StageUsage(
                busy=load.busy,
                bubbles=load.bubbles,
                requests=load.requests,
                weights=load.weight_bytes,
                kv=load.kv_bytes,
                link=LinkStatus(load.latency_us / 1e6, load.rate, decode, bulk),
            )
    return None


def scheduler_status(report: PeerReport, pipeline: str) -> SchedulerStatus | None:
    """Return a peer's report about the scheduler of ``pipeline``; ``None`` if there is none."""
    loads = () if report.load is None else report.load.schedulers
    load = next((one for one in loads if one.pipeline == pipeline), None)
    if load is None:
        return None
    return SchedulerStatus(
        running=load.running,
        waiting=load.waiting,
        blocks=load.blocks,
        used=load.used_blocks,
        micro_batches=load.micro_batches,
        swapped=load.swapped,
        host_blocks=load.host_blocks,
        host_used=load.used_host_blocks,
        swap_fallbacks=load.swap_fallbacks,
        cached=load.cached_percent,
        queues=load.queues,
        requests=tuple(
            RequestStatus(
                peer=one.peer,
                state=one.state,
                prompt=one.prompt,
                computed=one.computed,
                generated=one.generated,
                tokens_per_s=one.token_rate / 1000,
                age_s=one.age,
                resume_s=one.resume_ms / 1000,
            )
            for one in load.requests
        ),
    )


# --- pipelines -----------------------------------------------------------------------------------


def _pipeline_status(reconciler: Reconciler) -> PipelineStatus:
    status = PipelineStatus(
        id=reconciler.pipeline,
        model=reconciler.desired.facts.name,
        replica=reconciler.replica,
        epoch=reconciler.epoch,
        ready=reconciler.is_ready,
        state="waiting",
        reason=reconciler.reason,
        phases=reconciler.phase_times.to_status(),
    )
    formation = reconciler.formation
    if formation is None:
        return status
    record = formation.record
    # Only the first stage's peer is trusted to report on the scheduler.
    session = reconciler.registry.sessions.get(formation.peers[0])
    return structs.replace(
        status,
        state=formation.state,
        # By default the scheduler uses at least as many as there are stages.
        micro_batches=record.micro_batches or len(record.stages),
        blocks=record.blocks,
        stages=_stage_statuses(reconciler, formation),
        scheduler=None if session is None else scheduler_status(session.report, record.id),
    )


def _stage_statuses(reconciler: Reconciler, formation: Formation) -> tuple[StageStatus, ...]:
    stages, links = formation.record.stages, reconciler.planner.links
    row = row_bytes(reconciler.desired.facts, reconciler.desired.dtype)

    def status(stage: StageRecord, after: StageRecord) -> StageStatus:
        session = reconciler.registry.sessions.get(stage.peer)
        latency, rate = links.latency_and_rate(stage.peer, after.peer)
        link_s = latency + HANDLING_S + (TOKEN_BYTES if after is stages[0] else row) / rate
        slowdown = stage_slowdown(session, formation.record.id)
        return StageStatus(
            peer=stage.peer,
            layers=stage.layers,
            device=describe_device(session.report.device) if session is not None else "",
            decode_s=stage.profile.decode_s(1) * slowdown,
            link_s=link_s if after is not stage else 0.0,
            link_measured=links.is_measured(stage.peer, after.peer),
        )

    after = stages[1:] + stages[:1]
    return tuple(map(status, stages, after))
