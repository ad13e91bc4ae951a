"""Tries whether other members' ports can be reached from here, and how far away they are.

Before anything depends on it: placement goes by it.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Any

import zmq.asyncio

from molink.errors import MolinkError, NotAuthorized
from molink.swarm.running_time import MAX_STEP
from molink.wire.messages.codec import Codec, control_codec
from molink.wire.messages.instructions import PeerInfo
from molink.wire.sockets.client import Client
from molink.wire.sockets.create_socket import endpoints
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.membership.relayed_routes import RelayedRoutes

#: How long a try may take, in seconds: a handshake takes five round trips.
TIMEOUT_S = 3.0
#: Until a member that could not be reached is tried again, in seconds.
RETRY_S = 5.0
#: Until the way to a member that was reached is measured again, in seconds.
MEASURE_S = 600.0
#: The same of a way over a relay, which may be gone.
RELAYED_MEASURE_S = 30.0
#: So many members are tried at once: when a swarm starts, each PC tries all others.
_MAX_CONCURRENT = 4
#: Where there are more than so many, whoever has answered is followed by a pause, in which others
#: get on: so many times as long as the answer took, which is longer where PCs are busy; and how
#: long at most, in seconds.
_MANY_PEERS = 8
_PAUSE, _MOST_PAUSE_S = 9, 3.0
#: Another latency is told if it differs by this part and by so many seconds.
_NEWS, _NEWS_S = 0.2, 0.001
#: A round trip is the least of so many: what comes on top is the PCs' own. One so short is enough:
#: a shorter one would be no news.
_TRIPS, _ENOUGH_S = 5, 2 * _NEWS_S


async def can_connect(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    codec: Codec[Any],
    server_key: str,
    targets: Sequence[str],
) -> bool:
    """Whether the holder of ``server_key`` answers at any of ``targets`` (``tcp://host:port``).

    One that doesn't know this PC yet has answered too. A try during which this process stood still
    says nothing, and is made again.
    """
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        if await _try_targets(context, keys, codec, server_key, targets):
            return True
        if loop.time() - began <= TIMEOUT_S + MAX_STEP:
            return False


async def _try_targets(
    context: zmq.asyncio.Context,
    keys: KeyPair,
    codec: Codec[Any],
    server_key: str,
    targets: Sequence[str],
) -> bool:
    tries = [
        asyncio.ensure_future(_is_answering(context, keys, codec, server_key, target))
        for target in targets
    ]
    try:
        for done in asyncio.as_completed(tries):
            if await done:
                return True
        return False
    finally:
        for one in tries:
            one.cancel()
        await asyncio.gather(*tries, return_exceptions=True)


async def _is_answering(
    context: zmq.asyncio.Context, keys: KeyPair, codec: Codec[Any], server_key: str, target: str
) -> bool:
    client: Client[Any] = Client(context, keys, codec, server_key, [target])
    try:
        client.start()
        await client.wait_connected(TIMEOUT_S)
    except NotAuthorized:
        return True
    except MolinkError:
        return False
    finally:
        await client.close()
    return True


async def measure_latency(hosts: Sequence[str], port: int) -> float | None:
    """Seconds of the one way to the nearest of ``hosts``: half of what it takes to connect to it.

    TCP's handshake is one round trip, and the other PC's daemon has no part in it. ``None``: none
    could be connected to.
    """
    trips: list[float] = []
    for host in hosts:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                trips += await _time_connects(host, port)
    return min(trips) / 2 if trips else None


async def _time_connects(host: str, port: int) -> list[float]:
    """Seconds of connecting to ``host``, a few times.

    Raises:
        OSError: it can't be found, or refuses.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, _, _, address = found[0]
    trips: list[float] = []
    for _ in range(_TRIPS):
        with socket.socket(family, kind) as one:
            one.setblocking(False)
            began = loop.time()
            await loop.sock_connect(one, address)
            trips.append(loop.time() - began)
        if trips[-1] < _ENOUGH_S:
            break
    return trips


class PeerProber:
    """Tries every member's control port until it answers, and again if its addresses change.

    The way to those who answered is measured now and then.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: KeyPair,
        tell: Callable[[str, bool, float | None, bool], None],
        relayed_routes: RelayedRoutes | None = None,
    ) -> None:
        """``tell`` is called with a peer, whether it was reached, and its latency in seconds.

        And whether that was by one of the ``relayed_routes``. After each try, and when the latency
        is news; it is ``None`` until it is known.
        """
        self._context = context
        self._keys = keys
        self._report = tell
        self._routes = relayed_routes
        self._codec = control_codec()
        #: Where each member listens, as it was tried.
        self._targets: dict[str, tuple[str, ...]] = {}
        self._results: dict[str, tuple[bool, float | None, bool]] = {}
        self._peers: dict[str, PeerInfo] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        #: All that have not ended, those that were given up too.
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    def add_peer(self, member: PeerInfo) -> None:
        """A member is there, or listens elsewhere."""
        targets = tuple(endpoints(member.addresses, member.control_port))
        if not targets or self._targets.get(member.peer) == targets:
            return
        self.drop_peer(member.peer)
        self._targets[member.peer] = targets
        self._peers[member.peer] = member
        task = asyncio.get_running_loop().create_task(self._probe_peer(member, targets))
        self._probes[member.peer] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drop_peer(self, peer: str) -> None:
        """It is no member any more."""
        self._targets.pop(peer, None)
        self._peers.pop(peer, None)
        self._results.pop(peer, None)
        task = self._probes.pop(peer, None)
        if task is not None:
            task.cancel()

    def retry_peer(self, peer: str) -> None:
        """There is another way to it than before."""
        member = self._peers.get(peer)
        if member is not None:
            self.drop_peer(peer)
            self.add_peer(member)

    def report_all(self) -> None:
        """Tell all again, to who may have missed it."""
        for peer, (reached, latency, relayed) in self._results.items():
            self._report(peer, reached, latency, relayed)

    async def close(self) -> None:
        """Try no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probe_peer(self, member: PeerInfo, targets: Sequence[str]) -> None:
        while True:
            async with self._slots:
                began = self._now()
                reached, relayed = await self._try_routes(member, targets)
                took = self._now() - began
                self._record_result(member.peer, reached, None, relayed)
                if reached:
                    await asyncio.sleep(pause_after(took, len(self._peers)))
            if reached:
                await self._measure_periodically(member, relayed)
            else:
                await asyncio.sleep(RETRY_S)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _try_routes(self, member: PeerInfo, targets: Sequence[str]) -> tuple[bool, bool]:
        """Whether it can be reached, and whether only by a detour."""
        context, keys, codec, key = self._context, self._keys, self._codec, member.public_key
        if await can_connect(context, keys, codec, key, targets):
            return True, False
        relayed_routes = self._routes
        around = (
            ""
            if relayed_routes is None
            else relayed_routes.local_endpoint(member.peer, member.control_port)
        )
        if not around:
            return False, False
        return await can_connect(context, keys, codec, key, [around]), True

    async def _measure_periodically(self, member: PeerInfo, relayed: bool) -> None:
        """Tell how far away it is, until a detour leads there no more."""
        told: float | None = None
        while True:
            if relayed:
                assert self._routes is not None
                away = await self._routes.measure_latency(member.peer)
                if away is None:
                    return
            else:
                async with self._slots:
                    away = await measure_latency(member.addresses, member.control_port)
            if away is not None and _is_changed(away, told):
                told = away
                self._record_result(member.peer, True, away, relayed)
            await asyncio.sleep(RELAYED_MEASURE_S if relayed else MEASURE_S)

    def known_latency(self, peer: str) -> float | None:
        """How far away a member is, in seconds of the one way; ``None`` where that isn't known."""
        return self._results.get(peer, (False, None, False))[1]

    def _record_result(
        self, peer: str, reached: bool, latency: float | None, relayed: bool
    ) -> None:
        self._results[peer] = reached, latency, relayed
        self._report(peer, reached, latency, relayed)


def pause_after(took: float, members: int) -> float:
    """Seconds to leave to others after a try that ``took`` so long, where so many are tried."""
    return min(_PAUSE * took, _MOST_PAUSE_S) if members > _MANY_PEERS else 0.0


def _is_changed(latency: float, told: float | None) -> bool:
    if told is None:
        return True
    return abs(latency - told) > max(_NEWS_S, _NEWS * max(latency, told))
