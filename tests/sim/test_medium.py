"""A bottleneck and a latency, and what happens when."""

from molink.sim.agenda import Agenda
from molink.sim.medium import Medium
from molink.wire.data import Lane

QUEUE = 256_000


def test_messages_pass_one_after_another() -> None:
    medium = Medium(rate=1000.0, latency=0.5, queue=QUEUE)
    assert medium.send(Lane.BULK, 2000, 10.0) == (10.0, 12.0, 12.5)
    assert medium.send(Lane.DECODE, 100, 10.0) == (12.0, 12.1, 12.6)
    assert medium.send(Lane.DECODE, 100, 20.0) == (20.0, 20.1, 20.6)
    assert (medium.nbytes, round(medium.busy_s, 6)) == (2200, 2.2)


def test_a_lane_is_ready_again_when_its_backlog_is_short() -> None:
    medium = Medium(rate=QUEUE / 2, latency=0.0, queue=QUEUE)
    for _ in range(3):
        medium.send(Lane.BULK, QUEUE, 0.0)
    assert medium.backlog(Lane.BULK, 1.0) == 3 * QUEUE
    assert medium.backlog(Lane.DECODE, 1.0) == 0
    at = medium.ready_at(Lane.BULK)
    assert at == 6.0
    assert not medium.is_ready(Lane.BULK, 5.9)
    assert medium.is_ready(Lane.BULK, at)
    assert medium.is_ready(Lane.DECODE, 1.0)


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
