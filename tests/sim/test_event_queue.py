"""Regions advance independently without changing the order of events."""

from molink.sim.event_queue import EventQueue, FleetEventQueue, assign_regions
from molink.sim.pc import SimPc, Uplink


def behind(*uplinks: Uplink) -> list[SimPc]:
    return [SimPc(uplink) for uplink in uplinks]


def test_shared_uplinks_and_pcs_form_regions() -> None:
    a, b, c, d, e = (Uplink(1.0, 1) for _ in range(5))
    shared = SimPc(e)
    first, second, third, fourth, fifth, sixth = assign_regions(
        [behind(a, b), behind(c), behind(b, d), [shared], [shared], behind(d)]
    )
    assert first == third == sixth
    assert fourth == fifth
    assert len({first, second, fourth}) == 3


class Log:
    """Events in the order in which they ran."""

    def __init__(self, time: FleetEventQueue) -> None:
        self.time = time
        self.seen: list[str] = []
        self.times: list[float] = []

    def add(self, event_queue: EventQueue, name: str) -> None:
        self.seen.append(f"{name}@{event_queue.now:g}")

    def seqs(self, event_queue: EventQueue, name: str, every: float) -> None:
        self.add(event_queue, name)
        event_queue.schedule_at(event_queue.now + every, self.seqs, event_queue, name, every)

    def tells(self, event_queue: EventQueue, at: float) -> None:
        event_queue.schedule_at(
            at,
            lambda: self.time.schedule_common(event_queue.now, self.times.append, event_queue.now),
        )


def test_regions_run_before_common_events() -> None:
    time = FleetEventQueue([0, 1])
    log = Log(time)
    one, two = time.region_queue(0), time.region_queue(1)
    one.schedule_at(0.1, log.seqs, one, "one", 0.2)
    two.schedule_at(0.2, log.seqs, two, "two", 0.2)
    time.common.schedule_at(0.35, log.add, time.common, "all")
    time.common.schedule_at(0.45, time.common.stop)
    time.run(10.0)
    assert log.seen == ["one@0.1", "one@0.3", "two@0.2", "all@0.35", "two@0.4"]


def test_reports_run_in_order_before_later_events() -> None:
    time = FleetEventQueue([0, 1])
    log = Log(time)
    for at in (0.2, 0.6):
        log.tells(time.region_queue(0), at)
    for at in (0.1, 0.4):
        log.tells(time.region_queue(1), at)
    heard: list[list[float]] = []
    time.common.schedule_at(0.5, lambda: heard.append(list(log.times)))
    time.common.schedule_at(0.7, time.common.stop)
    time.run(10.0)
    assert heard == [[0.1, 0.2, 0.4]]
    assert log.times == [0.1, 0.2, 0.4, 0.6]


def test_later_events_do_not_precede_other_regions() -> None:
    time = FleetEventQueue([0, 1])
    log = Log(time)
    one, two = time.region_queue(0), time.region_queue(1)
    one.schedule_at(0.1, time.schedule_later, one, 0.2, log.add, two, "late")
    two.schedule_at(0.6, log.add, two, "two")
    time.common.schedule_at(0.8, log.add, time.common, "all")
    time.common.schedule_at(0.9, time.common.stop)
    time.run(10.0)
    assert log.seen == ["two@0.6", "all@0.8", "late@0.8"]


def test_the_queue_ends_at_its_time_or_when_stopped() -> None:
    time = FleetEventQueue([0])
    time.run(3.5)
    assert time.common.now == 3.5
    stopped = FleetEventQueue([0])
    region = stopped.region_queue(0)
    region.schedule_at(2.25, lambda: stopped.schedule_common(region.now, stopped.common.stop))
    stopped.run(9.0)
    assert stopped.common.now == 2.25
