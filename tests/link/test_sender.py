from collections.abc import Collection

import pytest

from molink.errors import InvariantError, MessageTooLarge, Overloaded, WireError
from molink.link.policies.base import (
    ChannelReconnectedEvent,
    HeartbeatEchoedEvent,
    LinkAction,
    LinkEvent,
    MessageAcknowledgedEvent,
    MessageSentEvent,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.link.policies.baselines import FifoPolicy
from molink.link.policies.create import POLICIES, create_policy
from molink.link.send_window import Packet
from molink.link.sender import LinkSender, SenderLimits
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import (
    Ack,
    Admit,
    Channel,
    Frame,
    History,
    Padding,
    RequestSlice,
    SamplingParams,
    Tombstone,
    Volume,
    VolumeFragment,
)

HIDDEN = 4
ROW = 16


def volume(seq: int, rows: int, prefill: bool = True) -> tuple[Volume, bytes]:
    header = Volume(seq, prefill, (RequestSlice(1, 0, rows, 0),), Payload("f32", (rows, HIDDEN)))
    return header, bytes(range(ROW)) * rows


def connected(sender: LinkSender) -> LinkSender:
    for channel in Channel:
        sender.on_connected(channel, 0.0)
    return sender


class TwoChannels(FifoPolicy):
    """First come, first served, with a channel per kind."""

    single_channel = False


class Orders:
    """A policy that returns given decisions."""

    name = "orders"
    single_channel = True

    def __init__(self, *decisions: LinkAction) -> None:
        self.events: list[LinkEvent] = []
        self.decisions = list(decisions)

    def handle(self, event: LinkEvent, now: float) -> None:
        self.events.append(event)

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        return self.decisions.pop(0) if self.decisions else WaitAction()


class Halves:
    """Sends half of a volume, waits a second, and sends the other half."""

    name = "halves"
    single_channel = False

    def __init__(self) -> None:
        self.events: list[LinkEvent] = []
        self.left: dict[int, int] = {}
        self.next_at = 0.0

    def handle(self, event: LinkEvent, now: float) -> None:
        self.events.append(event)
        if isinstance(event, RowsProducedEvent):
            self.left[event.volume] = event.rows

    def choose_action(self, now: float, ready: Collection[Channel]) -> LinkAction:
        if not self.left or now < self.next_at:
            return WaitAction(self.next_at if self.left else None)
        name, rows = next(iter(self.left.items()))
        self.next_at = now + 1.0
        del self.left[name]
        if rows == 10:
            self.left[name] = 5
        return SendRowsAction(name, 5)


def test_policy_decides_rows_and_time() -> None:
    policy = Halves()
    sender = connected(LinkSender(1, policy, SenderLimits(max_message_bytes=3 * ROW)))
    sender.queue_volume(*volume(7, 10), 0.0)
    first = sender.poll_packets(0.0)
    assert [out.frame.body.payload.shape[0] for out in first] == [3, 2]  # type: ignore[union-attr]
    assert sender.wake_at == 1.0
    assert sender.poll_packets(0.5) == []
    second = sender.poll_packets(1.0)
    assert [type(out.frame.body) for out in [*first, *second]] == [
        Volume,
        VolumeFragment,
        VolumeFragment,
        VolumeFragment,
    ]
    assert [getattr(out.frame.body, "first", 0) for out in [*first, *second]] == [0, 3, 5, 8]
    sender.on_ack(Ack(1, Channel.BULK, 4), 1.5)
    assert policy.events[0] == RowsProducedEvent(0, Channel.BULK, 10, ROW)
    assert policy.events[1] == MessageSentEvent(Channel.BULK, 3 * ROW + 128)
    assert policy.events[-1] == MessageAcknowledgedEvent(Channel.BULK, 10 * ROW + 4 * 128, 0.5)
    sender.on_connected(Channel.BULK, 2.0)
    assert policy.events[-1] == ChannelReconnectedEvent(Channel.BULK)
    assert sender.wake_at is not None


def test_control_messages_precede_volumes_on_the_decode_channel() -> None:
    sender = connected(LinkSender(1, TwoChannels()))
    sender.queue_volume(*volume(1, 2, prefill=False), 0.0)
    sender.queue_control(Admit(2, 1, SamplingParams(), 3))
    sender.queue_control(History(3, 1, 0, Payload("i32", (2,))), bytes(8))
    sender.queue_volume(*volume(4, 2), 0.0)
    frames = [out.frame for out in sender.poll_packets(0.0)]
    assert [(f.channel, f.frame_number, f.body.seq) for f in frames] == [  # type: ignore[union-attr]
        (Channel.DECODE, 0, 2),
        (Channel.DECODE, 1, 3),
        (Channel.DECODE, 2, 1),
        (Channel.BULK, 0, 4),
    ]
    assert sender.poll_packets(0.0) == []


def seqs(sent: list[Packet]) -> list[tuple[Channel, int, int, int]]:
    """Channel, seq, first row and number of rows of each volume message."""
    bodies = [out.frame.body for out in sent]
    return [
        (out.channel, body.seq, getattr(body, "first", 0), body.payload.shape[0])
        for out, body in zip(sent, bodies, strict=True)
        if isinstance(body, Volume | VolumeFragment)
    ]


def test_single_channel_carries_both_kinds() -> None:
    sender = connected(LinkSender(1, FifoPolicy()))
    sender.queue_volume(*volume(1, 2), 0.0)
    sender.queue_control(Tombstone(2))
    sender.queue_volume(*volume(3, 1, prefill=False), 0.0)
    assert [out.channel for out in sender.poll_packets(0.0, (Channel.DECODE,))] == [Channel.DECODE]
    assert seqs(sender.poll_packets(0.0)) == [(Channel.BULK, 1, 0, 2), (Channel.BULK, 3, 0, 1)]


def test_single_channel_policy_gets_both_kinds() -> None:
    policy = Orders(SendRowsAction(0, 1), SendRowsAction(1, 1))
    sender = connected(LinkSender(1, policy))
    sender.queue_volume(*volume(1, 1, prefill=False), 0.0)
    sender.queue_volume(*volume(2, 1), 0.0)
    assert policy.events == [
        RowsProducedEvent(0, Channel.DECODE, 1, ROW),
        RowsProducedEvent(1, Channel.BULK, 1, ROW),
    ]
    assert (sender.queued_on(Channel.DECODE), sender.queued_on(Channel.BULK)) == (0, 2 * ROW)
    assert [channel for channel, *_ in seqs(sender.poll_packets(0.0))] == [
        Channel.BULK,
        Channel.BULK,
    ]
    assert sender.in_flight_on(Channel.DECODE) == 0
    assert sender.in_flight_on(Channel.BULK) == sender.unacknowledged_bytes > 2 * ROW


def test_volume_is_queued_in_parts() -> None:
    policy = Orders(SendRowsAction(0, 99), SendRowsAction(0, 1), SendRowsAction(0, 99))
    sender = connected(LinkSender(1, policy, SenderLimits(max_message_bytes=4 * ROW)))
    header, data = volume(7, 10)
    sender.queue_volume(header, memoryview(data)[: 2 * ROW], 0.0)
    assert policy.events == [RowsProducedEvent(0, Channel.BULK, 2, ROW)]
    assert sender.queued_bytes == 2 * ROW
    first = sender.poll_packets(0.0)
    assert seqs(first) == [(Channel.BULK, 7, 0, 2)]
    assert isinstance(first[0].frame.body, Volume)
    assert sender.queued_bytes == 0
    sender.queue_rows(7, memoryview(data)[2 * ROW : 7 * ROW], 1.0)
    sender.validate()
    sender.queue_rows(7, memoryview(data)[7 * ROW :], 1.0)
    assert policy.events[2:] == [
        RowsProducedEvent(0, Channel.BULK, 5, ROW),
        RowsProducedEvent(0, Channel.BULK, 3, ROW),
    ]
    second = sender.poll_packets(2.0)
    # One message for the rows that the policy granted, then the others, each with one buffer.
    assert seqs(second) == [
        (Channel.BULK, 7, 2, 1),
        (Channel.BULK, 7, 3, 4),
        (Channel.BULK, 7, 7, 3),
    ]
    assert b"".join(bytes(out.payload or b"") for out in first + second) == data
    sender.validate()


def test_surplus_rows_are_rejected() -> None:
    sender = LinkSender(1, create_policy("fifo"))
    header, data = volume(7, 3)
    with pytest.raises(WireError, match="surplus rows of volume 7"):
        sender.queue_rows(7, data[:ROW], 0.0)
    sender.queue_volume(header, data[:ROW], 0.0)
    with pytest.raises(WireError, match="volume 7 starts again"):
        sender.queue_volume(header, data, 0.0)
    for wrong in (data, data[: ROW + 1], b""):
        with pytest.raises(WireError, match="are not 1 to 2 rows"):
            sender.queue_rows(7, wrong, 0.0)
    sender.queue_rows(7, data[ROW:], 0.0)
    with pytest.raises(WireError, match="surplus rows"):
        sender.queue_rows(7, data[:ROW], 0.0)
    assert sender.queued_bytes == 3 * ROW
    sender.queue_volume(header, data, 0.0)
    sender.validate()


def test_full_link_accepts_rows_of_started_volumes() -> None:
    sender = LinkSender(1, create_policy("fifo"), SenderLimits(max_total_bytes=10 * ROW))
    sender.queue_volume(volume(1, 30)[0], bytes(ROW), 0.0)
    sender.queue_rows(1, bytes(20 * ROW), 0.0)
    assert sender.is_full
    with pytest.raises(Overloaded):
        sender.queue_volume(*volume(2, 1), 0.0)
    sender.queue_rows(1, bytes(9 * ROW), 0.0)
    sender.validate()


@pytest.mark.parametrize(
    "decision", [SendRowsAction(0, 1), SendRowsAction(2, 1), SendRowsAction(1, 0)]
)
def test_sending_missing_rows_raises(decision: SendRowsAction) -> None:
    """Volume 0 has no rows left now, volume 2 doesn't exist, and zero rows can't be sent."""
    sender = connected(LinkSender(1, Orders(SendRowsAction(0, 1), WaitAction(), decision)))
    header, data = volume(7, 3)
    sender.queue_volume(header, data[:ROW], 0.0)
    sender.queue_volume(*volume(8, 1), 0.0)
    assert len(sender.poll_packets(0.0)) == 1
    with pytest.raises(InvariantError, match="orders sends rows that don't exist"):
        sender.poll_packets(0.0)


def test_fragments_are_resent_after_a_reconnect() -> None:
    sender = connected(LinkSender(1, FifoPolicy()))
    header, data = volume(7, 4)
    sender.queue_volume(header, data[: 2 * ROW], 0.0)
    first = sender.poll_packets(0.0)
    sender.on_disconnected(Channel.BULK, 1.0)
    sender.queue_rows(7, data[2 * ROW : 3 * ROW], 1.0)
    assert sender.poll_packets(1.0) == []
    sender.on_connected(Channel.BULK, 2.0)
    again = sender.poll_packets(2.0)
    assert again[: len(first)] == first
    assert seqs(again) == [(Channel.BULK, 7, 0, 2), (Channel.BULK, 7, 2, 1)]
    sender.queue_rows(7, data[3 * ROW :], 3.0)
    assert seqs(sender.poll_packets(3.0)) == [(Channel.BULK, 7, 3, 1)]


def test_unacknowledged_frames_are_resent_after_a_reconnect() -> None:
    sender = LinkSender(1, create_policy("fifo"))
    sender.queue_control(Tombstone(1))
    assert sender.poll_packets(0.0) == []
    sender.on_connected(Channel.DECODE, 0.0)
    first = sender.poll_packets(0.0)
    sender.on_disconnected(Channel.DECODE, 1.0)
    sender.queue_control(Tombstone(2))
    assert sender.poll_packets(1.0) == []
    sender.on_connected(Channel.DECODE, 2.0)
    again = sender.poll_packets(2.0)
    assert again[0] == first[0]
    assert [out.frame.frame_number for out in again] == [0, 1]
    assert sender.num_resent == 1


def test_stalled_channel_resends_on_the_same_connection() -> None:
    policy = Orders()
    sender = connected(LinkSender(1, policy, SenderLimits(resend_after=10.0)))
    sender.queue_control(Tombstone(1))
    first = sender.poll_packets(5.0)
    assert sender.wake_at == 15.0
    assert sender.poll_packets(14.9) == []
    assert sender.poll_packets(15.0) == first
    assert policy.events == [
        MessageSentEvent(Channel.DECODE, 128),
        ChannelReconnectedEvent(Channel.DECODE),
        MessageSentEvent(Channel.DECODE, 128),
    ]
    assert sender.wake_at == 25.0
    sender.on_ack(Ack(1, Channel.DECODE, 1), 16.0)
    assert sender.poll_packets(30.0) == []
    assert sender.wake_at is None


@pytest.mark.parametrize("policy", POLICIES)
def test_lost_messages_leave_the_in_flight_count(policy: str) -> None:
    """A policy that bounds the bytes in flight continues after they are sent again."""
    sender = connected(LinkSender(1, create_policy(policy), SenderLimits(resend_after=10.0)))
    sender.queue_volume(*volume(1, 2), 0.0)
    lost = sender.poll_packets(0.0)
    assert sender.poll_packets(10.0) == lost
    sender.on_ack(Ack(1, Channel.BULK, len(lost)), 10.1)
    sender.queue_volume(*volume(2, 2), 11.0)
    assert seqs(sender.poll_packets(11.0)) == [(Channel.BULK, 2, 0, 2)]


def test_window_and_batch_bound_messages_in_flight() -> None:
    limits = SenderLimits(max_message_bytes=ROW, max_unacknowledged_bytes=3 * (ROW + 128))
    sender = connected(LinkSender(1, create_policy("fifo"), limits))
    sender.queue_volume(*volume(1, 10), 0.0)
    assert len(sender.poll_packets(0.0, maximum=2)) == 2
    assert len(sender.poll_packets(0.0)) == 1
    sender.queue_control(Tombstone(2))
    assert [out.channel for out in sender.poll_packets(0.0)] == [Channel.DECODE]
    sender.on_ack(Ack(1, Channel.BULK, 2), 0.1)
    assert [out.frame.frame_number for out in sender.poll_packets(0.1)] == [3, 4]


def test_full_link_rejects_messages_at_twice_its_limit() -> None:
    sender = LinkSender(1, create_policy("fifo"), SenderLimits(max_total_bytes=100 * ROW))
    sender.queue_volume(*volume(1, 99), 0.0)
    assert not sender.is_full
    sender.queue_volume(*volume(2, 101), 0.0)
    assert sender.is_full
    sender.queue_volume(*volume(3, 1), 0.0)
    with pytest.raises(Overloaded, match="far behind"):
        sender.queue_volume(*volume(4, 1), 0.0)
    with pytest.raises(Overloaded):
        sender.queue_control(Tombstone(5))
    sender.validate()


def test_invalid_volumes_are_rejected() -> None:
    sender = LinkSender(1, create_policy("fifo"))
    header, data = volume(1, 3)
    for wrong in (data[:-1], b"", data + data[:ROW]):
        with pytest.raises(WireError, match=f"volume 1: {len(wrong)} bytes are not 1 to 3 rows"):
            sender.queue_volume(header, wrong, 0.0)
    for shape in ((2, HIDDEN), (3,), (3, 0)):
        odd = Volume(1, True, header.slices, Payload("f32", shape))
        with pytest.raises(WireError, match="are not 3 rows"):
            sender.queue_volume(odd, data, 0.0)
    wide = Payload("u8", (1, 300_000))
    with pytest.raises(MessageTooLarge, match="row"):
        sender.queue_volume(Volume(1, True, (RequestSlice(1, 0, 1, 0),), wide), bytes(300_000), 0.0)
    blocks = tuple(range(2**30, 2**30 + 1000))
    with pytest.raises(MessageTooLarge, match="header of a Volume"):
        sender.queue_volume(
            Volume(1, True, (RequestSlice(1, 0, 3, 0, blocks),), header.payload), data, 0.0
        )
    assert sender.queued_bytes == 0
    sender.validate()


@pytest.mark.parametrize(
    "ack", [Ack(2, Channel.DECODE, 1), Ack(1, Channel.DECODE, 9), Ack(1, 1, 1)]
)
def test_impossible_acknowledgements_are_counted(ack: Ack) -> None:
    sender = connected(LinkSender(1, create_policy("fifo")))
    sender.queue_control(Tombstone(1))
    sender.poll_packets(0.0)
    sender.on_ack(ack, 0.0)
    assert sender.stale_acks == 1
    assert sender.unacknowledged_bytes > 0
    sender.validate()


def test_late_acknowledgement_of_resent_frames() -> None:
    sender = connected(LinkSender(1, create_policy("fifo"), SenderLimits(resend_after=10.0)))
    for seq in range(4):
        sender.queue_control(Tombstone(seq))
    sender.poll_packets(0.0)
    sender.on_disconnected(Channel.DECODE, 1.0)
    sender.on_connected(Channel.DECODE, 1.0)
    sender.poll_packets(1.0, maximum=1)
    sender.on_ack(Ack(1, Channel.DECODE, 3), 1.0)
    sender.validate()
    assert [out.frame.frame_number for out in sender.poll_packets(1.0)] == [3]


def test_failed_validation_carries_the_story() -> None:
    sender = connected(LinkSender(1, create_policy("fifo")))
    sender._queues.nbytes = 5
    with pytest.raises(InvariantError, match="DECODE connected"):
        sender.validate()


def test_a_frame_has_the_payload_of_its_body() -> None:
    header, _ = volume(1, 3)
    assert Frame(1, Channel.BULK, 0, header).payload == header.payload
    assert Frame(1, Channel.BULK, 0, Tombstone(1)).payload is None


def test_padding_goes_first_on_the_bulk_channel() -> None:
    sender = connected(LinkSender(7, create_policy("fifo")))
    header, rows = volume(1, 1)
    sender.queue_volume(header, rows, 0.0)
    sender.queue_padding(b"abcd")
    sender.queue_control(Tombstone(2))
    sender.validate()
    sent = sender.poll_packets(0.0)
    assert [(out.channel, type(out.frame.body)) for out in sent] == [
        (Channel.DECODE, Tombstone),
        (Channel.BULK, Padding),
        (Channel.BULK, Volume),
    ]
    assert sent[1].payload == b"abcd"
    sender.on_ack(Ack(7, Channel.BULK, 2), 0.1)
    sender.validate()
    assert sender.queued_bytes == 0


def test_decode_rows_pass_a_disconnected_bulk_channel() -> None:
    sender = connected(
        LinkSender(1, create_policy("adaptive"), SenderLimits(max_message_bytes=ROW))
    )
    sender.queue_volume(*volume(1, 4), now=0.0)
    [first] = sender.poll_packets(0.0, maximum=1)
    assert first.channel is Channel.BULK
    sender.on_disconnected(Channel.BULK, 0.1)
    sender.queue_volume(*volume(2, 3, prefill=False), now=0.1)
    decode = sender.poll_packets(0.1)
    assert [each.channel for each in decode] == [Channel.DECODE] * 3
    sender.validate()
    sender.on_connected(Channel.BULK, 0.2)
    rest = [each.frame.frame_number for each in sender.poll_packets(0.2)]
    assert rest == [0, 1, 2, 3], "the chunk continues"
    sender.validate()
    assert sender.queued_bytes == 0


def test_policy_gets_heartbeat_echoes() -> None:
    policy = Halves()
    sender = connected(LinkSender(1, policy))
    sender.estimator.on_heartbeat_sent(1.0)
    assert not sender.on_heartbeat_echoed(0.5, 1.25)
    assert policy.events == []
    assert sender.on_heartbeat_echoed(1.0, 1.25)
    assert policy.events == [HeartbeatEchoedEvent(0.25)]
