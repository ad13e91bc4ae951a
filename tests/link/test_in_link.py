"""The receiving end of a link, with the test as its sender, in virtual time."""

from dataclasses import dataclass
from typing import Any

import pytest

from molink.link.base import LinkName
from molink.link.heartbeat import StageProgress
from molink.link.in_link import InLink, InLinkEvents
from molink.link.receiver import Arrival, LinkReceiver
from molink.sim.event_queue import EventQueue
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Ack,
    Channel,
    Frame,
    Heartbeat,
    LinkHello,
    Release,
    Tombstone,
    VolumeFragment,
)
from molink.wire.messages.serving import Cancel


@dataclass(frozen=True)
class Sender:
    """A connection, and the peer that it authenticated as."""

    identity: bytes
    peer_id: str


BEFORE = Sender(b"\0one", "previous")


class FakeServer:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.lost: set[bytes] = set()
        self.violations: list[tuple[str, str]] = []

    def send(self, identity: bytes, message: Any, payload: Any = None) -> bool:
        self.sent.append((identity, message))
        return identity not in self.lost

    def report_misbehaviour(self, peer_id: str, reason: str) -> None:
        self.violations.append((peer_id, reason))


class Bench:
    """An InLink of stage 3 in epoch 7, with the test as its sender."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.arrivals: list[Arrival] = []
        self.receiver = LinkReceiver(7, 2, "f32")
        events = InLinkEvents(
            lambda: StageProgress(completed_seq=11, num_queued=2, has_requests=True),
            self.arrivals.append,
        )
        self.queue = EventQueue()
        name = LinkName("p", 2)
        self.link = InLink(self.queue, self.server, self.receiver, name, "previous", events)

    def wait(self, seconds: float) -> None:
        """Let that much time pass."""
        until = self.queue.now + seconds
        self.queue.schedule_at(until, lambda: None)
        self.queue.run(until)

    def hello(self, sender: Sender = BEFORE, **fields: Any) -> None:
        values = {"pipeline": "p", "epoch": 7, "from_stage": 2, "channel": Channel.DECODE} | fields
        assert self.link.handle_message(sender, LinkHello(**values), None)

    def frame(self, seq: int, sender: Sender = BEFORE, **fields: Any) -> None:
        values = {"epoch": 7, "channel": Channel.DECODE, "body": Tombstone(seq)} | fields
        payload = fields.pop("data", None)
        values.pop("data", None)
        assert self.link.handle_message(sender, Frame(frame_number=seq, **values), payload)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_hello_is_answered_with_what_has_arrived(bench: Bench) -> None:
    bench.hello()
    bench.frame(0)
    bench.frame(1)
    again = Sender(b"\0two", "previous")
    bench.hello(again)
    assert bench.server.sent == [
        (b"\0one", Ack(7, Channel.DECODE, 0)),
        (b"\0two", Ack(7, Channel.DECODE, 2)),
    ]
    bench.frame(2)
    assert bench.link.stats.unbound_messages == 1
    bench.frame(2, again)
    assert [arrival.body for arrival in bench.arrivals] == [Tombstone(n) for n in range(3)]


def test_late_hello_of_an_older_connection_is_ignored(bench: Bench) -> None:
    """The hello of the first connection is read after that of the second one."""
    bench.hello()
    again = Sender(b"\0two", "previous")
    bench.hello(again)
    bench.hello()
    assert [identity for identity, _ in bench.server.sent] == [b"\0one", b"\0two", b"\0two"]
    bench.frame(0, again)
    assert [arrival.body for arrival in bench.arrivals] == [Tombstone(0)]
    # Once the later connection is gone, the earlier one is used again.
    bench.server.lost.add(b"\0two")
    bench.hello()
    bench.frame(1)
    assert [arrival.body for arrival in bench.arrivals] == [Tombstone(0), Tombstone(1)]


@pytest.mark.parametrize(
    ("fields", "user", "violations"),
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
    bench: Bench, fields: dict[str, Any], user: str, violations: int
) -> None:
    sender = Sender(b"\0one", user)
    bench.hello(sender, **fields)
    bench.frame(0, sender)
    assert bench.link.handle_message(sender, Heartbeat(7, 0, 0, 0.0), None)
    assert bench.server.sent == []
    assert bench.arrivals == []
    assert (bench.link.stats.foreign_hellos, bench.link.stats.unbound_messages) == (1, 2)
    assert len(bench.server.violations) == violations


def test_acknowledgements_are_delayed(bench: Bench) -> None:
    bench.hello()
    bulk = Sender(b"\0bulk", "previous")
    bench.hello(bulk, channel=Channel.BULK)
    bench.server.sent.clear()
    bench.frame(0)
    bench.frame(1)
    assert bench.server.sent == []
    bench.wait(0.01)
    assert bench.server.sent == [(b"\0one", Ack(7, Channel.DECODE, 2))]
    bench.frame(0, bulk, channel=Channel.BULK)
    assert bench.server.sent[1:] == [(b"\0bulk", Ack(7, Channel.BULK, 1))]
    for seq in range(2, 10):
        bench.frame(seq)
    assert bench.server.sent[2:] == [(b"\0one", Ack(7, Channel.DECODE, 10))]


def test_heartbeats_are_answered_with_our_progress(bench: Bench) -> None:
    bench.hello()
    bench.wait(1.5)
    heartbeat = Heartbeat(7, completed_seq=4, queued=0, sent_at=123.5)
    assert bench.link.handle_message(BEFORE, heartbeat, None)
    assert bench.server.sent[-1] == (b"\0one", Heartbeat(7, 11, 2, sent_at=1.5, echo=123.5))
    assert bench.link.last_heartbeat == heartbeat


def test_invalid_frames_are_reported_as_misbehaviour(bench: Bench) -> None:
    bench.hello()
    fragment = VolumeFragment(1, 0, Payload("f32", (1, 2)))
    bench.frame(0, body=fragment, data=memoryview(bytes(8)))
    bench.frame(0, channel=Channel.BULK)
    bench.frame(1, body=Release(1, 1, 0))
    assert [user for user, _ in bench.server.violations] == ["previous", "previous"]
    assert "never started" in bench.server.violations[0][1]
    assert len(bench.arrivals) == 1


def test_other_messages_are_not_handled(bench: Bench) -> None:
    assert not bench.link.handle_message(BEFORE, Cancel("k"), None)
