"""Link models, and the order of events."""

import pytest

from molink.sim.congestion.create import create_controller
from molink.sim.event_queue import EventQueue
from molink.sim.link_model import IdealLink, TcpLink
from molink.sim.pc import Uplink
from molink.wire.messages.data_plane import Channel

QUEUE = 256_000
Times = tuple[float, float, float]


class Taker:
    """Records the times at which messages arrive."""

    def __init__(self) -> None:
        self.times: list[Times] = []

    def __call__(self, begin: float, end: float, arrival: float) -> None:
        self.times.append((begin, end, arrival))


def test_messages_pass_in_order() -> None:
    link_model, taker = IdealLink(EventQueue(), Uplink(1000.0, QUEUE), 0.5, QUEUE), Taker()
    link_model.send_message(Channel.BULK, 2000, 10.0, taker)
    link_model.send_message(Channel.DECODE, 100, 10.0, taker)
    link_model.send_message(Channel.DECODE, 100, 20.0, taker)
    assert taker.times == [(10.0, 12.0, 12.5), (12.0, 12.1, 12.6), (20.0, 20.1, 20.6)]
    assert round(link_model.busy_s, 6) == 2.2


def test_two_links_share_an_uplink() -> None:
    event_queue, uplink = EventQueue(), Uplink(1000.0, QUEUE)
    one, other = (IdealLink(event_queue, uplink, 0.5, QUEUE) for _ in range(2))
    first, second = Taker(), Taker()
    one.send_message(Channel.BULK, 2000, 10.0, first)
    uplink.rate = 500.0
    other.send_message(Channel.DECODE, 100, 10.0, second)
    assert first.times == [(10.0, 12.0, 12.5)]
    assert second.times == [(12.0, 12.2, 12.7)], "behind the other's bytes, at the current rate"
    assert (one.busy_s, other.busy_s) == (2.0, 0.2)
    assert other.is_ready(Channel.BULK, 10.0), "the other's bytes are queued"


def test_a_channel_is_ready_when_its_backlog_is_short() -> None:
    event_queue = EventQueue()
    link_model = IdealLink(event_queue, Uplink(QUEUE / 2, QUEUE), 0.0, QUEUE)
    for _ in range(3):
        link_model.send_message(Channel.BULK, QUEUE, 0.0, Taker())
    assert link_model.backlog_bytes(Channel.BULK, 1.0) == 3 * QUEUE
    assert link_model.backlog_bytes(Channel.DECODE, 1.0) == 0
    at: list[float] = []
    link_model.call_when_ready(Channel.BULK, lambda: at.append(event_queue.now))
    event_queue.run(10.0)
    assert at == [6.0] == [link_model.ready_at(Channel.BULK)]
    assert not link_model.is_ready(Channel.BULK, 5.9)
    assert link_model.is_ready(Channel.BULK, 6.0)
    assert link_model.is_ready(Channel.DECODE, 1.0)


def make_tcp(event_queue: EventQueue, congestion: str, back: Uplink | None = None) -> TcpLink:
    uplink = Uplink(1e6, QUEUE)
    return TcpLink(
        event_queue,
        uplink,
        back or Uplink(1e6, QUEUE),
        0.05,
        QUEUE,
        lambda channel: create_controller(congestion, 0.1, channel),
    )


@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
def test_connections_share_the_uplink(congestion: str) -> None:
    event_queue, bulk, decode = EventQueue(), Taker(), Taker()
    link_model = make_tcp(event_queue, congestion)
    link_model.send_message(Channel.BULK, 1_000_000, 0.0, bulk)
    event_queue.schedule_at(0.5, link_model.send_message, Channel.DECODE, 5000, 0.5, decode)
    event_queue.run(0.4)
    assert not link_model.is_ready(Channel.BULK, 0.4)
    ready: list[float] = []
    link_model.call_when_ready(Channel.BULK, lambda: ready.append(event_queue.now))
    event_queue.run(60.0)
    # The message waits for bytes in the queue, not for unsent ones of the other channel.
    assert 0.555 <= decode.times[0][2] < 0.5 + 0.05 + 0.1 + QUEUE / 1e6
    assert 1.0 < bulk.times[0][2] < 3.0
    assert len(ready) == 1
    assert link_model.is_ready(Channel.BULK, event_queue.now)


def test_messages_of_a_channel_keep_their_order() -> None:
    event_queue, order = EventQueue(), list[str]()
    link_model = make_tcp(event_queue, "cubic")
    # Rows that are being packed are not overtaken.
    link_model.send_message(Channel.BULK, 100, 0.2, lambda *_: order.append("packed"))
    link_model.send_message(Channel.BULK, 100, 0.1, lambda *_: order.append("plain"))
    event_queue.run(1.0)
    assert order == ["packed", "plain"]


def test_replies_wait_in_the_next_stages_queue() -> None:
    event_queue, back = EventQueue(), Uplink(1e6, QUEUE)
    link_model = make_tcp(event_queue, "cubic", back)
    assert link_model.reply_s == 0.05
    back.enqueue_or_drop(100_000, 0.0)
    assert link_model.reply_s == pytest.approx(0.15)


def test_a_full_uplink_drops() -> None:
    uplink = Uplink(rate=1000.0, room=500)
    assert uplink.enqueue_or_drop(400, 0.0) == pytest.approx(0.4)
    assert uplink.enqueue_or_drop(200, 0.0) is None
    assert uplink.enqueue_or_drop(100, 0.0) == pytest.approx(0.5)
    assert uplink.enqueue_or_drop(200, 0.2) == pytest.approx(0.7)
    assert uplink.queueing_s(0.6) == pytest.approx(0.1)
    assert uplink.dropped_bytes == 200


def test_events_run_in_order() -> None:
    event_queue = EventQueue()
    seen: list[tuple[float, str]] = []

    def note(what: str) -> None:
        seen.append((event_queue.now, what))
        if what == "b":
            event_queue.schedule_soon(note, "soon")
            event_queue.schedule_at(1.0, note, "late")

    event_queue.schedule_at(2.0, note, "b")
    event_queue.schedule_at(2.0, note, "c")
    event_queue.schedule_at(1.0, note, "a")
    event_queue.schedule_at(9.0, note, "beyond")
    event_queue.run(until=5.0)
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "soon"), (2.0, "c"), (2.0, "late")]
    event_queue.stop()
    event_queue.run(until=50.0)
    assert len(seen) == 5
