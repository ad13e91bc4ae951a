"""How every stage comes to know every link of the ring."""

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from molink.errors import WireError
from molink.facts.profile import UNKNOWN_PROFILE
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.ring.link_reports import REPORT_INTERVAL, LinkReports
from molink.ring.report_forwarder import MAX_BURST, MIN_INTERVAL
from molink.ring.ring import Ring, RingConfig
from molink.ring.scheduler_bridge import SchedulerBridge
from molink.ring.stage import StageShape
from molink.wire.messages.codec import data_codec
from molink.wire.messages.data_plane import Channel, Frame
from molink.wire.messages.ring_reports import LinkReport
from molinkd.worker.request_table import RequestTable

FACTS = LinkFacts(0.03, 12.5e6)
NOTHING = LinkFacts()


def rate(value: float) -> LinkFacts:
    return LinkFacts(FACTS.latency, value)


# --- one stage -------------------------------------------------------------------------------


def test_when_a_stage_reports() -> None:
    one = LinkReports(1, 3)
    assert one.make_report(NOTHING, 0.0) is None
    assert one.make_report(FACTS, 0.0) == LinkReport(1, 0.03, 12.5e6)
    assert one.links == (NOTHING, FACTS, NOTHING)
    assert one.make_report(rate(12.6e6), 100.0) is None, "hardly a change"
    assert one.make_report(rate(13e6), REPORT_INTERVAL - 0.01) is None, "a small one can wait"
    assert one.make_report(rate(13e6), REPORT_INTERVAL) is not None
    assert one.make_report(rate(2.5e6), REPORT_INTERVAL + MIN_INTERVAL - 0.01) is None
    assert one.links[1] == rate(2.5e6), "here it is known at once"
    assert one.make_report(rate(2.5e6), REPORT_INTERVAL + MIN_INTERVAL) == LinkReport(
        1, 0.03, 2.5e6
    )


def test_an_unknown_rate_is_reported_as_such() -> None:
    one = LinkReports(0, 2)
    assert one.make_report(LinkFacts(0.03), 0.0) == LinkReport(0, 0.03, 0.0)
    other = LinkReports(1, 2)
    assert other.accept_report(LinkReport(0, 0.03, 0.0))
    assert other.links == (LinkFacts(0.03), NOTHING)
    assert one.make_report(FACTS, MIN_INTERVAL) == LinkReport(0, 0.03, 12.5e6)


def test_a_ring_of_one_stage_has_no_links() -> None:
    alone = LinkReports(0, 1)
    assert alone.make_report(FACTS, 0.0) is None
    assert not alone.accept_report(LinkReport(0, 0.03, 1e6))
    assert alone.links == (NOTHING,)


def test_the_stage_before_its_origin_does_not_pass_a_report_on() -> None:
    assert [LinkReports(stage, 3).should_forward(0, 0.0) for stage in (1, 2)] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    "report",
    [
        LinkReport(3, 0.03, 1e6),
        LinkReport(255, 0.03, 1e6),
        LinkReport(1, 0.03, 1e6),
        LinkReport(0, math.nan, 1e6),
        LinkReport(0, 0.03, math.inf),
        LinkReport(0, -1.0, 1e6),
        LinkReport(0, 0.03, 5e-324),
    ],
)
def test_a_report_that_makes_no_sense_changes_nothing(report: LinkReport) -> None:
    one = LinkReports(1, 3)
    assert not one.accept_report(report)
    assert one.links == (NOTHING,) * 3


@pytest.mark.parametrize(
    "wrong", [[-1, 0.1, 1.0], [256, 0.1, 1.0], [0, 601.0, 1.0], [0, 0.1, 2e12]]
)
def test_some_never_come_through_the_codec(wrong: list[float]) -> None:
    good = msgspec.msgpack.encode(Frame(1, Channel.DECODE, 0, LinkReport(1, 0.1, 1.0)))
    raw = msgspec.msgpack.decode(good)
    raw[-1][1:] = wrong
    with pytest.raises(WireError):
        data_codec().decode([msgspec.msgpack.encode(raw)])


# --- a ring ----------------------------------------------------------------------------------


class Outlet:
    """Leads to the next stage's :meth:`Ring.arrive`; what is on the way waits in ``wire``."""

    is_full = False

    def __init__(self, wire: deque[tuple[int, Any]], to: int) -> None:
        self._wire = wire
        self._to = to

    def send_control(self, body: Any, payload: Any = None) -> None:
        self._wire.append((self._to, body))


class FakeHead:
    """Has nothing to do but to hear of links."""

    def __init__(self) -> None:
        self.links: tuple[LinkFacts, ...] = ()

    def next_batch(self, now: float, prefill: bool = True) -> None:
        return None

    def set_times(self, times: RingTimes) -> None:
        self.links = tuple(times.links)

    def set_host_memory(self, blocks: int, block_s: float) -> None:
        pass


class Circle:
    """Real rings of ``stages`` stages."""

    def __init__(self, stages: int) -> None:
        self.wire: deque[tuple[int, Any]] = deque()
        self.head = FakeHead()
        self.passed = 0
        desk: Any = SimpleNamespace(deliver_emissions=lambda *_: None, close=lambda: None)
        executor: Any = None
        self.rings = []
        for index in range(stages):
            shape = StageShape(index, stages, 2, 10, "f32")
            head: Any = self.head
            front = SchedulerBridge(head, desk, 10) if index == 0 else None
            config = RingConfig(shape, UNKNOWN_PROFILE)
            ring = Ring(config, RequestTable(), executor, front, lambda: 0.0, pytest.fail)
            outlet: Any = Outlet(self.wire, (index + 1) % stages)
            ring.open(outlet if stages > 1 else None)
            self.rings.append(ring)

    def deliver(self) -> None:
        while self.wire:
            to, body = self.wire.popleft()
            self.passed += 1
            self.rings[to].on_message(body, None)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_every_stage_knows_every_link(stages: int) -> None:
    circle = Circle(stages)
    facts = tuple(LinkFacts(0.01 * (index + 1), 1e6 * (index + 1)) for index in range(stages))
    for ring, own in zip(circle.rings, facts, strict=True):
        ring.on_link_measured(own, 0.0)
    circle.deliver()
    assert circle.passed == stages * (stages - 1)
    assert all(ring.links == facts for ring in circle.rings)
    assert circle.head.links == facts
    assert all(ring.num_strays == 0 for ring in circle.rings)


def test_a_change_goes_round_as_well() -> None:
    circle = Circle(3)
    circle.rings[1].on_link_measured(FACTS, 0.0)
    circle.deliver()
    circle.rings[1].on_link_measured(rate(2.5e6), 0.5)
    circle.rings[1].on_link_measured(rate(2.5e6), 1.0)
    circle.deliver()
    assert circle.passed == 4
    assert circle.head.links == (NOTHING, rate(2.5e6), NOTHING)


@pytest.mark.parametrize("report", [LinkReport(1, 0.1, 1e6), LinkReport(7, 0.1, 1e6)])
def test_strays_are_counted_and_go_nowhere(report: LinkReport) -> None:
    circle = Circle(3)
    circle.rings[1].on_message(report, None)
    assert circle.rings[1].num_strays == 1
    assert not circle.wire
    assert circle.rings[1].links == (NOTHING,) * 3


def test_a_report_never_goes_round_twice() -> None:
    circle = Circle(4)
    for index, ring in enumerate(circle.rings):
        for stage in range(4):
            if stage != index:
                ring.on_message(LinkReport(stage, 0.1, 1e6), None)
    circle.deliver()
    assert circle.passed <= 4 * 3 * 2


def test_a_flood_of_reports_ends_at_the_next_stage() -> None:
    now = 0.0
    one = LinkReports(1, 3)
    passed = 0
    for step in range(10_000):
        now = step / 1000
        report = LinkReport(0, 0.1, 1e6 + step)
        passed += one.accept_report(report) and one.should_forward(0, now)
    assert passed <= 2 * now / MIN_INTERVAL
    assert one.links[0].rate == 1e6 + 9999, "here the last one counts"
    now += MAX_BURST * MIN_INTERVAL
    late = [one.should_forward(0, now) for _ in range(MAX_BURST)]
    assert all(late), "honest ones may come together"


def test_a_ring_that_has_been_left_says_nothing() -> None:
    circle = Circle(2)
    circle.rings[1].close()
    circle.rings[1].on_link_measured(FACTS, 0.0)
    assert not circle.wire


def test_a_stage_alone() -> None:
    circle = Circle(1)
    circle.rings[0].on_link_measured(FACTS, 0.0)
    assert circle.head.links == ()
    assert circle.rings[0].links == (NOTHING,)
