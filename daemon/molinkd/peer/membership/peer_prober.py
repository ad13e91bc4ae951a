"""Probes whether other peers are reachable, and measures their latency, for placement.

A first packet to each address of a peer (:func:`ping`) tells within a round trip whether somebody
is there, at hardly any cost; only then a handshake proves that it is the peer. Peers are pinged
side by side, so that those that are switched off, or behind a router, delay nobody.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, NamedTuple

import zmq.asyncio

from molink.errors import MolinkError, NotAuthorized
from molink.swarm.membership.loss_meter import LossMeter
from molink.swarm.running_time import MAX_STEP
from molink.util.change_detector import differs
from molink.wire.messages.codec import Codec, control_codec
from molink.wire.messages.instructions import PeerInfo
from molink.wire.sockets.client import Client
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.membership.relayed_routes import RelayedRoutes
from molinkd.tasks import cancel_tasks

log = logging.getLogger(__name__)

#: Timeout of a probe's pings and of its handshake, in seconds: that takes five round trips.
TIMEOUT_S = 3.0
#: The same for a peer's first probe: if its router lets nobody in, a relay is asked for sooner. A
#: far peer that needs longer is found by the next one.
FIRST_PING_S, FIRST_TIMEOUT_S = 0.5, 1.5
#: When to ping, in seconds: the first packet may be lost.
_PINGS_AT = (0.0, 0.25)
#: Interval of probing an unreachable peer, in seconds.
RETRY_S = 5.0
#: Interval of measuring the latency of a reachable peer, in seconds.
MEASURE_S = 600.0
#: The same over a relay, which may disappear; and direct connections in a row that replace it.
RELAYED_MEASURE_S, _NUM_DIRECT = 30.0, 2
#: Maximum number of concurrent handshakes, and of peers that are pinged.
_MAX_HANDSHAKES, _MAX_PINGED = 2, 16
#: With more peers than this, handshakes and pings start at these intervals in seconds: when a
#: swarm starts, every PC probes all others, and what that costs a PC each second must not grow with
#: the swarm.
_MANY_PEERS, _INTERVAL_S, _PING_INTERVAL_S = 8, 1.0, 0.05
#: Relative and absolute (seconds) change of latency that is reported.
_MIN_CHANGE, _MIN_CHANGE_S = 0.2, 0.001
#: The same of the share of lost packets, with the relative change above.
_MIN_LOSS_CHANGE = 0.001
#: The minimum of several round trips excludes the PCs' own delays. Measuring stops at a round trip
#: too short to be a reportable change.
_NUM_CONNECTS, _SHORTEST_S = 5, 2 * _MIN_CHANGE_S


async def can_connect(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    codec: Codec[Any],
    server_key: str,
    targets: Sequence[str],
    timeout: float | None = None,
) -> bool:
    """Whether the holder of ``server_key`` answers at any of ``targets`` (``tcp://host:port``).

    A server that rejects this PC's key counts too. ``timeout`` is in seconds (``TIMEOUT_S``). The
    probe is repeated if this process was suspended meanwhile.
    """
    limit = TIMEOUT_S if timeout is None else timeout
    return await _repeat_after_suspension(
        limit, lambda: _try_targets(context, keys, codec, server_key, targets, limit)
    )


async def _repeat_after_suspension(limit: float, attempt: Callable[[], Awaitable[bool]]) -> bool:
    """The result of an attempt of ``limit`` seconds during which this process ran."""
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        if await attempt():
            return True
        if loop.time() - started <= limit + MAX_STEP:
            return False


async def _try_targets(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    codec: Codec[Any],
    server_key: str,
    targets: Sequence[str],
    timeout: float,
) -> bool:
    tries = [
        asyncio.ensure_future(_is_answering(context, keys, codec, server_key, target, timeout))
        for target in targets
    ]
    try:
        for done in asyncio.as_completed(tries):
            if await done:
                return True
        return False
    finally:
        await cancel_tasks(*tries)


async def _is_answering(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    codec: Codec[Any],
    server_key: str,
    target: str,
    timeout: float,
) -> bool:
    client: Client[Any] = Client(context, keys, codec, server_key, [target])
    try:
        client.start()
        await client.wait_connected(timeout)
    except NotAuthorized:
        return True
    except MolinkError:
        return False
    finally:
        await client.close()
    return True


async def ping(hosts: Sequence[str], port: int, timeout: float) -> bool:
    """Whether anybody answers a TCP handshake at any of ``hosts`` within ``timeout`` seconds.

    It may not be the peer: other homes have the same addresses.
    """
    return await _repeat_after_suspension(timeout, lambda: _ping_once(hosts, port, timeout))


async def _ping_once(hosts: Sequence[str], port: int, timeout: float) -> bool:
    loop = asyncio.get_running_loop()
    tries = [
        loop.create_task(_is_there(host, port, delay))
        for host, delay in itertools.product(hosts, _PINGS_AT)
    ]
    pending, deadline = set(tries), loop.time() + timeout
    try:
        while pending:
            # Unlike a timeout that cancels, this sees answers that came while the loop was busy.
            done, pending = await asyncio.wait(
                pending, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            if any(one.result() for one in done):
                return True
            if not done:
                return False
        return False
    finally:
        await cancel_tasks(*tries)


async def _is_there(host: str, port: int, delay: float) -> bool:
    """Whether somebody accepts a connection, which is tried after ``delay`` seconds."""
    await asyncio.sleep(delay)
    with contextlib.suppress(OSError):
        await _time_connects(host, port, 1)
        return True
    return False


async def measure_latency(
    hosts: Sequence[str], port: int, losses: LossMeter | None = None
) -> float | None:
    """One-way latency to the nearest of ``hosts`` in seconds: half of a TCP handshake.

    The handshake does not involve the other PC's daemon. ``None`` if no host is reachable.
    ``losses`` records the handshakes with the nearest.
    """
    nearest: list[float] = []
    for host in hosts:
        with contextlib.suppress(OSError, ValueError):  # ValueError: nonsense that a peer reports
            async with asyncio.timeout(TIMEOUT_S):
                trips = await _time_connects(host, port, _NUM_CONNECTS)
                nearest = min(nearest or trips, trips, key=min)
    if nearest and losses is not None:
        losses.record_handshakes(nearest)
    return min(nearest) / 2 if nearest else None


async def _time_connects(host: str, port: int, count: int) -> list[float]:
    """Durations of up to ``count`` connects to ``host``, in seconds.

    Raises:
        OSError: The host is unknown or refuses.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, _, _, address = found[0]
    trips: list[float] = []
    for _ in range(count):
        with socket.socket(family, kind) as one:
            one.setblocking(False)
            started = loop.time()
            await loop.sock_connect(one, address)
            trips.append(loop.time() - started)
        if trips[-1] < _SHORTEST_S:
            break
    return trips


class ProbeTurns:
    """Lets a few probes of this PC run at a time, and limits how many start each second.

    First probes come before repeated ones. Each PC has its own order, so that a new peer is not
    probed by all others at once.
    """

    def __init__(self, me: str, max_running: int, interval: float) -> None:
        """``interval`` is in seconds, and counts if there are many peers."""
        self._me, self._max_running, self._long_interval = me, max_running, interval
        #: First or repeated probe, rank, peer, and the future that starts it.
        self._waiting: list[tuple[bool, int, str, asyncio.Future[None]]] = []
        self._num_running = 0
        self._next_start = self._interval = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def take_turn(self, peer: str, num_peers: int, *, again: bool) -> AsyncIterator[None]:
        """Wait for a turn to probe one of ``num_peers``, and end it on leaving the context."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        rank = zlib.crc32(f"{self._me}{peer}".encode())
        heapq.heappush(self._waiting, (again, rank, peer, turn))
        self._interval = self._long_interval if num_peers > _MANY_PEERS else 0.0
        loop.call_soon(self._start_next)  # once all peers that are added now wait
        try:
            await turn
            yield
        finally:
            self._num_running -= turn.done() and not turn.cancelled()
            self._start_next()

    def _start_next(self) -> None:
        """Start what may start now, and set the timer for the rest."""
        loop = asyncio.get_running_loop()
        while self._waiting and self._num_running < self._max_running:
            if self._waiting[0][-1].cancelled():
                heapq.heappop(self._waiting)
            elif (now := loop.time()) >= self._next_start:
                heapq.heappop(self._waiting)[-1].set_result(None)
                self._num_running += 1
                self._next_start = now + self._interval
            else:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = loop.call_at(self._next_start, self._start_next)
                return

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()


class ProbeResult(NamedTuple):
    """Whether a peer is reachable and how; the latency is one way in seconds, ``None`` if unknown.

    ``is_punched``: its relayed connections go on directly.
    """

    is_reachable: bool
    latency: float | None = None
    is_relayed: bool = False
    is_punched: bool = False


class PeerProber:
    """Probes every peer's control port until it answers, then measures its latency periodically."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        report: Callable[[str, ProbeResult], None],
        report_loss: Callable[[str, float], None],
        relayed_routes: RelayedRoutes | None = None,
        own_endpoints: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """``report`` is called after each probe, and when the latency or the way has changed.

        ``report_loss`` gets a peer and the share of packets that are lost on the way, whenever it
        has changed. ``own_endpoints()`` are this PC's: a peer that has the same is in another home.
        """
        self._context = context
        self._keys = keys
        self._report = report
        self._report_loss = report_loss
        self._routes, self._own_endpoints = relayed_routes, own_endpoints
        self._codec = control_codec()
        #: Probed endpoints of each peer.
        self._targets: dict[str, tuple[str, ...]] = {}
        self._results: dict[str, ProbeResult] = {}
        #: Each peer's losses, and the last reported share.
        self._losses: dict[str, tuple[LossMeter, float]] = {}
        self._peers: dict[str, PeerInfo] = {}
        #: When each peer became known, by the loop's clock.
        self._known_since: dict[str, float] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        #: All running tasks, cancelled ones included.
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = ProbeTurns(keys.public, _MAX_HANDSHAKES, _INTERVAL_S)
        self._ping_turns = ProbeTurns(keys.public, _MAX_PINGED, _PING_INTERVAL_S)
        #: Peers at whose addresses nobody has answered the last ping.
        self._silent: set[str] = set()

    def add_peer(self, info: PeerInfo) -> None:
        """Probe a peer, again if its addresses have changed."""
        targets = tuple(endpoints(info.addresses, info.control_port))
        if not targets or self._targets.get(info.peer) == targets:
            return
        self.drop_peer(info.peer)
        self._targets[info.peer] = targets
        self._known_since[info.peer] = asyncio.get_running_loop().time()
        self._peers[info.peer] = info
        task = asyncio.get_running_loop().create_task(self._probe_peer(info))
        self._probes[info.peer] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop_peer(self, peer: str) -> None:
        """Drop a removed peer."""
        self._targets.pop(peer, None)
        self._peers.pop(peer, None)
        self._known_since.pop(peer, None)
        self._results.pop(peer, None)
        self._losses.pop(peer, None)
        self._silent.discard(peer)
        task = self._probes.pop(peer, None)
        if task is not None:
            task.cancel()

    def retry_peer(self, peer: str) -> None:
        """Probe a peer again, whose route has changed."""
        info = self._peers.get(peer)
        if info is not None:
            since = self._known_since[peer]
            self.drop_peer(peer)
            self.add_peer(info)
            self._known_since[peer] = since

    def report_all(self) -> None:
        """Report all results again, after a new session."""
        for peer, result in self._results.items():
            self._report(peer, result)
        for peer, (_, loss) in self._losses.items():
            if loss:
                self._report_loss(peer, loss)

    async def close(self) -> None:
        """Stop probing."""
        await cancel_tasks(*self._tasks)
        self._turns.close()
        self._ping_turns.close()

    async def _probe_peer(self, info: PeerInfo) -> None:
        again = False
        while True:
            result = await self._try_routes(info, again=again)
            if result.is_reachable:
                how = "by a relayed route" if result.is_relayed else "directly"
                took = asyncio.get_running_loop().time() - self._known_since[info.peer]
                log.info("%s: reached %s in %.2f s", info.peer, how, took)
            self._record_result(info.peer, result)
            if not result.is_reachable:
                await asyncio.sleep(RETRY_S)
            elif result.is_relayed:
                await self._measure_relayed(info)
            else:
                await self._measure_periodically(info, await self._measure_once(info))
            again = True

    async def _try_routes(self, info: PeerInfo, *, again: bool) -> ProbeResult:
        """Try the relayed route, which is there since direct ones failed; or else directly."""
        endpoint = self._find_relayed(info)
        if endpoint and await self._shake_hands(info, [endpoint], TIMEOUT_S, again=again):
            return ProbeResult(True, None, True)
        reached = await self._try_directly(info, again=again or bool(endpoint))
        return ProbeResult(reached, None, bool(endpoint) and not reached)

    async def _try_directly(self, info: PeerInfo, *, again: bool) -> bool:
        """Ping all of a peer's addresses, and shake hands if somebody is there."""
        peer, port, own = info.peer, info.control_port, self._own_endpoints()
        patience, limit = (TIMEOUT_S, TIMEOUT_S) if again else (FIRST_PING_S, FIRST_TIMEOUT_S)
        hosts = [host for host in info.addresses if endpoints([host], port)[0] not in own]
        async with self._ping_turns.take_turn(peer, len(self._peers), again=again):
            is_there = await ping(hosts, port, patience)
        (self._silent.discard if is_there else self._silent.add)(peer)
        targets = endpoints(hosts, port)
        return is_there and await self._shake_hands(info, targets, limit, again=again)

    async def _shake_hands(
        self, info: PeerInfo, targets: Sequence[str], timeout: float, *, again: bool
    ) -> bool:
        """Whether a peer proves itself at any of ``targets``, in turn with other peers."""
        async with self._turns.take_turn(info.peer, self._num_live, again=again):
            return await can_connect(
                self._context, self._keys, self._codec, info.public_key, targets, timeout
            )

    @property
    def _num_live(self) -> int:
        """How many peers are not known to be silent."""
        return len(self._peers) - len(self._silent)

    def _find_relayed(self, info: PeerInfo) -> str:
        """The local endpoint of a peer's relayed route; empty without one."""
        return (
            ""
            if self._routes is None
            else self._routes.local_endpoint(info.peer, info.control_port)
        )

    async def _measure_once(
        self, info: PeerInfo, reported: ProbeResult | None = None
    ) -> ProbeResult | None:
        """Measure a direct peer's latency; returns what was last reported, now or before."""
        meter, told = self._losses.setdefault(info.peer, (LossMeter(), 0.0))
        latency = await measure_latency(info.addresses, info.control_port, meter)
        loss = meter.loss or 0.0
        if differs(loss, told, _MIN_CHANGE, _MIN_LOSS_CHANGE) and info.peer in self._losses:
            self._losses[info.peer] = meter, loss
            self._report_loss(info.peer, loss)
        if latency is None:
            return reported
        return self._report_change(info.peer, ProbeResult(True, latency), reported)

    def _report_change(
        self, peer: str, result: ProbeResult, reported: ProbeResult | None
    ) -> ProbeResult:
        if reported is not None and not _is_changed(result, reported):
            return reported
        self._record_result(peer, result)
        return result

    async def _measure_periodically(self, info: PeerInfo, reported: ProbeResult | None) -> None:
        """Report the latency of a direct peer whenever it changes."""
        while True:
            await asyncio.sleep(MEASURE_S)
            async with self._turns.take_turn(info.peer, self._num_live, again=True):
                reported = await self._measure_once(info, reported)

    async def _measure_relayed(self, info: PeerInfo) -> None:
        """Report how a relayed route goes whenever that changes, until the route is gone.

        Ends as well once the peer was reached directly: the route isn't needed any more.
        """
        assert self._routes is not None
        reported: ProbeResult | None = None
        num_direct = 0
        while (measured := await self._routes.measure_latency(info.peer)) is not None:
            result = ProbeResult(True, measured.latency, True, measured.is_direct)
            reported = self._report_change(info.peer, result, reported)
            await asyncio.sleep(RELAYED_MEASURE_S)
            reached = await self._try_directly(info, again=True)
            num_direct = num_direct + 1 if reached else 0
            if num_direct >= _NUM_DIRECT:
                self._record_result(info.peer, ProbeResult(True))
                await asyncio.sleep(RELAYED_MEASURE_S)  # the coordinator closes the route
                return

    def known_latency(self, peer: str) -> float | None:
        """One-way latency of a peer in seconds; ``None`` if unknown."""
        return self._results.get(peer, ProbeResult(False)).latency

    def _record_result(self, peer: str, result: ProbeResult) -> None:
        self._results[peer] = result
        self._report(peer, result)


def _is_changed(result: ProbeResult, reported: ProbeResult) -> bool:
    if result.latency is None or reported.latency is None:
        return result != reported
    return result.is_punched != reported.is_punched or differs(
        result.latency, reported.latency, _MIN_CHANGE, _MIN_CHANGE_S
    )
