"""``GET /swarm``: the swarm as the chat page draws it.

Less than ``molink status --json`` has: whoever may use the endpoint learns which PC computes what
and why one waits, but no ids, ports, processes or codes. All texts are plain.
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

#: However many pages look, the daemon is asked once in so many seconds.
CACHE_TTL_S = 0.7
#: Addresses by which another PC may try to join.
_MAX_ADDRESSES = 3
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d+")


class StageSummary(msgspec.Struct, frozen=True):
    """A stage: its PC and layers, and seconds for one row, and until that is at the next stage.

    ``doing`` says what it does instead of serving; ``busy`` is in percent, ``None`` = not told.
    """

    pc: str
    device: str
    layers: tuple[int, int]
    doing: str
    busy: int | None
    decode_s: float
    link_s: float


class RequestSummary(msgspec.Struct, frozen=True):
    """A request that a ring serves: tokens of it, of which ``computed`` are at every stage."""

    state: str
    prompt: int
    computed: int
    generated: int
    age_s: float


class RingSummary(msgspec.Struct, frozen=True):
    """A pipeline, with its stages in order; ``reason`` says why it isn't ready."""

    model: str
    ready: bool
    reason: str
    running: int
    waiting: int
    tokens_per_s: float
    stages: tuple[StageSummary, ...]
    requests: tuple[RequestSummary, ...]


class PcSummary(msgspec.Struct, frozen=True):
    """A PC that holds no stage of a ring, and what it does."""

    pc: str
    device: str
    doing: str


class SwarmSummary(msgspec.Struct, frozen=True):
    """The swarm. ``pairings`` PCs wait to be let in; ``join`` are commands that let one more in."""

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
        """Which PC computes which layers, what runs and waits, and how one more PC joins."""
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
    """What of ``status`` is shown."""
    peers = {peer.id: peer for peer in status.peers}
    pcs = [peer.state == "here" for peer in status.peers if not peer.pc]
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
    head = ring.scheduler or SchedulerStatus()
    return RingSummary(
        model=sanitize_text(ring.model),
        ready=ring.ready,
        reason=sanitize_text(ring.reason),
        running=head.running,
        waiting=head.waiting,
        tokens_per_s=round(head.tokens_per_s, 1),
        stages=tuple(_summarize_stage(ring, number, peers) for number in range(len(ring.stages))),
        requests=tuple(
            RequestSummary(
                sanitize_text(one.state), one.prompt, one.computed, one.generated, one.age_s
            )
            for one in head.requests
        ),
    )


def _summarize_stage(
    ring: PipelineStatus, number: int, peers: dict[str, PeerStatus]
) -> StageSummary:
    stage = ring.stages[number]
    peer = peers.get(stage.peer, PeerStatus(id=stage.peer))
    workers = peer.workers if peer.state == "here" else ()
    mine = (one for one in workers if (one.pipeline, one.stage) == (ring.id, number))
    worker = next(mine, None)
    return StageSummary(
        pc=sanitize_text(peer.name or peer.id),
        device=sanitize_text(short_device_name(stage.device)),
        layers=stage.layers,
        doing="not there" if worker is None else sanitize_text(worker.activity),
        busy=None if worker is None or worker.load is None else worker.load.busy,
        decode_s=stage.decode_s,
        link_s=stage.link_s,
    )


def _summarize_pc(peer: PeerStatus) -> PcSummary:
    doing = peer.state
    if peer.state == "here":
        doing = peer.paused or ("endpoint only" if peer.stage == "none" else "spare")
    return PcSummary(
        sanitize_text(peer.name),
        sanitize_text(short_device_name(peer.device)),
        sanitize_text(peer.reason or doing),
    )


def _join_commands(status: SwarmStatus) -> Iterator[str]:
    """On the same network, and by address from elsewhere."""
    yield "molink join"
    hosts = [found[1] for one in status.coordinator.addresses if (found := _ADDRESS.fullmatch(one))]
    elsewhere = [host for host in dict.fromkeys(hosts) if not is_loopback(host.strip("[]"))]
    for host in elsewhere[:_MAX_ADDRESSES]:
        yield f"molink join {host}"
