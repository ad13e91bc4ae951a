import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from molink.link.heartbeat import StageProgress
from molink.link.receiver import Arrival, LinkReceiver
from molink.wire.messages.base import Payload
from molink.wire.messages.data import (
    Ack,
    Beat,
    Cancel,
    Frame,
    Lane,
    LinkHello,
    Release,
    Tombstone,
    VolumePart,
)
from molink.wire.sockets.server import Sender
from molinkd.worker.inlink import InLink

Virtually = Callable[[Coroutine[Any, Any, Any]], Any]

BEFORE = Sender(b"\0one", "previous")


class FakeServer:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.offences: list[tuple[str, str]] = []

    def send(self, identity: bytes, message: Any, payload: Any = None) -> bool:
        self.sent.append((identity, message))
        return True

    def offend(self, user_id: str, reason: str) -> None:
        self.offences.append((user_id, reason))


class Bench:
    """An InLink of stage 3 in epoch 7, fed by hand."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.arrivals: list[Arrival] = []
        self.receiver = LinkReceiver(7, 2, "f32")
        self.link = InLink(
            self.server,
            self.receiver,
            "p",
            2,
            "previous",
            lambda: StageProgress(completed=11, queued=2, busy=True),
            self.arrivals.append,
        )

    def hello(self, sender: Sender = BEFORE, **fields: Any) -> None:
        values = {"pipeline": "p", "epoch": 7, "from_stage": 2, "lane": Lane.DECODE} | fields
        assert self.link.handle(sender, LinkHello(**values), None)

    def frame(self, seq: int, sender: Sender = BEFORE, **fields: Any) -> None:
        values = {"epoch": 7, "lane": Lane.DECODE, "body": Tombstone(seq)} | fields
        payload = fields.pop("data", None)
        values.pop("data", None)
        assert self.link.handle(sender, Frame(seq=seq, **values), payload)


@pytest.fixture
def scene(virtually: Virtually) -> Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], None]:
    def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            bench = Bench()
            await test(bench)
            bench.link.close()

        virtually(whole())

    return run


def test_a_hello_is_answered_with_what_has_arrived(scene: Any) -> None:
    async def test(bench: Bench) -> None:
        bench.hello()
        bench.frame(0)
        bench.frame(1)
        again = Sender(b"\0two", "previous")
        bench.hello(again)
        assert bench.server.sent == [
            (b"\0one", Ack(7, Lane.DECODE, 0)),
            (b"\0two", Ack(7, Lane.DECODE, 2)),
        ]
        bench.frame(2)
        assert bench.link.stats.unbound == 1
        bench.frame(2, again)
        assert [arrival.body for arrival in bench.arrivals] == [Tombstone(n) for n in range(3)]

    scene(test)


@pytest.mark.parametrize(
    ("fields", "user", "offences"),
    [
        ({"pipeline": "q"}, "previous", 0),
        ({"epoch": 6}, "previous", 0),
        ({"epoch": 8}, "previous", 0),
        ({"from_stage": 1}, "previous", 0),
        ({"epoch": 6}, "other", 0),
        ({}, "other", 1),
    ],
)
def test_only_the_previous_stage_may_send(
    scene: Any, fields: dict[str, Any], user: str, offences: int
) -> None:
    async def test(bench: Bench) -> None:
        sender = Sender(b"\0one", user)
        bench.hello(sender, **fields)
        bench.frame(0, sender)
        assert bench.link.handle(sender, Beat(7, 0, 0, 0.0), None)
        assert bench.server.sent == []
        assert bench.arrivals == []
        assert (bench.link.stats.strangers, bench.link.stats.unbound) == (1, 2)
        assert len(bench.server.offences) == offences

    scene(test)


def test_acknowledgements_wait_a_little(scene: Any) -> None:
    async def test(bench: Bench) -> None:
        bench.hello()
        bulk = Sender(b"\0bulk", "previous")
        bench.hello(bulk, lane=Lane.BULK)
        bench.server.sent.clear()
        bench.frame(0)
        bench.frame(1)
        assert bench.server.sent == []
        await asyncio.sleep(0.01)
        assert bench.server.sent == [(b"\0one", Ack(7, Lane.DECODE, 2))]
        bench.frame(0, bulk, lane=Lane.BULK)
        assert bench.server.sent[1:] == [(b"\0bulk", Ack(7, Lane.BULK, 1))]
        for seq in range(2, 10):
            bench.frame(seq)
        assert bench.server.sent[2:] == [(b"\0one", Ack(7, Lane.DECODE, 10))]

    scene(test)


def test_beats_are_answered_with_our_progress(scene: Any) -> None:
    async def test(bench: Bench) -> None:
        bench.hello()
        await asyncio.sleep(1.5)
        beat = Beat(7, completed=4, queued=0, sent_at=123.5)
        assert bench.link.handle(BEFORE, beat, None)
        assert bench.server.sent[-1] == (b"\0one", Beat(7, 11, 2, sent_at=1.5, echo=123.5))
        assert bench.link.beat == beat

    scene(test)


def test_garbage_of_the_previous_stage_is_reported(scene: Any) -> None:
    async def test(bench: Bench) -> None:
        bench.hello()
        part = VolumePart(1, 0, Payload("f32", (1, 2)))
        bench.frame(0, body=part, data=memoryview(bytes(8)))
        bench.frame(0, lane=Lane.BULK)
        bench.frame(1, body=Release(1, 1, 0))
        assert [user for user, _ in bench.server.offences] == ["previous", "previous"]
        assert "never began" in bench.server.offences[0][1]
        assert len(bench.arrivals) == 1

    scene(test)


def test_other_messages_are_for_others(scene: Any) -> None:
    async def test(bench: Bench) -> None:
        assert not bench.link.handle(BEFORE, Cancel("k"), None)

    scene(test)
