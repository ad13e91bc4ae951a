"""A whole link between two workers' sockets on loopback, with CURVE."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from molink.errors import PortInUse
from molink.facts.identity import derive_peer_id
from molink.link.base import LinkName
from molink.link.heartbeat import StageProgress
from molink.link.in_link import InLink, InLinkEvents
from molink.link.out_link import OutLink, OutLinkEvents
from molink.link.policies.base import ChannelPolicy, DecodeFinishedEvent, DecodeStartedEvent
from molink.link.policies.create import POLICIES, create_policy
from molink.link.receiver import Arrival, LinkReceiver
from molink.link.recording import RecordingPolicy, replay_recording
from molink.link.sender import LinkSender
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.data_plane import RequestSlice, Tombstone, Volume, VolumeFragment
from molink.wire.sockets.server import Server
from molinkd.worker.stage_runtime import StageConnector

HIDDEN = 256


def volume(seq: int, rows: int, prefill: bool) -> tuple[Volume, bytes]:
    header = Volume(seq, prefill, (RequestSlice(1, 0, rows, 0),), Payload("bf16", (rows, HIDDEN)))
    return header, np.random.default_rng(seq).bytes(rows * HIDDEN * 2)


class Pair:
    """Stage 0 linked to stage 1."""

    def __init__(
        self, net: Any, policy: str | ChannelPolicy = "fifo", cut_through: bool = False
    ) -> None:
        self.net = net
        self.keys = net.member()
        self.arrivals: list[Arrival] = []
        self.deaths: list[str] = []
        self.server = self.listen(net.server(data_codec(), self.handle))
        receiver = LinkReceiver(1, HIDDEN, "bf16", cut_through=cut_through)
        idle, name = StageProgress(0, 0, has_requests=False), LinkName("p", 0)
        loop = asyncio.get_running_loop()
        user = derive_peer_id(self.keys.public)
        taking = InLinkEvents(lambda: idle, self.arrivals.append)
        self.incoming = InLink(loop, self, receiver, name, user, taking)
        address = f"tcp://127.0.0.1:{self.server.port}"
        self.dialer = StageConnector(net.context, self.keys, net.keys.public, [address])
        sender = LinkSender(1, create_policy(policy) if isinstance(policy, str) else policy)
        sending = OutLinkEvents(lambda: idle, self.deaths.append)
        self.outgoing = OutLink(loop, self.dialer.open_connection, sender, name, sending)
        # Also if the test fails; otherwise the context can't be closed.
        net.at_end(self.close)

    def listen(self, server: Server[Any]) -> Server[Any]:
        return server

    def handle(self, sender: Any, message: Any, payload: memoryview | None) -> None:
        self.incoming.handle_message(sender, message, payload)

    def send(self, identity: bytes, message: Any, payload: Any = None) -> bool:
        return self.server.send(identity, message, payload)

    def report_misbehaviour(self, peer_id: str, reason: str) -> None:
        raise AssertionError(reason)

    async def restart(self) -> None:
        """Kill the server's socket and listen on the same port again."""
        port = self.server.port
        await self.server.close()
        net = self.net
        self.server = Server(net.context, net.keys, data_codec(), net.authenticator, self.handle)
        for _ in range(1000):
            try:
                self.server.bind("127.0.0.1", (port, port + 1))
            except PortInUse:
                await asyncio.sleep(0.005)
            else:
                return
        raise AssertionError("the port stays in use")

    async def close(self) -> None:
        self.outgoing.close()
        await self.dialer.close()
        self.incoming.close()
        await self.server.close()


async def test_a_link_survives_broken_connections(net: Any) -> None:
    pair = Pair(net)
    pair.outgoing.start()
    sent: list[tuple[Any, bytes | None]] = []
    for turn in range(3):
        for step in range(12):
            seq = turn * 100 + step
            header, data = volume(seq, 700 if step % 3 else 3, prefill=step % 3 > 0)
            sent.append((header, data))
            pair.outgoing.send_volume(header, data)
            if step == 6 and turn:
                await pair.restart()
        sent.append((Tombstone(turn * 100 + 50), None))
        pair.outgoing.send_control(Tombstone(turn * 100 + 50))
        await net.until(lambda: len(pair.arrivals) == len(sent))
    by_seq = sorted(pair.arrivals, key=lambda arrival: arrival.body.seq)  # type: ignore[union-attr]
    for arrival, (body, data) in zip(by_seq, sent, strict=True):
        assert arrival.body == body
        assert arrival.payload == data
    await net.until(lambda: not pair.outgoing.stats.unacknowledged_bytes)
    assert pair.outgoing.stats.connects >= 6
    assert pair.deaths == []


async def test_a_link_survives_its_clients_reconnects(net: Any) -> None:
    """Old connections live on, but messages that still arrive on them don't count."""
    pair = Pair(net)
    pair.outgoing.start()
    await net.until(lambda: pair.outgoing.stats.rtt > 0)
    sent = {seq: volume(seq, 700, prefill=seq % 3 > 0) for seq in range(30)}
    for seq, (header, data) in sent.items():
        pair.outgoing.send_volume(header, data)
        if seq % 10 == 5:
            for client in pair.dialer.clients:
                client.reconnect_now()
            await net.until(lambda seq=seq: len(pair.arrivals) > seq)
    await net.until(lambda: len(pair.arrivals) == len(sent))
    for arrival in pair.arrivals:
        assert isinstance(arrival.body, Volume)
        assert (arrival.body, arrival.payload) == sent[arrival.body.seq]
    await net.until(lambda: not pair.outgoing.stats.unacknowledged_bytes)
    assert pair.outgoing.stats.connects >= 4
    assert pair.deaths == []


@pytest.mark.parametrize("policy", POLICIES)
async def test_volumes_in_fragments_over_broken_connections(net: Any, policy: str) -> None:
    """Connections break between a volume's fragments; rows are sent as they are computed."""
    pair = Pair(net, policy, cut_through=True)
    pair.outgoing.start()
    sent = {seq: volume(seq, 2000, prefill=seq % 3 > 0) for seq in range(6)}
    row = HIDDEN * 2
    for header, data in sent.values():
        pair.outgoing.send_volume(header, memoryview(data)[: 500 * row])
    await net.until(lambda: rows_of(pair, 1) == 500)
    for first in (500, 1000, 1500):
        for seq, (_, data) in sent.items():
            pair.outgoing.send_more_rows(seq, memoryview(data)[first * row : (first + 500) * row])
            if seq == 2:
                await pair.restart()
        await net.until(lambda first=first: rows_of(pair, 5) == first + 500)
    await net.until(lambda: all(rows_of(pair, seq) == 2000 for seq in sent))
    begun = [arrival for arrival in pair.arrivals if isinstance(arrival.body, Volume)]
    assert len(begun) == len(sent)
    for arrival in begun:
        assert isinstance(arrival.body, Volume)
        assert (arrival.body, arrival.payload) == sent[arrival.body.seq]
    await net.until(lambda: not pair.outgoing.stats.unacknowledged_bytes)
    assert pair.deaths == []


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_recorded_run_decides_the_same_again(net: Any, policy: str) -> None:
    lines: list[bytes] = []
    pair = Pair(net, RecordingPolicy(create_policy(policy), lines.append))
    pair.outgoing.start()
    sent = {seq: volume(seq, 1000, prefill=seq % 2 > 0) for seq in range(12)}
    for seq, (header, data) in sent.items():
        pair.outgoing.handle_event(DecodeStartedEvent(4, 0.001))
        pair.outgoing.send_volume(header, memoryview(data)[: 2 * HIDDEN])
        pair.outgoing.handle_event(DecodeFinishedEvent(4, 0.002 if seq % 3 else None))
        pair.outgoing.send_more_rows(seq, memoryview(data)[2 * HIDDEN :])
        if seq == 7:
            await net.until(lambda: pair.arrivals)
            await pair.restart()
    await net.until(lambda: len(pair.arrivals) == len(sent))
    await net.until(lambda: not pair.outgoing.stats.unacknowledged_bytes)
    assert replay_recording(lines) == []
    told = {msgspec.json.decode(line).get("event") for line in lines}
    assert {
        "RowsProducedEvent",
        "DecodeStartedEvent",
        "DecodeFinishedEvent",
        "MessageSentEvent",
        "MessageAcknowledgedEvent",
    } <= told
    assert sum(b'"send"' in line for line in lines) >= len(sent)


def rows_of(pair: Pair, seq: int) -> int:
    """The number of rows of a volume that have been reported."""
    bodies = (Volume, VolumeFragment)
    return max(
        (
            arrival.rows
            for arrival in pair.arrivals
            if isinstance(arrival.body, bodies) and arrival.body.seq == seq
        ),
        default=0,
    )


async def test_the_next_stage_may_come_late(net: Any) -> None:
    pair = Pair(net)
    pair.incoming._receiver.epoch = 0
    pair.outgoing.start()
    pair.outgoing.send_control(Tombstone(1))
    await net.until(lambda: pair.incoming.stats.foreign_hellos >= 3)
    pair.incoming._receiver.epoch = 1
    await net.until(lambda: pair.arrivals)
    await net.until(lambda: pair.outgoing.stats.rtt > 0)
    assert 0 < pair.outgoing.stats.min_rtt < 5.0


@pytest.mark.parametrize("prefill", [True, False])
async def test_a_large_volume_comes_whole(net: Any, prefill: bool) -> None:
    pair = Pair(net)
    pair.outgoing.start()
    header, data = volume(5, 40_000, prefill)
    pair.outgoing.send_volume(header, data)
    await net.until(lambda: pair.arrivals)
    assert pair.arrivals[0].body == header
    assert pair.arrivals[0].payload == data
    await net.until(lambda: not pair.outgoing.stats.unacknowledged_bytes)
    assert pair.outgoing.stats.resent == 0
