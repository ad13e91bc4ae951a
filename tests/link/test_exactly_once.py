"""A LinkSender and a LinkReceiver over channels that break, lose and replay."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from molink.link.policies.base import (
    DecodeFinishedEvent,
    DecodeStartedEvent,
    LinkEstimatedEvent,
    LinkEvent,
)
from molink.link.policies.create import POLICIES, create_policy
from molink.link.receiver import Arrival, LinkReceiver, ReceiverLimits
from molink.link.send_window import Packet
from molink.link.sender import BOTH_CHANNELS, LinkSender, SenderLimits
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.data_plane import (
    Ack,
    Channel,
    Release,
    RequestSlice,
    Tombstone,
    Volume,
    VolumeFragment,
)

HIDDEN, DTYPE, ROW = 8, "f32", 32
LIMITS = SenderLimits(
    max_message_bytes=3 * ROW,
    max_unacknowledged_bytes=2000,
    max_total_bytes=20_000,
    resend_after=10.0,
)
SECONDS = st.sampled_from([0.001, 0.03, 0.5])
EVENTS = st.one_of(
    st.builds(DecodeStartedEvent, st.integers(1, 8), SECONDS),
    st.builds(DecodeFinishedEvent, st.integers(1, 8), st.none() | SECONDS),
    st.builds(LinkEstimatedEvent, SECONDS, SECONDS, st.none() | st.sampled_from([1e3, 1e6, 1e9])),
)


def volume(seq: int, rows: int, prefill: bool) -> tuple[Volume, bytes]:
    data = np.random.default_rng(seq).bytes(rows * ROW)
    header = Volume(seq, prefill, (RequestSlice(1, 0, rows, 0),), Payload(DTYPE, (rows, HIDDEN)))
    return header, data


@dataclass
class Wire:
    """A channel's connection: frames in flight to the receiver, and acknowledgements back."""

    up: bool = False
    frames: list[Packet] = field(default_factory=list)
    acks: list[Ack] = field(default_factory=list)
    old: list[Packet] = field(default_factory=list)


class Link(RuleBasedStateMachine):
    """Both ends of one link, and all events between them."""

    def __init__(self, policy: str, cut_through: bool) -> None:
        super().__init__()
        self.now = 0.0
        self.seq = 0
        self.epoch = 3
        self.codec = data_codec()
        self.policy = create_policy(policy)
        self.cut_through = cut_through
        self.wires = {channel: Wire() for channel in Channel}
        self.sender = LinkSender(self.epoch, self.policy, LIMITS)
        limits = ReceiverLimits(ack_every=3)
        self.receiver = LinkReceiver(self.epoch, HIDDEN, "f32", limits, cut_through)
        #: All volumes with their rows, by seq, and the number of rows handed over.
        self.volumes: dict[int, tuple[Volume, bytes]] = {}
        self.given: dict[int, int] = {}
        #: Received buffers, with the number of valid rows.
        self.buffers: dict[int, bytearray] = {}
        self.rows: dict[int, int] = {}
        self.controls: list[Any] = []
        self.came: list[Any] = []
        for channel in Channel:
            self.connect_if_down(channel)

    # --- actions of the stages

    @rule(rows=st.integers(1, 20), prefill=st.booleans(), first=st.integers(1, 40))
    def produce(self, rows: int, prefill: bool, first: int) -> None:
        if self.sender.is_full:
            return
        self.seq += 1
        header, data = volume(self.seq, rows, prefill)
        first = min(first, rows)
        self.volumes[self.seq] = header, data
        self.given[self.seq] = first
        self.sender.queue_volume(header, memoryview(data)[: first * ROW], self.now)

    @rule(pick=st.integers(0, 1000), count=st.integers(1, 20))
    def more(self, pick: int, count: int) -> None:
        lacking = [seq for seq, given in self.given.items() if given < self.total(seq)]
        if lacking:
            self.hand_over(lacking[pick % len(lacking)], count)

    def hand_over(self, seq: int, count: int) -> None:
        first = self.given[seq]
        self.given[seq] = min(first + count, self.total(seq))
        rows = memoryview(self.volumes[seq][1])[first * ROW : self.given[seq] * ROW]
        self.sender.queue_rows(seq, rows, self.now)

    def total(self, seq: int) -> int:
        return self.volumes[seq][0].payload.shape[0]

    @rule()
    def release(self) -> None:
        self.seq += 1
        body = Release(self.seq, 1, 0)
        self.sender.queue_control(body)
        self.controls.append(body)

    @rule(event=EVENTS)
    def executor(self, event: LinkEvent) -> None:
        self.sender.handle(event, self.now)

    # --- actions of the event loops

    @rule(ready=st.sampled_from([BOTH_CHANNELS, (Channel.DECODE,), (Channel.BULK,), ()]))
    def poll(self, ready: Any) -> None:
        for out in self.sender.poll_packets(self.now, ready):
            wire = self.wires[out.channel]
            assert wire.up
            frames = self.codec.encode(out.frame, out.payload)
            assert sum(memoryview(frame).nbytes for frame in frames) < 256_000
            wire.frames.append(out)

    @rule(seconds=st.sampled_from([0.001, 0.01, 1.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def acknowledge(self) -> None:
        for ack in self.receiver.due_acks(self.now):
            if self.wires[ack.channel].up:
                self.wires[ack.channel].acks.append(ack)

    @rule()
    def exchange(self) -> None:
        """All messages arrive and are acknowledged."""
        self.poll(BOTH_CHANNELS)
        for channel in Channel:
            self.deliver(channel, 100)
        self.now += 0.01
        self.acknowledge()

    # --- events of the network

    def arrive(self, out: Packet) -> None:
        payload = None if out.payload is None else memoryview(bytes(out.payload))
        for arrival in self.receiver.on_frame(out.frame, payload, self.now):
            match arrival.body:
                case Volume():
                    self.began(out.channel, arrival.body, arrival)
                case VolumeFragment(seq=seq):
                    assert self.cut_through
                    assert arrival.payload is None
                    assert arrival.rows > self.rows[seq]
                    self.rows[seq] = arrival.rows
                case other:
                    assert out.channel is Channel.DECODE
                    self.came.append(other)

    def began(self, channel: Channel, header: Volume, arrival: Arrival) -> None:
        assert header.seq not in self.buffers
        assert header == self.volumes[header.seq][0]
        assert channel is (
            Channel.BULK if header.prefill or self.policy.single_channel else Channel.DECODE
        )
        assert arrival.payload is not None
        if not (self.cut_through and header.prefill):
            assert arrival.rows == self.total(header.seq)
        self.buffers[header.seq] = arrival.payload
        self.rows[header.seq] = arrival.rows

    @rule(channel=st.sampled_from(Channel), count=st.integers(1, 10))
    def deliver(self, channel: Channel, count: int) -> None:
        wire = self.wires[channel]
        for _ in range(min(count, len(wire.frames))):
            out = wire.frames.pop(0)
            wire.old.append(out)
            self.arrive(out)
        while wire.acks:
            self.sender.on_ack(wire.acks.pop(0), self.now)

    @rule(channel=st.sampled_from(Channel), pick=st.integers(0, 1000))
    def replay(self, channel: Channel, pick: int) -> None:
        wire = self.wires[channel]
        if wire.old:
            self.arrive(wire.old[pick % len(wire.old)])

    @rule(channel=st.sampled_from(Channel), pick=st.integers(0, 1000))
    def lose(self, channel: Channel, pick: int) -> None:
        """A frame is lost, although its connection continues."""
        frames = self.wires[channel].frames
        if frames:
            frames.pop(pick % len(frames))

    @rule(channel=st.sampled_from(Channel), seq=st.integers(1, 20))
    def old_epoch(self, channel: Channel, seq: int) -> None:
        """Messages of the previous epoch, some with seqs that are used again, are ignored."""
        other = LinkSender(self.epoch - 1, create_policy("fifo"), LIMITS)
        for each in Channel:
            other.on_connected(each, 0.0)
        other.queue_control(Tombstone(seq))
        other.queue_volume(*volume(seq, 5, prefill=True), 0.0)
        before = self.receiver.counters.old_epochs
        frames = other.poll_packets(0.0)
        for out in frames:
            self.arrive(out)
        assert self.receiver.counters.old_epochs == before + len(frames) == before + 3
        self.sender.on_ack(Ack(self.epoch - 1, channel, 1), self.now)

    @rule(channel=st.sampled_from(Channel), keep=st.integers(0, 5))
    def break_off(self, channel: Channel, keep: int) -> None:
        """The connection breaks; a few of the frames in flight still arrive."""
        wire = self.wires[channel]
        wire.up = False
        self.sender.on_disconnected(channel, self.now)
        for out in wire.frames[:keep]:
            self.arrive(out)
        wire.frames.clear()
        wire.acks.clear()

    @rule(channel=st.sampled_from(Channel), told=st.booleans())
    def connect(self, channel: Channel, told: bool) -> None:
        wire = self.wires[channel]
        if wire.up:
            return
        wire.up = True
        if told:
            self.sender.on_ack(self.receiver.make_ack(channel), self.now)
        self.sender.on_connected(channel, self.now)

    # --- invariants

    @invariant()
    def valid(self) -> None:
        self.sender.validate()
        self.receiver.validate()
        assert self.receiver.counters.garbage == 0
        assert self.sender.unacknowledged_bytes <= 2 * (LIMITS.max_unacknowledged_bytes + 1000)
        assert self.came == self.controls[: len(self.came)]
        for seq, buffer in self.buffers.items():
            nbytes = self.rows[seq] * ROW
            assert buffer[:nbytes] == self.volumes[seq][1][:nbytes]
            assert len(buffer) == self.total(seq) * ROW

    def teardown(self) -> None:
        """After the last break everything has arrived exactly once."""
        for seq in self.given:
            if self.given[seq] < self.total(seq):
                self.hand_over(seq, 99)
        for _ in range(2000):
            if not self.unfinished():
                break
            for channel in Channel:
                self.connect_if_down(channel)
            self.now += 3.0
            self.poll(BOTH_CHANNELS)
            self.acknowledge()
            for channel in Channel:
                self.deliver(channel, 100)
        self.valid()
        assert self.came == self.controls
        assert self.rows == {seq: self.total(seq) for seq in self.volumes}
        assert self.receiver.counters.volumes == len(self.volumes)
        assert self.sender.queued_bytes == self.receiver.unfinished_bytes == 0
        assert not self.sender.is_full

    def unfinished(self) -> bool:
        return bool(self.sender.queued_bytes or self.sender.unacknowledged_bytes)

    def connect_if_down(self, channel: Channel) -> None:
        if not self.wires[channel].up:
            self.wires[channel].up = True
            self.sender.on_connected(channel, self.now)


@pytest.mark.parametrize("cut_through", [False, True], ids=["whole", "cut-through"])
@pytest.mark.parametrize("policy", POLICIES)
def test_delivery_is_exactly_once_and_in_order(policy: str, cut_through: bool) -> None:
    run_state_machine_as_test(
        lambda: Link(policy, cut_through),
        settings=settings(
            max_examples=25,
            stateful_step_count=50,
            deadline=None,
            # Shrinking so long a sequence takes minutes.
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
        ),
    )


@settings(max_examples=100, deadline=None)
@given(
    fragments=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8),
    message=st.integers(1, 5),
)
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_reported_in_order_as_they_arrive(
    policy: str, fragments: list[tuple[int, int]], message: int
) -> None:
    """Volumes with cut-through, each handed over in two sub-chunks, over channels that work."""
    limits = SenderLimits(max_message_bytes=message * ROW)
    sender = LinkSender(1, create_policy(policy), limits)
    receiver = LinkReceiver(1, HIDDEN, DTYPE, cut_through=True)
    for channel in Channel:
        sender.on_connected(channel, 0.0)
    now, seen = 0.0, dict.fromkeys(range(len(fragments)), 0)

    def exchange() -> None:
        nonlocal now
        for _ in range(50):
            now += 1.0
            for out in sender.poll_packets(now):
                for arrival in receiver.on_frame(out.frame, memoryview(out.payload or b""), now):
                    body = arrival.body
                    assert isinstance(body, Volume | VolumeFragment)
                    assert (arrival.payload is None) is (body.seq in seen and seen[body.seq] > 0)
                    assert 0 < arrival.rows - seen[body.seq] <= message
                    seen[body.seq] = arrival.rows
            for ack in receiver.due_acks(now):
                sender.on_ack(ack, now)

    whole = [volume(seq, sum(rows), prefill=True) for seq, rows in enumerate(fragments)]
    for (first, _), (header, data) in zip(fragments, whole, strict=True):
        sender.queue_volume(header, data[: first * ROW], now)
    exchange()
    assert list(seen.values()) == [first for first, _ in fragments]
    assert receiver.num_unfinished == len(fragments)
    for (first, _), (header, data) in zip(fragments, whole, strict=True):
        sender.queue_rows(header.seq, data[first * ROW :], now)
    exchange()
    assert list(seen.values()) == [sum(each) for each in fragments]
    assert receiver.num_unfinished == receiver.unfinished_bytes == 0


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 4000), hidden=st.sampled_from([1, 7, 64, 4096]), prefill=st.booleans())
def test_messages_stay_within_their_bound(rows: int, hidden: int, prefill: bool) -> None:
    rows = min(rows, 4 << 20 // (hidden * 2))
    sender = LinkSender(1, create_policy("fifo"))
    header = Volume(1, prefill, (RequestSlice(1, 0, rows, 0),), Payload("bf16", (rows, hidden)))
    data = np.random.default_rng(rows).bytes(rows * hidden * 2)
    sender.queue_volume(header, data, 0.0)
    for channel in Channel:
        sender.on_connected(channel, 0.0)
    receiver = LinkReceiver(1, hidden, "bf16")
    codec = data_codec()
    arrivals = []
    while batch := sender.poll_packets(0.0):
        for out in batch:
            frames = codec.encode(out.frame, out.payload)
            assert sum(memoryview(frame).nbytes for frame in frames) <= 256_000
            message, payload = codec.decode([bytes(frame) for frame in frames])
            arrivals += receiver.on_frame(message, payload, 0.0)
        for ack in receiver.due_acks(1.0):
            sender.on_ack(ack, 1.0)
    assert [(arrival.body, bytes(arrival.payload or b"")) for arrival in arrivals] == [
        (header, data)
    ]
