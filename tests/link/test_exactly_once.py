"""A LinkSender and a LinkReceiver over lanes that break, lose and replay."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from molink.link.create import create_policy
from molink.link.lane import Outgoing
from molink.link.receiver import LinkReceiver, ReceiverLimits
from molink.link.sender import BOTH_LANES, LinkSender, SenderLimits
from molink.wire.base import Payload
from molink.wire.codec import data_codec
from molink.wire.data import Ack, Lane, Release, Rows, Tombstone, Volume

HIDDEN, DTYPE, ROW = 8, "f32", 32
LIMITS = SenderLimits(message=3 * ROW, window=2000, total=20_000, resend_after=10.0)


def volume(tick: int, rows: int, prefill: bool) -> tuple[Volume, bytes]:
    data = np.random.default_rng(tick).bytes(rows * ROW)
    header = Volume(tick, prefill, (Rows(1, 0, rows, 0),), Payload(DTYPE, (rows, HIDDEN)))
    return header, data


@dataclass
class Wire:
    """A lane's connection: frames under way to the receiver, acknowledgements on the way back."""

    up: bool = False
    frames: list[Outgoing] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    old: list[Outgoing] = field(default_factory=list)


class Link(RuleBasedStateMachine):
    """Both ends of one link, and everything that can happen between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tick = 0
        self.epoch = 3
        self.codec = data_codec()
        self.wires = {lane: Wire() for lane in Lane}
        self.sender = LinkSender(self.epoch, create_policy("fifo"), LIMITS)
        self.receiver = LinkReceiver(self.epoch, HIDDEN, "f32", ReceiverLimits(ack_every=3))
        self.sent: dict[Lane, list[tuple[Any, bytes | None]]] = {lane: [] for lane in Lane}
        self.came: dict[Lane, list[tuple[Any, bytes | None]]] = {lane: [] for lane in Lane}
        for lane in Lane:
            self.connect_if_down(lane)

    # --- what the stage does

    @rule(rows=st.integers(1, 20), prefill=st.booleans())
    def produce(self, rows: int, prefill: bool) -> None:
        if self.sender.full:
            return
        self.tick += 1
        header, data = volume(self.tick, rows, prefill)
        self.sender.volume(header, data, self.now)
        self.sent[Lane.BULK if prefill else Lane.DECODE].append((header, data))

    @rule()
    def release(self) -> None:
        self.tick += 1
        body = Release(self.tick, 1, 0)
        self.sender.control(body)
        self.sent[Lane.DECODE].append((body, None))

    # --- what the shells do

    @rule(ready=st.sampled_from([BOTH_LANES, (Lane.DECODE,), (Lane.BULK,), ()]))
    def poll(self, ready: Any) -> None:
        for out in self.sender.poll(self.now, ready):
            wire = self.wires[out.lane]
            assert wire.up
            frames = self.codec.encode(out.message, out.payload)
            assert sum(memoryview(frame).nbytes for frame in frames) < 256_000
            wire.frames.append(out)

    @rule(seconds=st.sampled_from([0.001, 0.01, 1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def acknowledge(self) -> None:
        for ack in self.receiver.acks(self.now):
            if self.wires[ack.lane].up:
                self.wires[ack.lane].acks.append(ack)

    @rule()
    def exchange(self) -> None:
        """An undisturbed moment."""
        self.poll(BOTH_LANES)
        for lane in Lane:
            self.deliver(lane, 100)
        self.now += 0.01
        self.acknowledge()

    # --- what the network does

    def arrive(self, out: Outgoing) -> None:
        payload = None if out.payload is None else memoryview(bytes(out.payload))
        for arrival in self.receiver.frame(out.message, payload, self.now):
            data = None if arrival.payload is None else bytes(arrival.payload)
            self.came[out.lane].append((arrival.body, data))

    @rule(lane=st.sampled_from(Lane), count=st.integers(1, 10))
    def deliver(self, lane: Lane, count: int) -> None:
        wire = self.wires[lane]
        for _ in range(min(count, len(wire.frames))):
            out = wire.frames.pop(0)
            wire.old.append(out)
            self.arrive(out)
        while wire.acks:
            self.sender.ack(wire.acks.pop(0), self.now)

    @rule(lane=st.sampled_from(Lane), pick=st.integers(0, 1000))
    def replay(self, lane: Lane, pick: int) -> None:
        wire = self.wires[lane]
        if wire.old:
            self.arrive(wire.old[pick % len(wire.old)])

    @rule(lane=st.sampled_from(Lane), pick=st.integers(0, 1000))
    def lose(self, lane: Lane, pick: int) -> None:
        """A frame vanishes on a connection that goes on."""
        frames = self.wires[lane].frames
        if frames:
            frames.pop(pick % len(frames))

    @rule(lane=st.sampled_from(Lane))
    def old_epoch(self, lane: Lane) -> None:
        other = LinkSender(self.epoch - 1, create_policy("fifo"))
        other.reconnected(Lane.DECODE, 0.0)
        other.control(Tombstone(99))
        before = self.receiver.counters.old_epochs
        self.arrive(other.poll(0.0)[0])
        assert self.receiver.counters.old_epochs == before + 1
        self.sender.ack(Ack(self.epoch - 1, lane, 1), self.now)

    @rule(lane=st.sampled_from(Lane), keep=st.integers(0, 5))
    def break_off(self, lane: Lane, keep: int) -> None:
        """The connection breaks; a few of the frames under way still arrive."""
        wire = self.wires[lane]
        wire.up = False
        self.sender.disconnected(lane, self.now)
        for out in wire.frames[:keep]:
            self.arrive(out)
        wire.frames.clear()
        wire.acks.clear()

    @rule(lane=st.sampled_from(Lane), told=st.booleans())
    def connect(self, lane: Lane, told: bool) -> None:
        wire = self.wires[lane]
        if wire.up:
            return
        wire.up = True
        if told:
            self.sender.ack(self.receiver.ack(lane), self.now)
        self.sender.reconnected(lane, self.now)

    # --- what has to hold

    @invariant()
    def valid(self) -> None:
        self.sender.validate()
        self.receiver.validate()
        assert self.receiver.counters.garbage == 0
        assert self.sender.unacknowledged_bytes <= 2 * (LIMITS.window + 1000)
        for lane in Lane:
            assert self.came[lane] == in_order(self.sent[lane], len(self.came[lane]), lane, self)

    def teardown(self) -> None:
        """Once nothing breaks any more, everything has come, exactly once."""
        for _ in range(2000):
            if not self.unfinished():
                break
            for lane in Lane:
                self.connect_if_down(lane)
            self.now += 3.0
            self.poll(BOTH_LANES)
            self.acknowledge()
            for lane in Lane:
                self.deliver(lane, 100)
        for lane in Lane:
            assert sorted(self.sent[lane], key=tick) == sorted(self.came[lane], key=tick)
        assert self.sender.queued_bytes == self.receiver._assembly.nbytes == 0
        assert not self.sender.full

    def unfinished(self) -> bool:
        return any(len(self.sent[lane]) > len(self.came[lane]) for lane in Lane) or bool(
            self.sender.unacknowledged_bytes
        )

    def connect_if_down(self, lane: Lane) -> None:
        if not self.wires[lane].up:
            self.wires[lane].up = True
            self.sender.reconnected(lane, self.now)


def tick(pair: tuple[Any, bytes | None]) -> int:
    number: int = pair[0].tick
    return number


def in_order(sent: list[Any], count: int, lane: Lane, link: Link) -> list[Any]:
    """What must have come on a lane, given that ``count`` messages have.

    Volumes come in the order of their production and so do control messages, but control goes
    before volumes that wait.
    """
    came = link.came[lane]
    volumes = [pair for pair in sent if isinstance(pair[0], Volume)]
    others = [pair for pair in sent if not isinstance(pair[0], Volume)]
    first = sum(isinstance(body, Volume) for body, _ in came)
    expected_volumes = iter(volumes[:first])
    expected_others = iter(others[: count - first])
    return [
        next(expected_volumes if isinstance(body, Volume) else expected_others) for body, _ in came
    ]


TestLink = Link.TestCase
TestLink.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    # Shrinking so long a story takes minutes.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 4000), hidden=st.sampled_from([1, 7, 64, 4096]), prefill=st.booleans())
def test_no_message_is_over_the_bound(rows: int, hidden: int, prefill: bool) -> None:
    rows = min(rows, 4 << 20 // (hidden * 2))
    sender = LinkSender(1, create_policy("fifo"))
    header = Volume(1, prefill, (Rows(1, 0, rows, 0),), Payload("bf16", (rows, hidden)))
    data = np.random.default_rng(rows).bytes(rows * hidden * 2)
    sender.volume(header, data, 0.0)
    for lane in Lane:
        sender.reconnected(lane, 0.0)
    receiver = LinkReceiver(1, hidden, "bf16")
    codec = data_codec()
    arrivals = []
    while batch := sender.poll(0.0):
        for out in batch:
            frames = codec.encode(out.message, out.payload)
            assert sum(memoryview(frame).nbytes for frame in frames) <= 256_000
            message, payload = codec.decode([bytes(frame) for frame in frames])
            arrivals += receiver.frame(message, payload, 0.0)
        for ack in receiver.acks(1.0):
            sender.ack(ack, 1.0)
    assert [(arrival.body, bytes(arrival.payload or b"")) for arrival in arrivals] == [
        (header, data)
    ]
