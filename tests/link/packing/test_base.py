"""Packed rows between a sender and a receiver."""

import numpy as np
import pytest

from molink.link.packing.base import MessagePacker
from molink.link.policies.base import LinkEstimatedEvent, MessageSentEvent
from molink.link.policies.create import create_policy
from molink.link.receiver import LinkReceiver
from molink.link.send_window import HEADER_COST
from molink.link.sender import LinkSender, SenderLimits
from molink.wire.messages.base import Coding, Payload
from molink.wire.messages.codec import Buffer, data_codec
from molink.wire.messages.data_plane import Channel, Frame, RequestSlice, Volume, VolumeFragment

HIDDEN, ROWS = 64, 50
ROW = 2 * HIDDEN


class Always:
    """Packs everything with the real codec and records the rates that it gets."""

    def __init__(self, coding: Coding = Coding.LOSSLESS) -> None:
        from molink.link.packing.compression import RowCodec

        self.coding, self.codec = coding, RowCodec()
        self.rates: list[float | None] = []
        self.kinds: list[bool] = []

    def set_rate(self, rate: float | None) -> None:
        self.rates.append(rate)

    def pack_rows(self, bulk: bool, payload: Payload, data: memoryview) -> tuple[Payload, Buffer]:
        self.kinds.append(bulk)
        return self.codec.pack_rows(payload, data, self.coding)


def volume(prefill: bool = True) -> tuple[Volume, bytes]:
    values = np.random.default_rng(3).normal(size=(ROWS, HIDDEN)).astype("<f4")
    data = (values.view("<u4") >> 16).astype("<u2").tobytes()
    header = Volume(1, prefill, (RequestSlice(1, 0, ROWS, 0),), Payload("bf16", (ROWS, HIDDEN)))
    return header, data


def connected(packer: Always | None) -> LinkSender:
    sender = LinkSender(5, create_policy("fifo"), SenderLimits(max_message_bytes=20 * ROW), packer)
    for channel in Channel:
        sender.on_connected(channel, 0.0)
    return sender


@pytest.mark.parametrize("cut_through", [False, True])
@pytest.mark.parametrize("prefill", [False, True])
def test_rows_arrive_unchanged(prefill: bool, cut_through: bool) -> None:
    packer, codec = Always(), data_codec()
    sender = connected(packer)
    receiver = LinkReceiver(5, HIDDEN, "bf16", cut_through=cut_through)
    header, data = volume(prefill)
    sender.queue_volume(header, data, 0.0)
    arrivals = []
    for out in sender.poll_packets(0.0):
        frames = [bytes(frame) for frame in codec.encode(out.frame, out.payload)]
        message, payload = codec.decode(frames)
        assert isinstance(message, Frame)
        arrivals += receiver.on_frame(message, payload, 0.0)
    sender.validate()
    receiver.validate()
    assert receiver.counters.garbage == 0
    assert arrivals[0].body == header
    assert arrivals[0].payload == data
    assert arrivals[-1].rows == ROWS
    assert packer.kinds == [prefill] * 3


def test_wire_bytes_count_packed_rows() -> None:
    sender = connected(Always())
    header, data = volume()
    sender.queue_volume(header, data, 0.0)
    assert sender.queued_bytes == len(data)
    batch = sender.poll_packets(0.0)
    sizes = [len(out.payload) for out in batch if out.payload is not None]
    assert sum(sizes) < 0.8 * len(data)
    assert sender.queued_bytes == 0
    assert sender.unacknowledged_bytes == sum(sizes) + 3 * HEADER_COST == sender.sent_bytes
    assert sender.packing.plain_bytes == len(data)
    assert sender.packing.packed_bytes == sum(sizes)


def test_rows_stay_plain_without_a_packer() -> None:
    sender = connected(None)
    header, data = volume()
    sender.queue_volume(header, data, 0.0)
    assert b"".join(bytes(out.payload or b"") for out in sender.poll_packets(0.0)) == data
    assert sender.packing.plain_bytes == sender.packing.packed_bytes == len(data)


def test_packer_gets_the_rate() -> None:
    packer = Always()
    sender = connected(packer)
    sender.handle(LinkEstimatedEvent(0.1, 0.1, 2e6), 0.0)
    sender.handle(LinkEstimatedEvent(0.1, 0.1), 0.0)
    sender.handle(MessageSentEvent(Channel.BULK, 1), 0.0)
    assert packer.rates == [2e6, None]
    MessagePacker(None).set_rate(2e6)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other size"])
def test_undecodable_rows_are_counted(damage: str) -> None:
    sender = connected(Always())
    receiver = LinkReceiver(5, HIDDEN, "bf16")
    header, data = volume()
    sender.queue_volume(header, data, 0.0)
    first, second = sender.poll_packets(0.0)[:2]
    assert first.payload is not None
    payload, body = bytearray(first.payload), first.frame.body
    assert isinstance(body, Volume)
    low = 20 * HIDDEN
    if damage == "cut":
        payload = payload[:-1]
    elif damage == "flipped":
        payload[low + 2] ^= 1
    else:
        body = VolumeFragment(1, 0, Payload("bf16", (21, HIDDEN), Coding.LOSSLESS, len(payload)))
    frame = Frame(5, Channel.BULK, 0, body)
    assert receiver.on_frame(frame, memoryview(payload), 0.0) == []
    assert receiver.counters.garbage == 1
    assert receiver.last_fault
    # The next rows belong to a volume that never began.
    assert second.payload is not None
    assert receiver.on_frame(second.frame, memoryview(second.payload), 0.0) == []
    assert receiver.counters.garbage == 2
    receiver.validate()


def test_resent_rows_are_not_packed_again() -> None:
    packer = Always()
    sender = connected(packer)
    sender.queue_volume(*volume(), 0.0)
    first = sender.poll_packets(0.0)
    packed = sender.packing.packed_bytes
    sender.on_disconnected(Channel.BULK, 0.0)
    sender.on_connected(Channel.BULK, 0.0)
    assert sender.poll_packets(0.0) == first
    assert len(packer.kinds) == 3
    assert sender.packing.packed_bytes == packed
    sender.validate()
