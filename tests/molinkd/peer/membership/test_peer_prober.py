"""Probing peers' ports on real sockets."""

import asyncio
import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from molink.facts.identity import derive_peer_id
from molink.swarm.membership.loss_meter import LossMeter
from molink.wire.messages.codec import control_codec
from molink.wire.messages.instructions import PeerInfo
from molink.wire.sockets.key_pair import KeyPair
from molinkd.peer.membership import peer_prober as module
from molinkd.peer.membership.peer_prober import PeerProber, ProbeResult, ProbeTurns
from molinkd.peer.membership.relayed_routes import RouteLatency
from tests.support.net import Net


class SteppedLoop:
    """The running loop with a clock that jumps to the next timer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, asyncio.Handle]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)

        def call_at(
            when: float, work: Callable[..., None], *args: object, context: Any = None
        ) -> asyncio.Handle:
            handle = asyncio.Handle(work, args, loop, context)
            self._timers.append((when, handle))
            return handle

        monkeypatch.setattr(loop, "call_at", call_at)

    async def run_until_done(self, tasks: list[asyncio.Task[None]]) -> None:
        """Run until all tasks are done."""
        while not all(task.done() for task in tasks):
            for _ in range(20):
                await asyncio.sleep(0)
            due = sorted(
                (one for one in self._timers if not one[1].cancelled()), key=lambda one: one[0]
            )
            if due:
                self.now, handle = due[0]
                self._timers = due[1:]
                handle._run()


def ignore_loss(peer: str, loss: float) -> None: ...


def member(public_key: str, port: int, *addresses: str) -> PeerInfo:
    return PeerInfo(
        peer=derive_peer_id(public_key),
        name="x",
        public_key=public_key,
        addresses=addresses or ("127.0.0.1",),
        control_port=port,
    )


async def test_probing_continues_until_the_port_is_open(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    reported: asyncio.Queue[tuple[str, ProbeResult]] = asyncio.Queue()
    prober = PeerProber(
        net.context, net.member(), lambda *said: reported.put_nowait(said), ignore_loss
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        target = member(net.keys.public, closed.getsockname()[1])
        prober.add_peer(target)
        assert await reported.get() == (target.peer, ProbeResult(False))
        assert await reported.get() == (target.peer, ProbeResult(False))
    monkeypatch.setattr(module, "TIMEOUT_S", 10.0)
    server = net.server(control_codec(), lambda *_: None)
    # It listens elsewhere now; one of its addresses is enough.
    prober.add_peer(member(net.keys.public, server.port, "127.0.0.9", "127.0.0.1"))
    while not (said := await reported.get())[1].is_reachable:
        pass
    assert said == (target.peer, ProbeResult(True))
    peer, result = said = await reported.get()
    assert peer == target.peer
    assert result.latency is not None
    assert result == ProbeResult(True, result.latency)
    assert 0 < result.latency < 5.0
    prober.report_all()
    assert reported.get_nowait() == said
    prober.drop_peer(target.peer)
    prober.report_all()
    assert reported.empty()
    await prober.close()


async def test_changed_latencies_are_reported(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEASURE_S", 0.0)
    measured = iter([None, 0.010, 0.0105, 0.0115, None, 0.014, 0.030])
    over = asyncio.Event()

    async def latency(*_: object) -> float | None:
        for away in measured:
            return away
        over.set()
        return None

    monkeypatch.setattr(module, "measure_latency", latency)
    reported: list[float | None] = []
    prober = PeerProber(
        net.context,
        net.member(),
        lambda _, result: reported.append(result.latency),
        ignore_loss,
    )
    server = net.server(control_codec(), lambda *_: None)
    prober.add_peer(member(net.keys.public, server.port))
    await asyncio.wait_for(over.wait(), 30)
    await prober.close()
    assert reported == [None, 0.010, 0.014, 0.030]


async def test_losses_are_reported_once_known(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEASURE_S", 0.0)
    late, over = iter([1, 1, 1, 0]), asyncio.Event()

    async def latency(hosts: object, port: int, losses: LossMeter) -> float:
        if (count := next(late, None)) is None:
            over.set()
        else:
            losses.record_handshakes([0.02] * (10 - count) + [1.02] * count)
        return 0.01

    monkeypatch.setattr(module, "measure_latency", latency)
    reported: list[float] = []
    prober = PeerProber(
        net.context, net.member(), lambda *_: None, lambda _, loss: reported.append(loss)
    )
    server = net.server(control_codec(), lambda *_: None)
    prober.add_peer(member(net.keys.public, server.port))
    await asyncio.wait_for(over.wait(), 30)
    assert reported == [3 / 30 / 2, 3 / 40 / 2]
    prober.report_all()
    assert reported[2:] == reported[1:2]
    await prober.close()


async def test_concurrent_probes_are_limited(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a swarm starts, each PC probes all others; many handshakes at once would delay it."""
    under_way = most = 0

    async def can_connect(*_: object) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return True

    monkeypatch.setattr(module, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "_PING_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "ping", lambda *_: asyncio.sleep(0, True))
    monkeypatch.setattr(module, "can_connect", can_connect)
    monkeypatch.setattr(module, "measure_latency", lambda *_: asyncio.sleep(0, 0.001))
    reported: asyncio.Queue[str] = asyncio.Queue()
    prober = PeerProber(
        net.context, net.member(), lambda *said: reported.put_nowait(said[0]), ignore_loss
    )
    targets = [member(net.member().public, 1) for _ in range(20)]
    for target in targets:
        prober.add_peer(target)
    reached = {await reported.get() for _ in range(2 * len(targets))}
    await prober.close()
    assert reached == {target.peer for target in targets}
    assert most == 2


@pytest.mark.parametrize("num_peers", [9, 25, 64])
async def test_probes_a_second_do_not_grow_with_the_swarm(
    num_peers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = SteppedLoop(monkeypatch)
    turns, started = ProbeTurns("me", 2, 1.0), []

    async def probe(peer: str, again: bool) -> None:
        async with turns.take_turn(peer, num_peers, again=again):
            started.append((peer, again, loop.now))

    tasks = [
        asyncio.create_task(probe(f"pc{number}", again))
        for number in range(num_peers)
        for again in (True, False)
    ]
    await loop.run_until_done(tasks)
    times = [at for _, _, at in started]
    assert times == [float(second) for second in range(2 * num_peers)]
    order = [peer for peer, again, _ in started if not again]
    assert [again for _, again, _ in started] == [False] * num_peers + [True] * num_peers
    assert sorted(order) == sorted(f"pc{number}" for number in range(num_peers))
    turns.close()


async def test_each_pc_probes_in_its_own_order() -> None:
    orders = []
    for me in ("pc1", "pc2", "pc3"):
        turns, order = ProbeTurns(me, 2, 0.0), list[str]()

        async def probe(peer: str, turns: ProbeTurns = turns, order: list[str] = order) -> None:
            async with turns.take_turn(peer, 20, again=False):
                order.append(peer)

        await asyncio.gather(*(probe(f"peer{number}") for number in range(20)))
        orders.append(order[0])
    assert len(set(orders)) > 1


async def test_a_cancelled_probe_takes_no_turn() -> None:
    turns, ended = ProbeTurns("me", 2, 0.0), asyncio.Event()

    async def probe(peer: str) -> None:
        async with turns.take_turn(peer, 20, again=False):
            await ended.wait()

    tasks = [asyncio.create_task(probe(f"pc{number}")) for number in range(6)]
    await asyncio.sleep(0)
    for task in tasks[:5]:
        task.cancel()
    await asyncio.gather(*tasks[:5], return_exceptions=True)
    ended.set()
    await asyncio.wait_for(tasks[5], 30)


class EmulatedHomes:
    """Peers that answer a ping after a round trip, or never, and shake hands in five."""

    ROUND_TRIP = 0.04

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = SteppedLoop(monkeypatch)
        #: Ports at which a peer answers, and of its relayed route.
        self.live: set[int] = set()
        #: When each peer was first reported with each result.
        self.reports: dict[tuple[str, bool], float] = {}
        self._news = asyncio.Event()
        monkeypatch.setattr(module, "ping", self._ping)
        monkeypatch.setattr(module, "can_connect", self._can_connect)
        monkeypatch.setattr(module, "measure_latency", lambda *_: asyncio.sleep(0, 0.02))

    async def _ping(self, hosts: Sequence[str], port: int, timeout: float) -> bool:
        is_there = port in self.live and bool(hosts)
        await asyncio.sleep(self.ROUND_TRIP if is_there else timeout * bool(hosts))
        return is_there

    async def _can_connect(self, *given: Any) -> bool:
        targets, timeout = given[4:]
        is_there = any(int(one.rpartition(":")[2]) in self.live for one in targets)
        await asyncio.sleep(5 * self.ROUND_TRIP if is_there else timeout)
        return is_there

    def report(self, peer: str, result: ProbeResult) -> None:
        """Record a report of the prober's."""
        self.reports.setdefault((peer, result.is_reachable), self.loop.now)
        self._news.set()

    async def wait_for(self, *reports: tuple[str, bool]) -> None:
        """Let time pass until these have been reported."""

        async def wait() -> None:
            while not self.reports.keys() >= {*reports}:
                self._news.clear()
                await self._news.wait()

        await self.loop.run_until_done([asyncio.create_task(wait())])


async def test_peers_that_are_off_delay_nobody(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live peer is reached at once, and a relay for a silent one asked for after half a second,
    beside eight that are switched off."""
    homes = EmulatedHomes(monkeypatch)
    routes = FakeRoutes(0)
    prober = PeerProber(net.context, net.member(), homes.report, ignore_loss, routes)
    off = [member(net.member().public, 1) for _ in range(8)]
    live, closed = (member(net.member().public, port) for port in (2, 3))
    homes.live = {2, 4}
    for info in (*off, live, closed):
        prober.add_peer(info)
    await homes.wait_for((live.peer, True), (closed.peer, False))
    assert homes.reports[live.peer, True] <= 10 * 0.05 + 6 * homes.ROUND_TRIP
    assert homes.reports[closed.peer, False] <= 10 * 0.05 + 0.5
    routes.port, asked_at = 4, homes.loop.now
    prober.retry_peer(closed.peer)
    await homes.wait_for((closed.peer, True))
    took = homes.reports[closed.peer, True] - asked_at
    assert took <= 1.0 + 5 * homes.ROUND_TRIP  # one handshake a second
    await prober.close()


async def test_a_peer_at_this_pcs_own_address_is_elsewhere(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many homes have the same addresses: this PC would answer itself."""
    homes = EmulatedHomes(monkeypatch)
    homes.live = {2}
    own = ["tcp://192.168.1.2:2"]
    prober = PeerProber(
        net.context, net.member(), homes.report, ignore_loss, own_endpoints=lambda: own
    )
    other_home = member(net.member().public, 2, "192.168.1.2")
    same_home = member(net.member().public, 2, "192.168.1.3")
    prober.add_peer(other_home)
    prober.add_peer(same_home)
    await homes.wait_for((other_home.peer, False), (same_home.peer, True))
    assert homes.reports[other_home.peer, False] == 0.0
    assert (other_home.peer, True) not in homes.reports
    await prober.close()


async def test_a_second_ping_makes_up_for_a_lost_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sent = SteppedLoop(monkeypatch), list[float]()

    async def connect(*_: object) -> list[float]:
        sent.append(loop.now)
        await (asyncio.sleep(0.04) if len(sent) > 1 else asyncio.Event().wait())
        return [0.04]

    monkeypatch.setattr(module, "_time_connects", connect)
    pinging = asyncio.create_task(module.ping(["192.0.2.1"], 1, 0.5))
    await loop.run_until_done([pinging])
    assert pinging.result()
    assert (sent, loop.now) == ([0.0, 0.25], pytest.approx(0.29))


async def test_a_ping_ends_when_nobody_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as server:
        closed.bind(("127.0.0.1", 0))
        refusing, open_port = closed.getsockname()[1], server.getsockname()[1]
        assert await module.ping(["127.0.0.9", "127.0.0.1"], open_port, 60.0)
        assert not await module.ping(["127.0.0.1"], refusing, 60.0)
        assert not await module.ping([], open_port, 60.0)
    loop = SteppedLoop(monkeypatch)
    monkeypatch.setattr(module, "_time_connects", lambda *_: asyncio.Event().wait())
    silent = asyncio.create_task(module.ping(["192.0.2.1"], 1, 0.5))
    await loop.run_until_done([silent])
    assert (silent.result(), loop.now) == (False, 0.5)


async def test_a_very_short_round_trip_is_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setattr(module, "_SHORTEST_S", 10.0)
        assert await module.measure_latency(["127.0.0.1"], server.getsockname()[1]) is not None
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()


async def test_a_direct_way_replaces_a_relayed_one(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The direct route must work in two measurements in a row."""
    monkeypatch.setattr(module, "RELAYED_MEASURE_S", 0.0)
    answers = itertools.chain([False, True, True, False, True, False], itertools.repeat(True))
    tried: list[Sequence[str]] = []

    async def can_connect(*arguments: Any) -> bool:
        tried.append(arguments[4])
        return next(answers)

    monkeypatch.setattr(module, "ping", lambda *_: asyncio.sleep(0, True))
    monkeypatch.setattr(module, "can_connect", can_connect)
    reported: list[ProbeResult] = []
    routes = FakeRoutes(0)
    routes.latencies = [RouteLatency(0.02, is_direct=False)] * 6
    prober = PeerProber(
        net.context, net.member(), lambda _, result: reported.append(result), ignore_loss, routes
    )
    target = member(net.member().public, 1)
    prober.add_peer(target)
    await net.until(lambda: reported)
    routes.port = 2
    prober.retry_peer(target.peer)
    await net.until(lambda: ProbeResult(True) in reported)
    await prober.close()
    assert reported[:4] == [
        ProbeResult(False),
        ProbeResult(True, None, True),
        ProbeResult(True, 0.02, True),
        ProbeResult(True),
    ]
    assert [one[0].rpartition(":")[2] for one in tried[:8]] == ["1", "2", *["1"] * 6]


class FakeRoutes:
    """A relayed route to every member, which leads to ``port``."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.latencies: list[RouteLatency | None] = [RouteLatency(0.02, is_direct=True), None]

    def local_endpoint(self, peer: str, port: int) -> str:
        return f"tcp://127.0.0.1:{self.port}" if self.port else ""

    async def measure_latency(self, peer: str) -> RouteLatency | None:
        return self.latencies.pop(0) if self.latencies else None


async def test_a_peer_reached_by_a_relayed_route(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = module.can_connect

    async def can_connect(*given: Any) -> bool:
        if given[4][0].endswith(f":{target.control_port}"):
            return False  # a closed port takes the whole timeout
        return await connect(*given)

    monkeypatch.setattr(module, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(module, "RELAYED_MEASURE_S", 0.0)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "can_connect", can_connect)
    reported: asyncio.Queue[tuple[str, ProbeResult]] = asyncio.Queue()
    server = net.server(control_codec(), lambda *_: None)
    relayed_routes = FakeRoutes(0)
    prober = PeerProber(
        net.context,
        net.member(),
        lambda *said: reported.put_nowait(said),
        ignore_loss,
        relayed_routes,
    )
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        target = member(net.keys.public, closed.getsockname()[1])
        prober.add_peer(target)
        assert await reported.get() == (target.peer, ProbeResult(False))
        relayed_routes.port = server.port
        prober.retry_peer(target.peer)
        prober.retry_peer("nobody")
        while not (said := await reported.get())[1].is_reachable:
            pass
        assert said == (target.peer, ProbeResult(True, None, True))
        assert await reported.get() == (target.peer, ProbeResult(True, 0.02, True, True))
        # Once the route fails, all routes are tried again, the relayed one first.
        assert await reported.get() == (target.peer, ProbeResult(True, None, True))
        await prober.close()


async def test_the_latency_of_an_offline_peer_is_unknown() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert await module.measure_latency(["127.0.0.1"], closed.getsockname()[1]) is None
    assert await module.measure_latency([], 1) is None


async def test_a_rejected_handshake_counts_as_reachable(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = net.server(control_codec(), lambda *_: None)
    target = [f"tcp://127.0.0.1:{server.port}"]
    codec, stranger = control_codec(), KeyPair.generate()
    key = net.keys.public
    assert await module.can_connect(net.context, stranger, codec, key, target)
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    other = KeyPair.generate().public
    assert not await module.can_connect(net.context, net.member(), codec, other, target)
    assert not await module.can_connect(net.context, net.member(), codec, key, [])


async def test_one_reachable_address_is_enough(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 3600.0)
    server = net.server(control_codec(), lambda *_: None)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        targets = [f"tcp://127.0.0.1:{port}" for port in (closed.getsockname()[1], server.port)]
        tried = module.can_connect(
            net.context, net.member(), control_codec(), net.keys.public, targets
        )
        assert await asyncio.wait_for(tried, 60)


async def test_a_probe_during_a_suspension_is_repeated(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    time, tries, stopped = loop.time, [], 0.0
    monkeypatch.setattr(loop, "time", lambda: time() + stopped)

    async def answers(*_: object) -> bool:
        nonlocal stopped
        tries.append(stopped)
        if len(tries) == 1:
            stopped = 60.0
            return False
        return len(tries) == 2

    monkeypatch.setattr(module, "_is_answering", answers)
    given = net.context, KeyPair.generate(), control_codec(), net.keys.public, ["tcp://x:1"]
    assert await module.can_connect(*given)
    assert len(tries) == 2
    assert not await module.can_connect(*given)
    assert len(tries) == 3


async def test_addresses_of_nonsense_are_unreachable() -> None:
    """A hostile member may report them as its own."""
    assert await module.measure_latency(["[", "a..b", "x" * 64, "x\x00"], 9) is None
