from collections.abc import Collection

import pytest

from molink.errors import InvariantError, MessageTooLarge, Overloaded, WireError
from molink.link.create import create_policy
from molink.link.policy import (
    Acknowledged,
    Decision,
    Event,
    Produced,
    Reconnected,
    Send,
    Sent,
    Wait,
)
from molink.link.sender import LinkSender, SenderLimits
from molink.wire.base import Payload
from molink.wire.data import (
    Ack,
    Admit,
    Frame,
    History,
    Lane,
    Rows,
    Sampling,
    Tombstone,
    Volume,
    VolumePart,
)

HIDDEN = 4
ROW = 16


def volume(tick: int, rows: int, prefill: bool = True) -> tuple[Volume, bytes]:
    header = Volume(tick, prefill, (Rows(1, 0, rows, 0),), Payload("f32", (rows, HIDDEN)))
    return header, bytes(range(ROW)) * rows


def connected(sender: LinkSender) -> LinkSender:
    for lane in Lane:
        sender.reconnected(lane, 0.0)
    return sender


class Halves:
    """A policy that sends half a volume, waits a second, and sends the other half."""

    name = "halves"

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.left: dict[int, int] = {}
        self.next_at = 0.0

    def handle(self, event: Event, now: float) -> None:
        self.events.append(event)
        if isinstance(event, Produced):
            self.left[event.volume] = event.rows

    def decide(self, now: float, ready: Collection[Lane]) -> Decision:
        if not self.left or now < self.next_at:
            return Wait(self.next_at if self.left else None)
        name, rows = next(iter(self.left.items()))
        self.next_at = now + 1.0
        del self.left[name]
        if rows == 10:
            self.left[name] = 5
        return Send(name, 5)


def test_a_policy_decides_how_much_and_when() -> None:
    policy = Halves()
    sender = connected(LinkSender(1, policy, SenderLimits(message=3 * ROW)))
    sender.volume(*volume(7, 10), 0.0)
    first = sender.poll(0.0)
    assert [out.message.body.payload.shape[0] for out in first] == [3, 2]  # type: ignore[union-attr]
    assert sender.wake_at == 1.0
    assert sender.poll(0.5) == []
    second = sender.poll(1.0)
    assert [type(out.message.body) for out in [*first, *second]] == [
        Volume,
        VolumePart,
        VolumePart,
        VolumePart,
    ]
    assert [getattr(out.message.body, "first", 0) for out in [*first, *second]] == [0, 3, 5, 8]
    sender.ack(Ack(1, Lane.BULK, 4), 1.5)
    assert policy.events[0] == Produced(0, Lane.BULK, 10, ROW)
    assert policy.events[1] == Sent(Lane.BULK, 3 * ROW + 128)
    assert policy.events[-1] == Acknowledged(Lane.BULK, 10 * ROW + 4 * 128, 0.5)
    sender.reconnected(Lane.BULK, 2.0)
    assert policy.events[-1] == Reconnected(Lane.BULK)
    assert sender.wake_at is not None


def test_control_goes_before_volumes_and_on_the_decode_lane() -> None:
    sender = connected(LinkSender(1, create_policy("fifo")))
    sender.volume(*volume(1, 2, prefill=False), 0.0)
    sender.control(Admit(2, 1, Sampling(), 3))
    sender.control(History(3, 1, 0, Payload("i32", (2,))), bytes(8))
    sender.volume(*volume(4, 2), 0.0)
    frames = [out.message for out in sender.poll(0.0)]
    assert [(f.lane, f.seq, f.body.tick) for f in frames] == [  # type: ignore[union-attr]
        (Lane.DECODE, 0, 2),
        (Lane.DECODE, 1, 3),
        (Lane.DECODE, 2, 1),
        (Lane.BULK, 0, 4),
    ]
    assert sender.poll(0.0) == []


def test_nothing_is_sent_before_a_connection_and_everything_again_after_the_next() -> None:
    sender = LinkSender(1, create_policy("fifo"))
    sender.control(Tombstone(1))
    assert sender.poll(0.0) == []
    sender.reconnected(Lane.DECODE, 0.0)
    first = sender.poll(0.0)
    sender.disconnected(Lane.DECODE, 1.0)
    sender.control(Tombstone(2))
    assert sender.poll(1.0) == []
    sender.reconnected(Lane.DECODE, 2.0)
    again = sender.poll(2.0)
    assert again[0] == first[0]
    assert [out.message.seq for out in again] == [0, 1]
    assert sender.resent == 1


def test_a_lane_that_acknowledges_nothing_is_sent_again_on_the_same_connection() -> None:
    sender = connected(LinkSender(1, create_policy("fifo"), SenderLimits(resend_after=10.0)))
    sender.control(Tombstone(1))
    first = sender.poll(5.0)
    assert sender.wake_at == 15.0
    assert sender.poll(14.9) == []
    assert sender.poll(15.0) == first
    assert sender.wake_at == 25.0
    sender.ack(Ack(1, Lane.DECODE, 1), 16.0)
    assert sender.poll(30.0) == []
    assert sender.wake_at is None


def test_the_window_and_the_batch_bound_what_is_under_way() -> None:
    limits = SenderLimits(message=ROW, window=3 * (ROW + 128))
    sender = connected(LinkSender(1, create_policy("fifo"), limits))
    sender.volume(*volume(1, 10), 0.0)
    assert len(sender.poll(0.0, most=2)) == 2
    assert len(sender.poll(0.0)) == 1
    sender.control(Tombstone(2))
    assert [out.lane for out in sender.poll(0.0)] == [Lane.DECODE]
    sender.ack(Ack(1, Lane.BULK, 2), 0.1)
    assert [out.message.seq for out in sender.poll(0.1)] == [3, 4]


def test_full_and_too_full() -> None:
    sender = LinkSender(1, create_policy("fifo"), SenderLimits(total=100 * ROW))
    sender.volume(*volume(1, 99), 0.0)
    assert not sender.full
    sender.volume(*volume(2, 101), 0.0)
    assert sender.full
    sender.volume(*volume(3, 1), 0.0)
    with pytest.raises(Overloaded, match="far behind"):
        sender.volume(*volume(4, 1), 0.0)
    with pytest.raises(Overloaded):
        sender.control(Tombstone(5))
    sender.validate()


def test_only_proper_volumes() -> None:
    sender = LinkSender(1, create_policy("fifo"))
    header, data = volume(1, 3)
    with pytest.raises(WireError, match="volume 1: 47 bytes are not 3 rows"):
        sender.volume(header, data[:-1], 0.0)
    wide = Payload("u8", (1, 300_000))
    with pytest.raises(MessageTooLarge, match="row"):
        sender.volume(Volume(1, True, (Rows(1, 0, 1, 0),), wide), bytes(300_000), 0.0)
    blocks = tuple(range(2**30, 2**30 + 1000))
    with pytest.raises(MessageTooLarge, match="header of a Volume"):
        sender.volume(Volume(1, True, (Rows(1, 0, 3, 0, blocks),), header.payload), data, 0.0)
    assert sender.queued_bytes == 0
    sender.validate()


@pytest.mark.parametrize("ack", [Ack(2, Lane.DECODE, 1), Ack(1, Lane.DECODE, 9), Ack(1, 1, 1)])
def test_acknowledgements_that_can_not_be(ack: Ack) -> None:
    sender = connected(LinkSender(1, create_policy("fifo")))
    sender.control(Tombstone(1))
    sender.poll(0.0)
    sender.ack(ack, 0.0)
    assert sender.stale_acks == 1
    assert sender.unacknowledged_bytes > 0
    sender.validate()


def test_a_late_acknowledgement_of_what_is_sent_again() -> None:
    sender = connected(LinkSender(1, create_policy("fifo"), SenderLimits(resend_after=10.0)))
    for tick in range(4):
        sender.control(Tombstone(tick))
    sender.poll(0.0)
    sender.disconnected(Lane.DECODE, 1.0)
    sender.reconnected(Lane.DECODE, 1.0)
    sender.poll(1.0, most=1)
    sender.ack(Ack(1, Lane.DECODE, 3), 1.0)
    sender.validate()
    assert [out.message.seq for out in sender.poll(1.0)] == [3]


def test_validate_tells_the_story() -> None:
    sender = connected(LinkSender(1, create_policy("fifo")))
    sender._queued = 5
    with pytest.raises(InvariantError, match="DECODE connected"):
        sender.validate()


def test_a_frame_has_the_payload_of_its_body() -> None:
    header, _ = volume(1, 3)
    assert Frame(1, Lane.BULK, 0, header).payload == header.payload
    assert Frame(1, Lane.BULK, 0, Tombstone(1)).payload is None
