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

from molink.plaintext import plain
from molink.swarm.controller.told_status import (
    HeadStatus,
    Peer,
    PipelineStatus,
    Status,
    device_name,
    read_status,
)
from molinkd.api.backend import Backend
from molinkd.api.endpoint_settings import is_loopback

#: However many pages look, the daemon is asked once in so many seconds.
FRESH_S = 0.7
#: Addresses by which another PC may try to join.
_MOST_ADDRESSES = 3
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):\d+")


class StageShown(msgspec.Struct, frozen=True):
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


class RequestShown(msgspec.Struct, frozen=True):
    """A request that a ring serves: tokens of it, of which ``computed`` are at every stage."""

    state: str
    prompt: int
    computed: int
    generated: int
    age_s: float


class RingShown(msgspec.Struct, frozen=True):
    """A pipeline, with its stages in order; ``reason`` says why it isn't ready."""

    model: str
    ready: bool
    reason: str
    running: int
    waiting: int
    tokens_per_s: float
    stages: tuple[StageShown, ...]
    requests: tuple[RequestShown, ...]


class PcShown(msgspec.Struct, frozen=True):
    """A PC that holds no stage of a ring, and what it does."""

    pc: str
    device: str
    doing: str


class SwarmShown(msgspec.Struct, frozen=True):
    """The swarm. ``knocks`` PCs wait to be let in; ``join`` are commands that let one more in."""

    ready: bool
    here: int
    away: int
    trouble: str
    knocks: int
    rings: tuple[RingShown, ...]
    others: tuple[PcShown, ...]
    join: tuple[str, ...]


class SwarmRoute:
    """``/swarm``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = asyncio.Lock()
        self._last = b""
        self._until = 0.0

    @property
    def table(self) -> list[web.RouteDef]:
        """The route."""
        return [web.get("/swarm", self.handle)]

    async def handle(self, request: web.Request) -> web.Response:
        """Which PC computes which layers, what runs and waits, and how one more PC joins."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() >= self._until:
                self._last = json.encode(show_swarm(read_status(await self._backend.status())))
                self._until = loop.time() + FRESH_S
        headers = {"Cache-Control": "no-store"}
        return web.Response(body=self._last, content_type="application/json", headers=headers)


def show_swarm(status: Status) -> SwarmShown:
    """What of ``status`` is shown."""
    peers = {peer.id: peer for peer in status.peers}
    pcs = [peer.state == "here" for peer in status.peers if not peer.pc]
    placed = {stage.peer for ring in status.pipelines for stage in ring.stages}
    return SwarmShown(
        ready=status.ready,
        here=sum(pcs),
        away=len(pcs) - sum(pcs),
        trouble=plain(status.trouble),
        knocks=len(status.knocks),
        rings=tuple(_ring(one, peers) for one in status.pipelines),
        others=tuple(_other(peer) for peer in status.peers if peer.id not in placed),
        join=tuple(_join(status)),
    )


def _ring(ring: PipelineStatus, peers: dict[str, Peer]) -> RingShown:
    head = ring.head or HeadStatus()
    return RingShown(
        model=plain(ring.model),
        ready=ring.ready,
        reason=plain(ring.reason),
        running=head.running,
        waiting=head.waiting,
        tokens_per_s=round(head.tokens_per_s, 1),
        stages=tuple(_stage(ring, number, peers) for number in range(len(ring.stages))),
        requests=tuple(
            RequestShown(plain(one.state), one.prompt, one.computed, one.generated, one.age_s)
            for one in head.requests
        ),
    )


def _stage(ring: PipelineStatus, number: int, peers: dict[str, Peer]) -> StageShown:
    stage = ring.stages[number]
    peer = peers.get(stage.peer, Peer(id=stage.peer))
    workers = peer.workers if peer.state == "here" else ()
    mine = (one for one in workers if (one.pipeline, one.stage) == (ring.id, number))
    worker = next(mine, None)
    return StageShown(
        pc=plain(peer.name or peer.id),
        device=plain(device_name(stage.device)),
        layers=stage.layers,
        doing="not there" if worker is None else plain(worker.doing),
        busy=None if worker is None or worker.load is None else worker.load.busy,
        decode_s=stage.decode_s,
        link_s=stage.link_s,
    )


def _other(peer: Peer) -> PcShown:
    doing = peer.state
    if peer.state == "here":
        doing = peer.paused or ("endpoint only" if peer.stage == "none" else "spare")
    return PcShown(plain(peer.name), plain(device_name(peer.device)), plain(peer.reason or doing))


def _join(status: Status) -> Iterator[str]:
    """On the same network, and by address from elsewhere."""
    yield "molink join"
    hosts = [found[1] for one in status.coordinator.addresses if (found := _ADDRESS.fullmatch(one))]
    elsewhere = [host for host in dict.fromkeys(hosts) if not is_loopback(host.strip("[]"))]
    for host in elsewhere[:_MOST_ADDRESSES]:
        yield f"molink join {host}"
