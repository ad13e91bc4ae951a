"""Reports that go round the ring: links, slowdowns, host memory."""

import math
from array import array
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from molink.errors import WireError
from molink.facts.profile import MAX_SLOWDOWN, UNKNOWN_PROFILE, Profile, Slowdown
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.ring.ring import Ring, RingConfig
from molink.ring.ring_measurements import (
    LOT_SECONDS,
    MAX_BURST,
    MIN_INTERVAL,
    NO_HOST_MEMORY,
    NUM_LOTS,
    REPORT_INTERVAL,
    REPORT_THRESHOLD,
    HostMemory,
    HostMemoryReports,
    LinkReports,
    SlowdownMeter,
    SlowdownReports,
    StepSlowdown,
)
from molink.ring.scheduler_bridge import SchedulerBridge
from molink.ring.scoreboard import HostBlockLedger, Scoreboard, ScoreboardLimits
from molink.ring.stage import StageShape
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.data_plane import (
    Admit,
    BlockTable,
    Channel,
    Frame,
    HostMemoryReport,
    LinkReport,
    RequestSlice,
    SamplingParams,
    SlowdownReport,
    SwapIn,
    SwapOut,
    Tombstone,
    Volume,
)
from molinkd.worker.request_table import RequestTable

FACTS = LinkFacts(0.03, 12.5e6)
NOTHING = LinkFacts()


def rate(value: float) -> LinkFacts:
    return LinkFacts(FACTS.latency, value)


# --- one stage -------------------------------------------------------------------------------


def test_link_reports_are_rate_limited() -> None:
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


def test_unknown_rate_is_reported_as_zero() -> None:
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


def test_report_stops_before_its_origin() -> None:
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
def test_invalid_link_reports_are_ignored(report: LinkReport) -> None:
    one = LinkReports(1, 3)
    assert not one.accept_report(report)
    assert one.links == (NOTHING,) * 3


@pytest.mark.parametrize(
    "wrong", [[-1, 0.1, 1.0], [256, 0.1, 1.0], [0, 601.0, 1.0], [0, 0.1, 2e12]]
)
def test_invalid_reports_do_not_decode(wrong: list[float]) -> None:
    good = msgspec.msgpack.encode(Frame(1, Channel.DECODE, 0, LinkReport(1, 0.1, 1.0)))
    raw = msgspec.msgpack.decode(good)
    raw[-1][1:] = wrong
    with pytest.raises(WireError):
        data_codec().decode([msgspec.msgpack.encode(raw)])


# --- a ring ----------------------------------------------------------------------------------


class Outlet:
    """Sends to the next stage through ``wire``, which holds the messages in flight."""

    is_full = False

    def __init__(self, wire: deque[tuple[int, Any]], to: int) -> None:
        self._wire = wire
        self._to = to

    def send_control(self, body: Any, payload: Any = None) -> None:
        self._wire.append((self._to, body))


class IdleScheduler:
    """A scheduler without batches that records the ring's links."""

    def __init__(self) -> None:
        self.links: tuple[LinkFacts, ...] = ()

    def next_batch(self, now: float, prefill: bool = True) -> None:
        return None

    def set_times(self, times: RingTimes) -> None:
        self.links = tuple(times.links)

    def set_host_memory(self, blocks: int, block_s: float) -> None:
        pass


class Circle:
    """Real shells of a ring of ``stages`` stages."""

    def __init__(self, stages: int) -> None:
        self.wire: deque[tuple[int, Any]] = deque()
        self.scheduler = IdleScheduler()
        self.passed = 0
        receiver: Any = SimpleNamespace(deliver_emissions=lambda *_: None, close=lambda: None)
        executor: Any = None
        self.rings = []
        for index in range(stages):
            shape = StageShape(index, stages, 2, 10, "f32")
            scheduler: Any = self.scheduler
            bridge = SchedulerBridge(scheduler, receiver, 10) if index == 0 else None
            config = RingConfig(shape, UNKNOWN_PROFILE)
            ring = Ring(config, RequestTable(), executor, bridge, lambda: 0.0, pytest.fail)
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
    assert circle.scheduler.links == facts
    assert all(ring.num_strays == 0 for ring in circle.rings)


def test_link_change_goes_round_the_ring() -> None:
    circle = Circle(3)
    circle.rings[1].on_link_measured(FACTS, 0.0)
    circle.deliver()
    circle.rings[1].on_link_measured(rate(2.5e6), 0.5)
    circle.rings[1].on_link_measured(rate(2.5e6), 1.0)
    circle.deliver()
    assert circle.passed == 4
    assert circle.scheduler.links == (NOTHING, rate(2.5e6), NOTHING)


@pytest.mark.parametrize("report", [LinkReport(1, 0.1, 1e6), LinkReport(7, 0.1, 1e6)])
def test_stray_messages_are_counted_and_dropped(report: LinkReport) -> None:
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


def test_report_flood_ends_at_the_next_stage() -> None:
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


def test_closed_ring_reports_nothing() -> None:
    circle = Circle(2)
    circle.rings[1].close()
    circle.rings[1].on_link_measured(FACTS, 0.0)
    assert not circle.wire


def test_single_stage_reports_nothing() -> None:
    circle = Circle(1)
    circle.rings[0].on_link_measured(FACTS, 0.0)
    assert circle.scheduler.links == ()
    assert circle.rings[0].links == (NOTHING,)


PROFILE = Profile(
    decode=((1, 0.01), (8, 0.02)),
    prefill=((16, 0.02), (64, 0.08), (256, 0.32)),
    tile=32,
    prefill_token_s=1e-6,
)


def volume(rows: int, *, prefill: bool, start: int = 0) -> Volume:
    if prefill:
        slices: tuple[RequestSlice, ...] = (RequestSlice(0, start, rows, 1),)
    else:
        slices = tuple(RequestSlice(index, start, 1, 1) for index in range(rows))
    return Volume(9, prefill, slices, Payload("i32", (rows,)))


def steps(measure: StepSlowdown, slowdown: float, since: float, seconds: float) -> list[float]:
    """Run steps of 0.1 s; returns the times of reported changes."""
    times = [since + 0.1 * step for step in range(round(seconds / 0.1))]
    return [now for now in times if measure.add_step(0.1 * slowdown, 0.1, now)]


def test_lasting_slowdown_is_reported() -> None:
    measure = StepSlowdown()
    assert steps(measure, 1.1, 0.0, 20.0) == []
    assert measure.is_known
    assert measure.reported == 1.0
    changed = steps(measure, 3.0, 20.0, 20.0)
    assert 1 <= len(changed) <= 2, "the lot in which it changed may be the median for a moment"
    assert all(
        LOT_SECONDS * NUM_LOTS / 2 - LOT_SECONDS <= at - 20.0 <= LOT_SECONDS * (NUM_LOTS + 1)
        for at in changed
    )
    assert measure.reported == pytest.approx(3.0, rel=REPORT_THRESHOLD)
    assert 1 <= len(steps(measure, 1.0, 40.0, 20.0)) <= 2
    assert measure.reported == pytest.approx(1.0, rel=REPORT_THRESHOLD)


def test_transient_slowdown_is_not_reported() -> None:
    measure = StepSlowdown()
    steps(measure, 1.0, 0.0, 10.0)
    for round_ in range(10):
        began = 10.0 + 6.0 * round_
        assert steps(measure, 8.0, began, 1.5) == []
        assert steps(measure, 1.0, began + 1.5, 4.5) == []


def test_only_changes_beyond_the_threshold_are_reported() -> None:
    below, above = StepSlowdown(), StepSlowdown()
    assert steps(below, 1 + 0.9 * REPORT_THRESHOLD, 0.0, 60.0) == []
    assert len(steps(above, 1 + 1.1 * REPORT_THRESHOLD, 0.0, 60.0)) == 1
    assert len(steps(StepSlowdown(), 0.5, 0.0, 60.0)) == 1, (
        "quicker than the profile counts as well"
    )


def test_long_steps_are_one_lot_each() -> None:
    measure = StepSlowdown()
    told = [step for step in range(20) if measure.add_step(6.0, 2.0, 10.0 * step)]
    assert told == [NUM_LOTS - 1]
    assert not measure.add_step(6.0, 2.0, 4000.0)
    assert measure.reported == pytest.approx(3.0)


def run(meter: SlowdownMeter, volumes: list[Volume], seconds: float, since: float) -> list[float]:
    changed = []
    for step in range(20):
        if meter.add_step(volumes, seconds, since + step):
            changed.append(since + step)
    return changed


def test_a_profile_of_a_busy_pc_stays_corrected() -> None:
    meter = SlowdownMeter(PROFILE)
    assert run(meter, [volume(8, prefill=False)], 0.01, 0.0)
    assert meter.decode_slowdown(20.0) == meter.decode_slowdown(9999.0) == 0.5


def test_decode_and_prefill_slowdowns_are_separate() -> None:
    meter = SlowdownMeter(PROFILE)
    assert meter.decode_slowdown(0.0) == 0.0, "nothing is measured"
    assert run(meter, [volume(8, prefill=False)], 0.04, 0.0)
    # 33 rows are two tiles.
    assert not run(meter, [volume(33, prefill=True, start=1000)], 0.08 + 0.064, 100.0)
    assert meter.slowdown == Slowdown(2.0, 1.0)
    assert meter.decode_slowdown(20.0) == 2.0
    assert meter.decode_slowdown(100.0) == 0.0, "it may have ended"
    assert run(meter, [volume(64, prefill=True)], 0.16, 200.0)
    assert meter.slowdown == Slowdown(2.0, 2.0)


@pytest.mark.parametrize(
    "volumes",
    [
        [volume(2, prefill=False), volume(64, prefill=True)],
        [volume(9, prefill=False)],
        [volume(4, prefill=True)],
        [volume(257, prefill=True)],
    ],
)
def test_steps_outside_the_profile_do_not_count(volumes: list[Volume]) -> None:
    assert run(SlowdownMeter(PROFILE), volumes, 9.0, 0.0) == []


def test_without_a_profile_nothing_is_measured() -> None:
    meter = SlowdownMeter(UNKNOWN_PROFILE)
    assert run(meter, [volume(1, prefill=False)], 9.0, 0.0) == []
    assert meter.slowdown == Slowdown()


def test_any_step_time_gives_a_valid_slowdown() -> None:
    measure = StepSlowdown()
    steps(measure, 1e9, 0.0, 60.0)
    assert measure.reported == MAX_SLOWDOWN
    steps(measure, 0.0, 100.0, 60.0)
    assert measure.reported == 1 / MAX_SLOWDOWN


def test_slowdown_scales_a_profile() -> None:
    paced = Slowdown(2.0, 3.0).apply_to(PROFILE)
    assert paced.decode_s(1) == pytest.approx(2 * PROFILE.decode_s(1))
    assert paced.prefill_s(64, 100) == pytest.approx(3 * PROFILE.prefill_s(64, 100))


def test_every_stage_knows_every_slowdown() -> None:
    rounds = [SlowdownReports(stage, 3) for stage in range(3)]
    report = rounds[1].make_report(Slowdown(2.0, 3.0))
    assert report == SlowdownReport(1, 2.0, 3.0)
    assert all(rounds[stage].accept_report(report) for stage in (2, 0))
    assert [rounds[stage].should_forward(1, 0.0) for stage in (2, 0)] == [True, False]
    assert all(one.slowdowns == (Slowdown(), Slowdown(2.0, 3.0), Slowdown()) for one in rounds)


@pytest.mark.parametrize(
    "report",
    [SlowdownReport(1, 1.0, 1.0), SlowdownReport(3, 1.0, 1.0), SlowdownReport(0, math.nan, 1.0)],
)
def test_invalid_slowdown_reports_are_ignored(report: SlowdownReport) -> None:
    one = SlowdownReports(1, 3)
    assert not one.accept_report(report)
    assert one.slowdowns == (Slowdown(),) * 3


@pytest.mark.parametrize(
    "change", [{"decode": 0.0}, {"prefill": MAX_SLOWDOWN + 1}, {"decode": -1.0}, {"stage": 256}]
)
def test_invalid_slowdown_does_not_decode(change: dict[str, Any]) -> None:
    good = msgspec.msgpack.encode(Frame(1, Channel.DECODE, 0, SlowdownReport(1, 2.0, 0.5)))
    assert data_codec().decode([good])
    raw = msgspec.msgpack.decode(good)
    fields = ["type", "stage", "decode", "prefill"]
    body = raw[-1] if isinstance(raw, list) else raw["body"]
    for name, value in change.items():
        if isinstance(body, list):
            body[fields.index(name)] = value
        else:
            body[name] = value
    with pytest.raises(WireError):
        data_codec().decode([msgspec.msgpack.encode(raw)])


LIMITS = ScoreboardLimits(blocks=8, block_size=4, host_blocks=4)


def ids(*numbers: int) -> tuple[Payload, bytes]:
    """Payload of KV block ids, followed by host block ids."""
    return Payload("i32", (2, len(numbers) // 2)), array("i", numbers).tobytes()


def scoreboard() -> Scoreboard:
    """A scoreboard on which request 0 has the blocks 2 and 5."""
    found = Scoreboard(LIMITS)
    found.on_message(Admit(1, 0, SamplingParams(), 3), None, 0.0)
    found.on_message(BlockTable(2, 0, Payload("i32", (2,))), array("i", [2, 5]).tobytes(), 0.0)
    found.complete_volumes((), 0.0)
    return found


def refused(found: Scoreboard) -> bool:
    (control,) = found.complete_volumes((), 0.0)
    found.validate()
    return isinstance(control.body, Tombstone)


@pytest.mark.parametrize(
    "numbers",
    [
        (2, 5, 0, 0),
        (2, 2, 0, 1),
        (2, 8, 0, 1),
        (2, 5, 0, 4),
        (2, 5, -1, 1),
        (-1, 5, 0, 1),
        (2, 5, 6, 0, 1, 2),
        (),
    ],
)
def test_invalid_swap_out_is_rejected(numbers: tuple[int, ...]) -> None:
    found = scoreboard()
    payload, data = ids(*numbers)
    found.on_message(SwapOut(3, 0, payload), data, 0.0)
    assert refused(found)
    assert found.counters["bad_swaps"] == 1


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        (Payload("i32", (4,)), b"\0" * 16),
        (Payload("f32", (2, 1)), b"\0" * 8),
        (Payload("i32", (2, 1)), b"\0" * 4),
        (Payload("i32", (2, 1)), None),
    ],
)
def test_swap_with_an_invalid_payload_is_rejected(payload: Payload, data: Any) -> None:
    found = scoreboard()
    found.on_message(SwapOut(3, 0, payload), data, 0.0)
    assert refused(found)


def test_swap_of_a_finished_or_running_request_is_rejected() -> None:
    found = scoreboard()
    payload, data = ids(2, 0)
    found.on_message(SwapOut(3, 7, payload), data, 0.0)
    assert refused(found)
    found.on_message(Volume(4, False, (RequestSlice(0, 3, 1, 2),), Payload("i32", (1,))), (9,), 0.0)
    assert found.next_step(0.0) is not None
    found.on_message(SwapOut(5, 0, payload), data, 0.0)
    assert refused(found)
    found.complete_volumes((4,), 0.0)
    found.on_message(SwapOut(6, 0, payload), data, 0.0)
    assert not refused(found)


@pytest.mark.parametrize(
    ("filled", "numbers", "runs"),
    [
        (3, (2, 5, 0, 1), True),
        (9, (2, 5, 0, 1), False),  # these host blocks were filled by another order, or never
        (3, (2, 5, 0, 2), False),
        (3, (2, 5, 0, 0), False),
        (3, (2, 8, 0, 1), False),
    ],
)
def test_rows_run_only_after_a_valid_swap_in(
    filled: int, numbers: tuple[int, ...], runs: bool
) -> None:
    found = scoreboard()
    payload, data = ids(2, 5, 0, 1)
    found.on_message(SwapOut(3, 0, payload), data, 0.0)
    assert not refused(found)
    found.on_message(Admit(4, 1, SamplingParams(), 3), None, 0.0)
    found.on_message(BlockTable(5, 1, Payload("i32", (2,))), array("i", [2, 5]).tobytes(), 0.0)
    found.complete_volumes((), 0.0)
    payload, data = ids(*numbers)
    found.on_message(SwapIn(6, 1, filled, payload), data, 0.0)
    assert refused(found) is not runs
    found.on_message(Volume(7, False, (RequestSlice(1, 7, 1, 6),), Payload("i32", (1,))), (9,), 0.0)
    assert (found.next_step(0.0) is not None) is runs


def test_swapped_in_blocks_are_gone_from_host_memory() -> None:
    ledger = HostBlockLedger(4)
    assert ledger.fill_blocks(3, (0, 1))
    assert ledger.drain_blocks(3, (1,))
    assert not ledger.drain_blocks(3, (0, 1))
    assert ledger.drain_blocks(3, (0,))


def test_host_memory_is_the_minimum_of_all_stages() -> None:
    rounds = HostMemoryReports(0, 3)
    report = rounds.make_report(HostMemory(40, 0.001))
    assert report == HostMemoryReport(0, 40, 0.001)
    assert rounds.accept_report(HostMemoryReport(1, 30, 0.004))
    assert rounds.common_memory == NO_HOST_MEMORY
    assert rounds.accept_report(HostMemoryReport(2, 50, 0.002))
    assert rounds.common_memory == HostMemory(30, 0.004)
    # Stage 0 is the receiver itself.
    assert not rounds.accept_report(HostMemoryReport(0, 1, 0.0))
    assert not rounds.accept_report(HostMemoryReport(3, 1, 0.0))
    assert not rounds.accept_report(HostMemoryReport(1, 1, float("nan")))
    rounds.accept_report(HostMemoryReport(1, 10, 0.0))  # each stage's first report counts
    assert rounds.common_memory.blocks == 30
