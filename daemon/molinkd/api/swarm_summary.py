"""``GET /swarm``: the summary of the swarm that the chat page draws.

It has less than ``molink status --json``: users of the endpoint see which PC computes what and why
a request waits, but no ids, ports, processes or codes. The owner of this PC also sees what waits
for a decision. All texts are plain.
"""

import asyncio
import re
from collections.abc import Iterator

import msgspec
from aiohttp import web
from msgspec import json

from molink.plaintext import sanitize_text
from molink.swarm.agent.pause_policy import DRAINED_REASON
from molink.swarm.controller.status_schema import (
    PeerStatus,
    PipelineStatus,
    SchedulerStatus,
    SwarmStatus,
    decode_status,
    short_device_name,
    split_event,
)
from molinkd.api.access_guard import is_owner
from molinkd.api.administration import Administration
from molinkd.api.api_settings import is_loopback
from molinkd.api.backend import Backend

#: How long a summary is reused, in seconds, however many pages poll.
CACHE_TTL_S = 0.7
#: Maximum number of events that the owner sees.
_MAX_EVENTS = 30
#: Maximum number of join commands with addresses.
_MAX_ADDRESSES = 3
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d+")


class StageSummary(msgspec.Struct, frozen=True):
    """A stage: its PC and layers, seconds per row, and seconds to send a row to the next stage.

    ``doing`` is its activity other than serving; ``busy`` is in percent, ``None`` if unknown.
    ``link_rate`` is in bytes/s, 0 if unknown.
    """

    pc: str
    device: str
    layers: tuple[int, int]
    doing: str
    busy: int | None
    decode_s: float
    link_s: float
    link_rate: float


class RequestSummary(msgspec.Struct, frozen=True):
    """A request of a ring, in tokens; ``computed`` ones are done at every stage."""

    state: str
    prompt: int
    computed: int
    generated: int
    age_s: float


class RingSummary(msgspec.Struct, frozen=True):
    """A pipeline with its stages in order; ``reason`` explains why it is not ready."""

    model: str
    ready: bool
    reason: str
    running: int
    waiting: int
    tokens_per_s: float
    stages: tuple[StageSummary, ...]
    requests: tuple[RequestSummary, ...]


class PcSummary(msgspec.Struct, frozen=True):
    """A PC, or one of its devices; ``doing`` is empty if it has a stage and computes.

    ``memory`` are the bytes that it offers, ``weights`` and ``kv`` what its stages take of them.
    """

    pc: str
    device: str
    doing: str
    is_placed: bool
    memory: int
    weights: int
    kv: int


class DesiredModelSummary(msgspec.Struct, frozen=True):
    """A desired model; a ``stopped`` one is not served for now, ``ready`` pipelines serve it."""

    name: str
    quantize: str
    stopped: bool
    ready: int
    applied: bool


class TransferSummary(msgspec.Struct, frozen=True):
    """Files that a PC fetches, in bytes and bytes/s."""

    pc: str
    model: str
    done: int
    total: int
    rate: float


class PairingSummary(msgspec.Struct, frozen=True):
    """A PC that waits for approval, and the code that it shows if nobody is in between."""

    name: str
    address: str
    code: str


class EventSummary(msgspec.Struct, frozen=True):
    """What happened ``age_s`` seconds ago; ``None`` if the age is unknown."""

    age_s: float | None
    text: str


class OwnerSummary(msgspec.Struct, frozen=True):
    """What only the owner sees; ``pc`` is the name of this PC."""

    pc: str
    drained: bool
    pairings: tuple[PairingSummary, ...]
    models: tuple[DesiredModelSummary, ...]
    transfers: tuple[TransferSummary, ...]
    events: tuple[EventSummary, ...]


class SwarmSummary(msgspec.Struct, frozen=True):
    """The swarm. ``pairings`` PCs wait for approval; ``join`` are commands for another PC."""

    ready: bool
    online: int
    offline: int
    trouble: str
    pairings: int
    rings: tuple[RingSummary, ...]
    pcs: tuple[PcSummary, ...]
    join: tuple[str, ...]
    owner: OwnerSummary | None = None


class SwarmRoute:
    """``/swarm``."""

    def __init__(self, backend: Backend, administration: Administration | None = None) -> None:
        self._backend = backend
        self._administration = administration
        self._lock = asyncio.Lock()
        self._last = SwarmStatus()
        self._expires_at = 0.0

    @property
    def routes(self) -> list[web.RouteDef]:
        """The route."""
        return [web.get("/swarm", self.get_swarm)]

    async def get_swarm(self, request: web.Request) -> web.Response:
        """The swarm's PCs, stages and requests, and how to join."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() >= self._expires_at:
                self._last = decode_status(await self._backend.fetch_status())
                self._expires_at = loop.time() + CACHE_TTL_S
        summary = summarize_swarm(self._last)
        if self._administration is not None and is_owner(request):
            owner = summarize_for_owner(self._last, self._administration.peer_id)
            summary = msgspec.structs.replace(summary, owner=owner)
        headers = {"Cache-Control": "no-store"}
        body = json.encode(summary)
        return web.Response(body=body, content_type="application/json", headers=headers)


def summarize_swarm(status: SwarmStatus) -> SwarmSummary:
    """Summarize ``status`` for users of the endpoint."""
    peers = {peer.id: peer for peer in status.peers}
    pcs = [peer.state == "online" for peer in status.peers if not peer.pc]
    placed = {stage.peer for ring in status.pipelines for stage in ring.stages}
    return SwarmSummary(
        ready=status.is_ready,
        online=sum(pcs),
        offline=len(pcs) - sum(pcs),
        trouble=sanitize_text(status.trouble),
        pairings=len(status.pairing_requests),
        rings=tuple(_summarize_ring(one, peers) for one in status.pipelines),
        pcs=tuple(_summarize_pc(peer, peer.id in placed) for peer in status.peers),
        join=tuple(_join_commands(status)),
    )


def summarize_for_owner(status: SwarmStatus, own_id: str) -> OwnerSummary:
    """Summarize what waits for a decision of the owner of the PC ``own_id``."""
    own = next((peer for peer in status.peers if peer.id == own_id), PeerStatus(id=own_id))
    return OwnerSummary(
        pc=sanitize_text(own.name),
        drained=own.paused == DRAINED_REASON,
        pairings=tuple(
            PairingSummary(*map(sanitize_text, (one.name, one.address, one.code)))
            for one in status.pairing_requests
        ),
        models=tuple(
            DesiredModelSummary(
                sanitize_text(one.name), one.quantize, one.stopped, one.ready, one.applied
            )
            for one in status.models
        ),
        transfers=tuple(
            TransferSummary(
                sanitize_text(peer.name), sanitize_text(one.model), one.bytes, one.total, one.rate
            )
            for peer in status.peers
            for one in peer.transfers
            if not one.copy
        ),
        events=tuple(_summarize_event(one, status.clock) for one in status.events[-_MAX_EVENTS:]),
    )


def _summarize_event(line: str, clock: float | None) -> EventSummary:
    age_s, text = split_event(line, clock)
    return EventSummary(None if age_s is None else round(age_s, 1), sanitize_text(text))


def _summarize_ring(ring: PipelineStatus, peers: dict[str, PeerStatus]) -> RingSummary:
    scheduler = ring.scheduler or SchedulerStatus()
    return RingSummary(
        model=sanitize_text(ring.model),
        ready=ring.ready,
        reason=sanitize_text(ring.reason),
        running=scheduler.running,
        waiting=scheduler.waiting,
        tokens_per_s=round(scheduler.tokens_per_s, 1),
        stages=tuple(_summarize_stage(ring, number, peers) for number in range(len(ring.stages))),
        requests=tuple(
            RequestSummary(
                sanitize_text(one.state), one.prompt, one.computed, one.generated, one.age_s
            )
            for one in scheduler.requests
        ),
    )


def _summarize_stage(
    ring: PipelineStatus, number: int, peers: dict[str, PeerStatus]
) -> StageSummary:
    stage = ring.stages[number]
    peer = peers.get(stage.peer, PeerStatus(id=stage.peer))
    workers = peer.workers if peer.state == "online" else ()
    mine = (one for one in workers if (one.pipeline, one.stage) == (ring.id, number))
    worker = next(mine, None)
    return StageSummary(
        pc=sanitize_text(peer.name or peer.id),
        device=sanitize_text(short_device_name(stage.device)),
        layers=stage.layers,
        doing="offline" if worker is None else sanitize_text(worker.activity),
        busy=None if worker is None or worker.load is None else worker.load.busy,
        decode_s=stage.decode_s,
        link_s=stage.link_s,
        link_rate=0.0 if worker is None or worker.load is None else worker.load.link.rate,
    )


def _summarize_pc(peer: PeerStatus, is_placed: bool) -> PcSummary:
    doing = peer.state
    if peer.state == "online":
        standby = "" if is_placed else "standby"
        doing = peer.paused or ("endpoint only" if peer.stage == "none" else standby)
    loads = [one.load for one in peer.workers if one.load is not None]
    return PcSummary(
        pc=sanitize_text(peer.name),
        device=sanitize_text(short_device_name(peer.device)),
        doing=sanitize_text(peer.reason or doing),
        is_placed=is_placed,
        memory=peer.memory,
        weights=sum(one.weights for one in loads),
        kv=sum(one.kv for one in loads),
    )


def _join_commands(status: SwarmStatus) -> Iterator[str]:
    """Return commands to join: on the same network, and by address."""
    yield "molink join"
    hosts = [found[1] for one in status.coordinator.addresses if (found := _ADDRESS.fullmatch(one))]
    elsewhere = [host for host in dict.fromkeys(hosts) if not is_loopback(host.strip("[]"))]
    for host in elsewhere[:_MAX_ADDRESSES]:
        yield f"molink join {host}"
