"""Builds the view of ``molink top`` from the status; a pure function."""

from collections.abc import Iterator
from dataclasses import dataclass

from molink.facts.layer_range import format_layers, stage_number
from molink.plaintext import sanitize_text
from molink.swarm.controller.status_schema import (
    LinkStatus,
    PeerStatus,
    PipelineStatus,
    RequestStatus,
    SchedulerStatus,
    SwarmStatus,
    WorkerStatus,
    format_percent,
    short_device_name,
    split_event,
)
from molink.swarm.membership.sanitize import quote_name
from molinkd.cli.translation import tr

#: Maximum number of notices, which leaves room for the rest.
_MAX_NOTICES = 4


@dataclass(frozen=True, slots=True)
class LinkView:
    """The link of a stage to PC ``target``."""

    target: str
    figures: LinkStatus


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage of a ring; ``doing`` is its activity other than serving, or empty.

    Of ``memory`` bytes, ``weights`` are used and ``kv`` reserved. Shares are in percent, ``None``
    if unknown.
    """

    number: int
    pc: str
    layers: str
    device: str
    weights: int
    kv: int
    memory: int
    busy: int | None
    bubbles: int | None
    decode_s: float
    doing: str
    link: LinkView | None


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request from ``pc``; ``phase`` is its state with progress."""

    pc: str
    state: str
    phase: str
    prompt: int
    generated: int
    tokens_per_s: float
    age_s: float


@dataclass(frozen=True, slots=True)
class RingView:
    """A pipeline: its stages and scheduler; ``model`` is empty if it is the only pipeline.

    ``kv_used`` of ``kv_reserved`` bytes on all stages hold KV.
    """

    id: str
    model: str
    epoch: int
    ready: bool
    stages: tuple[StageView, ...]
    running: int
    waiting: int
    kv_used: int
    kv_reserved: int
    micro_batches: int
    cached: int
    requests: tuple[RequestView, ...]
    tokens_per_s: float
    host_blocks: int = 0
    used_host_blocks: int = 0
    swapped: int = 0
    swap_fallbacks: int = 0
    queues: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PcView:
    """A PC without a stage in a shown ring."""

    name: str
    state: str
    device: str
    memory: int
    stages: str


@dataclass(frozen=True, slots=True)
class PairingView:
    """A PC that waits to join, and the code that it should show."""

    name: str
    code: str
    address: str


@dataclass(frozen=True, slots=True)
class TransferView:
    """A transfer to a PC; ``rate`` in bytes/s, ``left_s`` is ``None`` if unknown."""

    pc: str
    what: str
    done: int
    total: int
    rate: float
    left_s: float | None


@dataclass(frozen=True, slots=True)
class EventView:
    """An event ``age_s`` seconds ago; ``None`` if unknown."""

    age_s: float | None
    text: str


@dataclass(frozen=True, slots=True)
class SwarmView:
    """The swarm as shown. All texts are plain, without terminal control sequences."""

    swarm: str
    model: str
    ready: bool
    online: int
    offline: int
    notices: tuple[str, ...]
    pairings: tuple[PairingView, ...]
    rings: tuple[RingView, ...]
    others: tuple[PcView, ...]
    transfers: tuple[TransferView, ...]
    events: tuple[EventView, ...]


def make_view(status: SwarmStatus, *, demo: bool = False) -> SwarmView:
    """Build the view of a status."""
    names = {peer.id: sanitize_text(peer.name) for peer in status.peers}
    peers = {peer.id: peer for peer in status.peers}
    shown = {stage.peer for pipeline in status.pipelines for stage in pipeline.stages}
    pcs = [peer.state == "online" for peer in status.peers if not peer.pc]
    online = sum(pcs)
    return SwarmView(
        swarm=sanitize_text(status.swarm) + (tr(" (demo)") if demo else ""),
        model=", ".join(sanitize_text(one) for one in _model_names(status)) or tr("no model"),
        ready=status.is_ready,
        online=online,
        offline=len(pcs) - online,
        notices=_limit_notices(list(_make_notices(status, names))),
        pairings=tuple(
            PairingView(quote_name(one.name), sanitize_text(one.code), sanitize_text(one.address))
            for one in status.pairing_requests
        ),
        rings=tuple(_ring_view(status, pipeline, peers, names) for pipeline in status.pipelines),
        others=tuple(_pc_view(peer) for peer in status.peers if peer.id not in shown),
        transfers=tuple(_transfer_views(status)),
        events=tuple(_event_view(line, status.clock) for line in reversed(status.events)),
    )


def _limit_notices(notices: list[str]) -> tuple[str, ...]:
    more = len(notices) - _MAX_NOTICES
    if more <= 1:
        return tuple(notices)
    return (
        *notices[:_MAX_NOTICES],
        tr("and {count} more notices: see `molink status`", count=more),
    )


def _make_notices(status: SwarmStatus, names: dict[str, str]) -> Iterator[str]:
    """Yield notices, most important first."""
    if status.coordinator.state != "running":
        yield tr(
            "Coordinator unavailable; local information only: {reason}",
            reason=sanitize_text(status.trouble),
        )
    elif not status.pipelines:
        yield tr("No pipeline: {reason}", reason=sanitize_text(status.trouble))
    for pipeline in status.pipelines:
        if pipeline.reason:
            name, reason = sanitize_text(pipeline.id), sanitize_text(pipeline.reason)
            if len(status.pipelines) > 1:
                name += tr(" of {model}", model=sanitize_text(pipeline.model))
            state = tr("ready") if pipeline.ready else tr("not ready")
            yield tr("Pipeline {name} is {state}: {reason}", name=name, state=state, reason=reason)
    for peer in status.peers:
        if peer.reason:
            yield tr("{pc} is {state}", pc=names[peer.id], state=sanitize_text(peer.reason))
    if status.files:
        yield sanitize_text(status.files)
    for one in status.banned_peers:
        name, banned_by = sanitize_text(one.name), sanitize_text(one.banned_by)
        yield tr(
            "{pc} was banned by {by}: {reason}",
            pc=name,
            by=banned_by,
            reason=sanitize_text(one.reason),
        )


def _model_names(status: SwarmStatus) -> list[str]:
    named = [one.name + (tr(" (stopped)") if one.stopped else "") for one in status.models]
    return named or ([status.model] if status.model else [])


def _ring_view(
    status: SwarmStatus,
    pipeline: PipelineStatus,
    peers: dict[str, PeerStatus],
    names: dict[str, str],
) -> RingView:
    scheduler, stages = pipeline.scheduler or SchedulerStatus(), pipeline.stages
    kv_used, kv_reserved = status.kv_usage(pipeline)
    return RingView(
        id=sanitize_text(pipeline.id),
        model="" if len(status.pipelines) == 1 else sanitize_text(pipeline.model),
        epoch=pipeline.epoch,
        ready=pipeline.ready,
        stages=tuple(_stage_view(pipeline, number, peers, names) for number in range(len(stages))),
        running=scheduler.running,
        waiting=scheduler.waiting,
        kv_used=kv_used,
        kv_reserved=kv_reserved,
        micro_batches=scheduler.micro_batches,
        cached=scheduler.cached,
        requests=tuple(
            RequestView(
                names.get(one.peer, sanitize_text(one.peer)),
                one.state,
                _phase_text(one),
                one.prompt,
                one.generated,
                one.tokens_per_s,
                one.age_s,
            )
            for one in scheduler.requests
        ),
        tokens_per_s=scheduler.tokens_per_s,
        host_blocks=scheduler.host_blocks,
        used_host_blocks=scheduler.host_used,
        swapped=scheduler.swapped,
        swap_fallbacks=scheduler.swap_fallbacks,
        queues=scheduler.queues,
    )


def _phase_text(request: RequestStatus) -> str:
    """Format a request's phase: progress of a prefill, or time until a swapped request resumes."""
    if request.state == "swapped":
        return f"swapped {request.resume_s:.1f} s" if request.resume_s < 100 else "swapped"
    if request.state != "prefill":
        return sanitize_text(request.state)
    known = request.prompt + request.generated
    return f"prefill {format_percent(request.computed, known)}"


def _stage_view(
    pipeline: PipelineStatus, number: int, peers: dict[str, PeerStatus], names: dict[str, str]
) -> StageView:
    stage, following = pipeline.stages[number], (*pipeline.stages[1:], pipeline.stages[0])[number]
    peer = peers.get(stage.peer)
    worker = _find_worker(peer, pipeline.id, number)
    load = worker.load if worker is not None else None
    link = None
    if load is not None and len(pipeline.stages) > 1:
        link = LinkView(names.get(following.peer, sanitize_text(following.peer)), load.link)
    return StageView(
        number=stage_number(number),
        pc=names.get(stage.peer, sanitize_text(stage.peer)),
        layers=format_layers(stage.layers),
        device=sanitize_text(short_device_name(stage.device)),
        weights=load.weights if load is not None else 0,
        kv=load.kv if load is not None else 0,
        memory=peer.memory if peer is not None else 0,
        busy=load.busy if load is not None else None,
        bubbles=load.bubbles if load is not None else None,
        decode_s=stage.decode_s,
        doing=sanitize_text(worker.activity) if worker is not None else "offline",
        link=link,
    )


def _find_worker(peer: PeerStatus | None, pipeline: str, number: int) -> WorkerStatus | None:
    """Return the worker of a stage, as its PC reports it."""
    workers = peer.workers if peer is not None and peer.state == "online" else ()
    mine = (one for one in workers if (one.pipeline, one.stage) == (pipeline, number))
    return next(mine, None)


def _pc_view(peer: PeerStatus) -> PcView:
    stages = [
        f"{format_layers(one.layers)} {sanitize_text(one.activity) or 'ready'}"
        for one in peer.workers
    ]
    return PcView(
        sanitize_text(peer.name),
        sanitize_text(peer.state),
        sanitize_text(short_device_name(peer.device)),
        peer.memory,
        ", ".join(stages),
    )


def _transfer_views(status: SwarmStatus) -> Iterator[TransferView]:
    for peer in status.peers:
        for one in peer.transfers if peer.state == "online" else ():
            source = what = tr("copy") if one.copy else tr("weights")
            if one.source:
                source = tr("{model} from {source}", model=what, source=one.source)
            yield TransferView(
                sanitize_text(peer.name),
                sanitize_text(source),
                one.bytes,
                one.total,
                one.rate,
                one.eta_s,
            )


def _event_view(line: str, clock: float | None) -> EventView:
    age_s, text = split_event(line, clock)
    return EventView(age_s, sanitize_text(text))
