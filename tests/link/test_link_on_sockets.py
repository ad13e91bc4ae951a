"""A whole link between two workers' sockets on loopback, with CURVE."""

import asyncio
from typing import Any

import numpy as np
import pytest

from molink.errors import PortInUse
from molink.link.create import create_policy
from molink.link.dial import dial
from molink.link.inlink import InLink
from molink.link.outlink import OutLink, Progress
from molink.link.receiver import Arrival, LinkReceiver
from molink.link.sender import LinkSender
from molink.wire.base import Payload
from molink.wire.codec import data_codec
from molink.wire.data import Rows, Tombstone, Volume
from molink.wire.keys import peer_id
from molink.wire.server import Server

HIDDEN = 256


def volume(tick: int, rows: int, prefill: bool) -> tuple[Volume, bytes]:
    header = Volume(tick, prefill, (Rows(1, 0, rows, 0),), Payload("bf16", (rows, HIDDEN)))
    return header, np.random.default_rng(tick).bytes(rows * HIDDEN * 2)


class Pair:
    """Stage 0 linked to stage 1."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.keys = net.member()
        self.arrivals: list[Arrival] = []
        self.deaths: list[str] = []
        self.server = self.listen(net.server(data_codec(), self.handle))
        receiver = LinkReceiver(1, HIDDEN, "bf16")
        idle = Progress(0, 0, busy=False)
        user = peer_id(self.keys.public)
        self.incoming = InLink(self, receiver, "p", 0, user, lambda: idle, self.arrivals.append)
        address = f"tcp://127.0.0.1:{self.server.port}"
        self.outgoing = OutLink(
            dial(net.context, self.keys, net.keys.public, [address]),
            LinkSender(1, create_policy("fifo")),
            "p",
            0,
            lambda: idle,
            self.deaths.append,
            lambda: None,
        )

    def listen(self, server: Server[Any]) -> Server[Any]:
        return server

    def handle(self, sender: Any, message: Any, payload: memoryview | None) -> None:
        self.incoming.handle(sender, message, payload)

    def send(self, identity: bytes, message: Any, payload: Any = None) -> bool:
        return self.server.send(identity, message, payload)

    def offend(self, user_id: str, reason: str) -> None:
        raise AssertionError(reason)

    async def restart(self) -> None:
        """Kill the server's socket and listen on the same port again."""
        port = self.server.port
        await self.server.close()
        net = self.net
        self.server = Server(net.context, net.keys, data_codec(), net.gatekeeper, self.handle)
        for _ in range(1000):
            try:
                self.server.bind("127.0.0.1", (port, port + 1))
            except PortInUse:
                await asyncio.sleep(0.005)
            else:
                return
        raise AssertionError("the port stays in use")

    async def close(self) -> None:
        await self.outgoing.close()
        self.incoming.close()
        await self.server.close()


async def test_a_link_survives_broken_connections(net: Any) -> None:
    pair = Pair(net)
    pair.outgoing.start()
    sent: list[tuple[Any, bytes | None]] = []
    for turn in range(3):
        for step in range(12):
            tick = turn * 100 + step
            header, data = volume(tick, 700 if step % 3 else 3, prefill=step % 3 > 0)
            sent.append((header, data))
            pair.outgoing.volume(header, data)
            if step == 6 and turn:
                await pair.restart()
        sent.append((Tombstone(turn * 100 + 50), None))
        pair.outgoing.control(Tombstone(turn * 100 + 50))
        await net.until(lambda: len(pair.arrivals) == len(sent))
    by_tick = sorted(pair.arrivals, key=lambda arrival: arrival.body.tick)  # type: ignore[union-attr]
    for arrival, (body, data) in zip(by_tick, sent, strict=True):
        assert arrival.body == body
        assert arrival.payload == data
    await net.until(lambda: not pair.outgoing.stats.unacknowledged_bytes)
    assert pair.outgoing.stats.connects >= 6
    assert pair.deaths == []
    await pair.close()


async def test_the_next_stage_may_come_late(net: Any) -> None:
    pair = Pair(net)
    pair.incoming._receiver.epoch = 0
    pair.outgoing.start()
    pair.outgoing.control(Tombstone(1))
    await net.until(lambda: pair.incoming.stats.strangers >= 3)
    pair.incoming._receiver.epoch = 1
    await net.until(lambda: pair.arrivals)
    await net.until(lambda: pair.outgoing.stats.rtt > 0)
    assert 0 < pair.outgoing.stats.least_rtt < 5.0
    await pair.close()


@pytest.mark.parametrize("prefill", [True, False])
async def test_a_large_volume_comes_whole(net: Any, prefill: bool) -> None:
    pair = Pair(net)
    pair.outgoing.start()
    header, data = volume(5, 40_000, prefill)
    pair.outgoing.volume(header, data)
    await net.until(lambda: pair.arrivals)
    assert pair.arrivals[0].body == header
    assert pair.arrivals[0].payload == data
    await net.until(lambda: not pair.outgoing.stats.unacknowledged_bytes)
    assert pair.outgoing.stats.resent == 0
    await pair.close()
