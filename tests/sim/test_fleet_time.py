"""Regions go on by themselves, and nobody can tell."""

from molink.sim.agenda import Agenda
from molink.sim.fleet_time import FleetTime, regions
from molink.sim.pc import Pc
from molink.sim.uplink import Uplink


def behind(*uplinks: Uplink) -> list[Pc]:
    return [Pc(uplink) for uplink in uplinks]


def test_who_shares_an_uplink_or_a_pc_is_in_one_region() -> None:
    a, b, c, d, e = (Uplink(1.0, 1) for _ in range(5))
    shared = Pc(e)
    first, second, third, fourth, fifth, sixth = regions(
        [behind(a, b), behind(c), behind(b, d), [shared], [shared], behind(d)]
    )
    assert first == third == sixth
    assert fourth == fifth
    assert len({first, second, fourth}) == 3


class Log:
    """What happened, in the order in which it ran."""

    def __init__(self, time: FleetTime) -> None:
        self.time = time
        self.seen: list[str] = []
        self.times: list[float] = []

    def add(self, agenda: Agenda, name: str) -> None:
        self.seen.append(f"{name}@{agenda.now:g}")

    def ticks(self, agenda: Agenda, name: str, every: float) -> None:
        self.add(agenda, name)
        agenda.at(agenda.now + every, self.ticks, agenda, name, every)

    def tells(self, agenda: Agenda, at: float) -> None:
        agenda.at(at, lambda: self.time.tell(agenda.now, self.times.append, agenda.now))


def test_each_region_is_done_before_what_concerns_all() -> None:
    time = FleetTime([0, 1])
    log = Log(time)
    one, two = time.of(0), time.of(1)
    one.at(0.1, log.ticks, one, "one", 0.2)
    two.at(0.2, log.ticks, two, "two", 0.2)
    time.common.at(0.35, log.add, time.common, "all")
    time.common.at(0.45, time.common.stop)
    time.run(10.0)
    assert log.seen == ["one@0.1", "one@0.3", "two@0.2", "all@0.35", "two@0.4"]


def test_what_regions_tell_is_heard_in_its_order_and_before_what_is_later() -> None:
    time = FleetTime([0, 1])
    log = Log(time)
    for at in (0.2, 0.6):
        log.tells(time.of(0), at)
    for at in (0.1, 0.4):
        log.tells(time.of(1), at)
    heard: list[list[float]] = []
    time.common.at(0.5, lambda: heard.append(list(log.times)))
    time.common.at(0.7, time.common.stop)
    time.run(10.0)
    assert heard == [[0.1, 0.2, 0.4]]
    assert log.times == [0.1, 0.2, 0.4, 0.6]


def test_what_a_region_has_done_later_is_not_before_the_others() -> None:
    time = FleetTime([0, 1])
    log = Log(time)
    one, two = time.of(0), time.of(1)
    one.at(0.1, time.later, one, 0.2, log.add, two, "late")
    two.at(0.6, log.add, two, "two")
    time.common.at(0.8, log.add, time.common, "all")
    time.common.at(0.9, time.common.stop)
    time.run(10.0)
    assert log.seen == ["two@0.6", "all@0.8", "late@0.8"]


def test_it_ends_at_its_time_or_when_it_is_stopped() -> None:
    time = FleetTime([0])
    time.run(3.5)
    assert time.common.now == 3.5
    stopped = FleetTime([0])
    region = stopped.of(0)
    region.at(2.25, lambda: stopped.tell(region.now, stopped.common.stop))
    stopped.run(9.0)
    assert stopped.common.now == 2.25
