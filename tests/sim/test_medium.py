"""The ways between two stages, and what happens when."""

import pytest

from molink.sim.agenda import Agenda
from molink.sim.congestion.create import create_controller
from molink.sim.medium import IdealMedium, TcpMedium
from molink.sim.uplink import Uplink
from molink.wire.messages.data import Lane

QUEUE = 256_000
Times = tuple[float, float, float]


class Taker:
    """Keeps the times of messages."""

    def __init__(self) -> None:
        self.times: list[Times] = []

    def __call__(self, begin: float, end: float, arrival: float) -> None:
        self.times.append((begin, end, arrival))


def test_messages_pass_one_after_another() -> None:
    medium, taker = IdealMedium(Agenda(), Uplink(1000.0, QUEUE), 0.5, QUEUE), Taker()
    medium.send(Lane.BULK, 2000, 10.0, taker)
    medium.send(Lane.DECODE, 100, 10.0, taker)
    medium.send(Lane.DECODE, 100, 20.0, taker)
    assert taker.times == [(10.0, 12.0, 12.5), (12.0, 12.1, 12.6), (20.0, 20.1, 20.6)]
    assert round(medium.busy_s, 6) == 2.2


def test_two_links_share_an_uplink() -> None:
    agenda, uplink = Agenda(), Uplink(1000.0, QUEUE)
    one, other = (IdealMedium(agenda, uplink, 0.5, QUEUE) for _ in range(2))
    first, second = Taker(), Taker()
    one.send(Lane.BULK, 2000, 10.0, first)
    uplink.rate = 500.0
    other.send(Lane.DECODE, 100, 10.0, second)
    assert first.times == [(10.0, 12.0, 12.5)]
    assert second.times == [(12.0, 12.2, 12.7)], "behind the other's bytes, at the rate of now"
    assert (one.busy_s, other.busy_s) == (2.0, 0.2)
    assert other.is_ready(Lane.BULK, 10.0), "what waits in it is the other's"


def test_a_lane_is_ready_again_when_its_backlog_is_short() -> None:
    agenda = Agenda()
    medium = IdealMedium(agenda, Uplink(QUEUE / 2, QUEUE), 0.0, QUEUE)
    for _ in range(3):
        medium.send(Lane.BULK, QUEUE, 0.0, Taker())
    assert medium.backlog(Lane.BULK, 1.0) == 3 * QUEUE
    assert medium.backlog(Lane.DECODE, 1.0) == 0
    at: list[float] = []
    medium.when_ready(Lane.BULK, lambda: at.append(agenda.now))
    agenda.run(10.0)
    assert at == [6.0] == [medium.ready_at(Lane.BULK)]
    assert not medium.is_ready(Lane.BULK, 5.9)
    assert medium.is_ready(Lane.BULK, 6.0)
    assert medium.is_ready(Lane.DECODE, 1.0)


def make_tcp(agenda: Agenda, congestion: str, back: Uplink | None = None) -> TcpMedium:
    uplink = Uplink(1e6, QUEUE)
    return TcpMedium(
        agenda,
        uplink,
        back or Uplink(1e6, QUEUE),
        0.05,
        QUEUE,
        lambda lane: create_controller(congestion, 0.1, lane),
    )


@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
def test_connections_share_the_uplink(congestion: str) -> None:
    agenda, bulk, decode = Agenda(), Taker(), Taker()
    medium = make_tcp(agenda, congestion)
    medium.send(Lane.BULK, 1_000_000, 0.0, bulk)
    agenda.at(0.5, medium.send, Lane.DECODE, 5000, 0.5, decode)
    agenda.run(0.4)
    assert not medium.is_ready(Lane.BULK, 0.4)
    ready: list[float] = []
    medium.when_ready(Lane.BULK, lambda: ready.append(agenda.now))
    agenda.run(60.0)
    # What of the other lane has not left does not hold it up, only what is in the queue.
    assert 0.555 <= decode.times[0][2] < 0.5 + 0.05 + 0.1 + QUEUE / 1e6
    assert 1.0 < bulk.times[0][2] < 3.0
    assert len(ready) == 1
    assert medium.is_ready(Lane.BULK, agenda.now)


def test_messages_of_a_lane_enter_in_their_order() -> None:
    agenda, order = Agenda(), list[str]()
    medium = make_tcp(agenda, "cubic")
    # Rows that are being packed are no reason to overtake them.
    medium.send(Lane.BULK, 100, 0.2, lambda *_: order.append("packed"))
    medium.send(Lane.BULK, 100, 0.1, lambda *_: order.append("plain"))
    agenda.run(1.0)
    assert order == ["packed", "plain"]


def test_answers_wait_in_the_next_stages_queue() -> None:
    agenda, back = Agenda(), Uplink(1e6, QUEUE)
    medium = make_tcp(agenda, "cubic", back)
    assert medium.reply_s == 0.05
    back.put(100_000, 0.0)
    assert medium.reply_s == pytest.approx(0.15)


def test_an_uplink_drops_what_it_has_no_room_for() -> None:
    uplink = Uplink(rate=1000.0, room=500)
    assert uplink.put(400, 0.0) == pytest.approx(0.4)
    assert uplink.put(200, 0.0) is None
    assert uplink.put(100, 0.0) == pytest.approx(0.5)
    assert uplink.put(200, 0.2) == pytest.approx(0.7)
    assert uplink.wait(0.6) == pytest.approx(0.1)
    assert uplink.dropped == 200


def test_things_happen_in_order() -> None:
    agenda = Agenda()
    seen: list[tuple[float, str]] = []

    def note(what: str) -> None:
        seen.append((agenda.now, what))
        if what == "b":
            agenda.soon(note, "soon")
            agenda.at(1.0, note, "late")

    agenda.at(2.0, note, "b")
    agenda.at(2.0, note, "c")
    agenda.at(1.0, note, "a")
    agenda.at(9.0, note, "beyond")
    agenda.run(until=5.0)
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "soon"), (2.0, "c"), (2.0, "late")]
    agenda.stop()
    agenda.run(until=50.0)
    assert len(seen) == 5
