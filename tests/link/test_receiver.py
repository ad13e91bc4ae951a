from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import InvariantError, MessageTooLarge, WireError
from molink.link.policies.baselines import FifoPolicy
from molink.link.receiver import Arrival, LinkReceiver, ReceiverLimits
from molink.link.sender import LinkSender
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import MAX_HEADER, data_codec
from molink.wire.messages.data_plane import (
    Ack,
    Channel,
    Frame,
    History,
    Padding,
    RequestSlice,
    Tombstone,
    Volume,
    VolumeFragment,
)

HIDDEN, ROW = 4, 8  # bf16


def receiver(cut_through: bool = False, **limits: Any) -> LinkReceiver:
    return LinkReceiver(5, HIDDEN, "bf16", ReceiverLimits(**limits), cut_through)


def rows(count: int) -> Payload:
    return Payload("bf16", (count, HIDDEN))


def volume(seq: int, total: int, carried: Payload, prefill: bool = True) -> Volume:
    return Volume(seq, prefill, (RequestSlice(1, 0, total, 0),), carried)


class Feed:
    """Hands bodies to a receiver as the next frames of a channel."""

    def __init__(self, made: LinkReceiver, channel: Channel = Channel.BULK) -> None:
        self.made, self.channel, self.seq = made, channel, 0

    def __call__(self, body: Any, payload: bytes | None = None) -> list[Any]:
        frame = Frame(5, self.channel, self.seq, body)
        self.seq += 1
        return self.made.on_frame(frame, None if payload is None else memoryview(payload), 0.0)


def test_volume_is_assembled_from_fragments() -> None:
    feed = Feed(receiver())
    data = bytes(range(5 * ROW))
    assert feed(volume(1, 5, rows(2)), data[: 2 * ROW]) == []
    assert feed.made._assembly.nbytes == 5 * ROW
    assert feed(VolumeFragment(1, 2, rows(1)), data[2 * ROW : 3 * ROW]) == []
    (arrival,) = feed(VolumeFragment(1, 3, rows(2)), data[3 * ROW :])
    assert arrival.body == volume(1, 5, rows(5))
    assert arrival.payload == data
    assert arrival.rows == 5
    assert feed.made._assembly.nbytes == 0
    assert feed.made.counters.volumes == 1
    feed.made.validate()


def test_unforwardable_header_is_rejected() -> None:
    """Small numbers encode to few bytes; larger ones may exceed the next stage's limit."""
    feed = Feed(receiver(cut_through=True))
    slices = (
        RequestSlice(1, 0, 300, 0, blocks=(70_000,) * 800),
        RequestSlice(2, 0, 1, 0, blocks=(1,) * 26),
    )
    wide = Volume(1, True, slices, rows(1))
    assert len(msgspec.msgpack.encode(Frame(5, Channel.BULK, 0, wide))) < MAX_HEADER
    with pytest.raises(MessageTooLarge):
        LinkSender(5, FifoPolicy()).queue_volume(
            Volume(1, True, slices, rows(301)), bytes(301 * ROW), now=0.0
        )
    assert feed(wide, bytes(ROW)) == []
    assert feed.made.counters.garbage == 1
    assert feed.made.num_unfinished == 0
    feed.made.validate()


def test_fragments_of_two_volumes_may_alternate() -> None:
    feed = Feed(receiver())
    feed(volume(1, 2, rows(1)), bytes(ROW))
    feed(volume(2, 2, rows(1)), b"\1" * ROW)
    assert feed(VolumeFragment(1, 1, rows(1)), bytes(ROW))[0].payload == bytes(2 * ROW)
    assert feed(VolumeFragment(2, 1, rows(1)), b"\1" * ROW)[0].payload == b"\1" * 2 * ROW


def test_cut_through_reports_rows_as_they_arrive() -> None:
    feed = Feed(receiver(cut_through=True))
    data = bytes(range(5 * ROW))
    (first,) = feed(volume(1, 5, rows(2)), data[: 2 * ROW])
    assert first.body == volume(1, 5, rows(5))
    assert (first.rows, len(first.payload)) == (2, 5 * ROW)
    assert first.payload[: 2 * ROW] == data[: 2 * ROW]
    # The stage may use the buffer's first rows while later ones are written.
    with memoryview(first.payload) as held:
        fragment = VolumeFragment(1, 2, rows(1))
        assert feed(fragment, data[2 * ROW : 3 * ROW]) == [Arrival(fragment, None, 3)]
        assert held[: 3 * ROW] == data[: 3 * ROW]
        assert (feed.made.num_unfinished, feed.made.unfinished_bytes) == (1, 5 * ROW)
        assert feed.made.counters.volumes == 0
        last = VolumeFragment(1, 3, rows(2))
        assert feed(last, data[3 * ROW :]) == [Arrival(last, None, 5)]
    assert first.payload == data
    assert (feed.made.num_unfinished, feed.made.unfinished_bytes) == (0, 0)
    assert feed.made.counters.volumes == 1
    feed.made.validate()


def test_cut_through_leaves_other_messages_unchanged() -> None:
    """Volumes in one message, decode rows, and everything else."""
    feed = Feed(receiver(cut_through=True))
    data = bytes(range(3 * ROW))
    assert feed(volume(1, 3, rows(3)), data) == [Arrival(volume(1, 3, rows(3)), bytearray(data), 3)]
    whole = volume(2, 3, rows(3), prefill=False)
    assert feed(volume(2, 3, rows(1), prefill=False), data[:ROW]) == []
    assert feed(VolumeFragment(2, 1, rows(2)), data[ROW:]) == [Arrival(whole, bytearray(data), 3)]
    assert feed(Tombstone(3)) == [Arrival(Tombstone(3), None)]
    assert feed.made.counters.volumes == 2


def test_endless_volumes_are_bounded() -> None:
    feed = Feed(receiver(cut_through=True, assembly_bytes=20 * ROW))
    handed_out = 0
    for seq in range(100):
        handed_out += sum(len(each.payload) for each in feed(volume(seq, 6, rows(1)), bytes(ROW)))
        feed.made.validate()
    assert handed_out == feed.made.unfinished_bytes == 18 * ROW
    assert feed.made.num_unfinished == 3
    assert feed.made.counters.garbage == 97
    assert "exceeds the assembly limit" in feed.made.last_fault
    # A volume that has its buffer continues.
    assert feed(VolumeFragment(1, 1, rows(5)), bytes(5 * ROW))[0].rows == 6
    assert feed(volume(200, 6, rows(1)), bytes(ROW))[0].rows == 1


def test_payloads_are_owned_by_the_receiver() -> None:
    feed = Feed(receiver(), Channel.DECODE)
    (arrival,) = feed(History(1, 2, 0, Payload("i32", (2,))), bytes(8))
    assert isinstance(arrival.payload, bytearray)
    (arrival,) = feed(volume(1, 1, rows(1)), bytes(ROW))
    assert isinstance(arrival.payload, bytearray)
    assert feed(Tombstone(1))[0].payload is None


@pytest.mark.parametrize(
    ("body", "payload", "fault"),
    [
        (volume(1, 1, Payload("f16", (1, HIDDEN))), bytes(ROW), "f16"),
        (volume(1, 1, Payload("bf16", (1, 5))), bytes(10), r"\[1, 5\]"),
        (volume(1, 1, Payload("bf16", (4,))), bytes(8), r"\[4\]"),
        (volume(1, 1, rows(2)), bytes(2 * ROW), "has 2 rows where its header says 1"),
        (volume(1, 1, rows(0)), b"", "not bf16"),
        (volume(1, 1, rows(1)), bytes(7), "1 rows in 7 bytes"),
        (volume(1, 65536, rows(1)), bytes(ROW), "exceeds the assembly limit"),
        (volume(9, 3, rows(1)), bytes(ROW), "volume 9 starts twice"),
        (VolumeFragment(8, 0, rows(1)), bytes(ROW), "never started"),
        (VolumeFragment(9, 0, rows(1)), bytes(ROW), "rows from 0, expected 1"),
        (VolumeFragment(9, 2, rows(1)), bytes(ROW), "rows from 2, expected 1"),
        (VolumeFragment(9, 1, rows(3)), bytes(3 * ROW), "rows from 1"),
        (volume(1, 1, rows(1)), None, "without rows"),
    ],
)
@pytest.mark.parametrize("cut_through", [False, True])
def test_invalid_frames_are_counted_and_skipped(
    body: Any, payload: Any, fault: str, cut_through: bool
) -> None:
    feed = Feed(receiver(cut_through, assembly_bytes=1000))
    feed(volume(9, 3, rows(1)), bytes(ROW))
    assert feed(body, payload) == []
    assert feed.made.counters.garbage == 1
    with pytest.raises(WireError, match=fault):
        raise WireError(feed.made.last_fault)
    assert feed.made._assembly.nbytes == 3 * ROW
    assert feed(VolumeFragment(9, 1, rows(2)), bytes(2 * ROW))[0].body.seq == 9
    feed.made.validate()


def test_the_memory_of_all_volumes_is_bounded() -> None:
    feed = Feed(receiver(assembly_bytes=10 * ROW))
    feed(volume(1, 6, rows(1)), bytes(ROW))
    feed(volume(2, 6, rows(1)), bytes(ROW))
    assert feed.made.counters.garbage == 1
    feed(VolumeFragment(1, 1, rows(5)), bytes(5 * ROW))
    feed(volume(3, 6, rows(1)), bytes(ROW))
    assert feed.made.counters.garbage == 1


def test_acknowledgements_are_cumulative_and_timely() -> None:
    made = receiver(ack_every=3, ack_delay=0.005)
    decode, bulk = Feed(made, Channel.DECODE), Feed(made, Channel.BULK)
    assert made.due_acks(9.0) == []
    assert made.wake_at is None
    decode(Tombstone(1))
    decode(Tombstone(2))
    assert made.due_acks(0.004) == []
    assert made.wake_at == 0.005
    assert made.due_acks(0.005) == [Ack(5, Channel.DECODE, 2)]
    assert made.due_acks(0.1) == []
    for seq in range(3):
        decode(Tombstone(seq))
    bulk(Tombstone(1))
    assert made.wake_at == 0.0
    assert made.due_acks(0.0) == [Ack(5, Channel.DECODE, 5), Ack(5, Channel.BULK, 1)]


def test_duplicates_are_acknowledged_again() -> None:
    made = receiver(ack_delay=0.005)
    frame = Frame(5, Channel.DECODE, 0, Tombstone(1))
    assert len(made.on_frame(frame, None, 0.0)) == 1
    made.make_ack(Channel.DECODE)
    assert made.on_frame(frame, None, 1.0) == []
    assert made.due_acks(1.005) == [Ack(5, Channel.DECODE, 1)]
    assert made.on_frame(Frame(5, Channel.DECODE, 3, Tombstone(1)), None, 1.0) == []
    assert made.on_frame(Frame(4, Channel.DECODE, 1, Tombstone(1)), None, 1.0) == []
    counters = made.counters
    assert (counters.duplicates, counters.gaps, counters.old_epochs) == (1, 1, 1)


def test_receiver_validates_its_invariants() -> None:
    made = receiver()
    made._assembly.nbytes = 1
    with pytest.raises(InvariantError):
        made.validate()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_receiver_never_raises(data: st.DataObject) -> None:
    made = receiver(data.draw(st.booleans()), assembly_bytes=100 * ROW)
    codec = data_codec()
    small = st.integers(0, 4)
    shapes = st.lists(small, min_size=1, max_size=2).map(tuple)
    payloads = st.builds(Payload, st.sampled_from(["bf16", "u8", "f32"]), shapes)
    slices = st.builds(RequestSlice, small, small, st.sampled_from([1, 2, 3, 65536]), small)
    bodies = st.one_of(
        st.builds(VolumeFragment, small, small, payloads),
        st.builds(Tombstone, small),
        st.builds(Volume, small, st.booleans(), st.lists(slices, min_size=1, max_size=3), payloads),
    )
    for seq in range(data.draw(st.integers(1, 10))):
        frame = Frame(5, data.draw(st.sampled_from(Channel)), seq, data.draw(bodies))
        payload = None if frame.payload is None else bytes(frame.payload.nbytes)
        message, view = codec.decode([bytes(fragment) for fragment in codec.encode(frame, payload)])
        for arrival in made.on_frame(message, view, float(seq)):
            size = 0 if arrival.payload is None else len(arrival.payload)
            assert size <= 100 * ROW
        made.validate()
        assert made._assembly.nbytes <= 100 * ROW


def test_padding_is_acknowledged_and_dropped() -> None:
    one = receiver()
    probe = Frame(5, Channel.BULK, 0, Padding(Payload("u8", (4,))))
    assert one.on_frame(probe, memoryview(b"abcd"), 0.0) == []
    assert one.due_acks(0.0) == [Ack(5, Channel.BULK, 1)]
    assert (one.counters.frames, one.counters.garbage) == (1, 0)
