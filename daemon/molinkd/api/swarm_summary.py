"""``GET /swarm``: the summary of the swarm that the chat page draws.

It has less than ``molink status --json``: users of the endpoint see which PC computes what and why
a request waits, but no ids, ports, processes or codes. All texts are plain.
"""

import asyncio
import re
from collections.abc import Iterator

import msgspec
from aiohttp import web
from msgspec import json

from molink.plaintext import sanitize_text
from molink.swarm.controller.status_schema import (
    PeerStatus,
    PipelineStatus,
    SchedulerStatus,
    SwarmStatus,
    decode_status,
    short_device_name,
)
from molinkd.api.api_settings import is_loopback
from molinkd.api.backend import Backend

#: How long a summary is reused, in seconds, however many pages poll.
CACHE_TTL_S = 0.7
#: Maximum number of join commands with addresses.
_MAX_ADDRESSES = 3
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d+")


class StageSummary(msgspec.Struct, frozen=True):
    """A stage: its PC and layers, seconds per row, and seconds to send a row to the next stage.

    ``doing`` is its activity other than serving; ``busy`` is in percent, ``None`` if unknown.
    """

    pc: str
    device: str
    layers: tuple[int, int]
    doing: str
    busy: int | None
    decode_s: float
    link_s: float


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
    """A PC without a stage."""

    pc: str
    device: str
    doing: str


class SwarmSummary(msgspec.Struct, frozen=True):
    """The swarm. ``pairings`` PCs wait for approval; ``join`` are commands for another PC."""

    ready: bool
    online: int
    offline: int
    trouble: str
    pairings: int
    rings: tuple[RingSummary, ...]
    others: tuple[PcSummary, ...]
    join: tuple[str, ...]


class SwarmRoute:
    """``/swarm``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = asyncio.Lock()
        self._last = b""
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
                self._last = json.encode(
                    summarize_swarm(decode_status(await self._backend.fetch_status()))
                )
                self._expires_at = loop.time() + CACHE_TTL_S
        headers = {"Cache-Control": "no-store"}
        return web.Response(body=self._last, content_type="application/json", headers=headers)


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
        others=tuple(_summarize_pc(peer) for peer in status.peers if peer.id not in placed),
        join=tuple(_join_commands(status)),
    )


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
    )


def _summarize_pc(peer: PeerStatus) -> PcSummary:
    doing = peer.state
    if peer.state == "online":
        doing = peer.paused or ("endpoint only" if peer.stage == "none" else "standby")
    return PcSummary(
        sanitize_text(peer.name),
        sanitize_text(short_device_name(peer.device)),
        sanitize_text(peer.reason or doing),
    )


def _join_commands(status: SwarmStatus) -> Iterator[str]:
    """Return commands to join: on the same network, and by address."""
    yield "molink join"
    hosts = [found[1] for one in status.coordinator.addresses if (found := _ADDRESS.fullmatch(one))]
    elsewhere = [host for host in dict.fromkeys(hosts) if not is_loopback(host.strip("[]"))]
    for host in elsewhere[:_MAX_ADDRESSES]:
        yield f"molink join {host}"
