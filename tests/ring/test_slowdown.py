"""A stage that becomes slower says so, and every stage and the head know."""

import math
from typing import Any

import msgspec
import pytest

from molink.errors import WireError
from molink.facts.profile import UNKNOWN_PROFILE, Profile
from molink.facts.slowdown import MAX_SLOWDOWN, Slowdown
from molink.ring.slowdown import (
    LOT_SECONDS,
    NUM_LOTS,
    REPORT_THRESHOLD,
    SlowdownMeter,
    SlowdownReports,
    StepSlowdown,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import data_codec
from molink.wire.messages.data_plane import Channel, Frame, RequestSlice, Volume
from molink.wire.messages.ring_reports import SlowdownReport

PROFILE = Profile(
    decode=((1, 0.01), (8, 0.02)),
    prefill=((16, 0.02), (64, 0.08), (256, 0.32)),
    tile=32,
    prefill_token_s=1e-6,
)


def volume(rows: int, *, prefill: bool, start: int = 0) -> Volume:
    if prefill:
        groups: tuple[RequestSlice, ...] = (RequestSlice(0, start, rows, 1),)
    else:
        groups = tuple(RequestSlice(index, start, 1, 1) for index in range(rows))
    return Volume(9, prefill, groups, Payload("i32", (rows,)))


def steps(measure: StepSlowdown, pace: float, since: float, seconds: float) -> list[float]:
    """Steps of 0.1 s; when each news came."""
    times = [since + 0.1 * step for step in range(round(seconds / 0.1))]
    return [now for now in times if measure.add_step(0.1 * pace, 0.1, now)]


def test_a_pace_that_stays_is_told() -> None:
    measure = StepSlowdown()
    assert steps(measure, 1.1, 0.0, 20.0) == []
    assert measure.is_known
    assert measure.reported == 1.0
    news = steps(measure, 3.0, 20.0, 20.0)
    assert 1 <= len(news) <= 2, "the lot in which it changed may be the median for a moment"
    assert all(
        LOT_SECONDS * NUM_LOTS / 2 - LOT_SECONDS <= at - 20.0 <= LOT_SECONDS * (NUM_LOTS + 1)
        for at in news
    )
    assert measure.reported == pytest.approx(3.0, rel=REPORT_THRESHOLD)
    assert 1 <= len(steps(measure, 1.0, 40.0, 20.0)) <= 2
    assert measure.reported == pytest.approx(1.0, rel=REPORT_THRESHOLD)


def test_what_passes_is_no_news() -> None:
    measure = StepSlowdown()
    steps(measure, 1.0, 0.0, 10.0)
    for round_ in range(10):
        began = 10.0 + 6.0 * round_
        assert steps(measure, 8.0, began, 1.5) == []
        assert steps(measure, 1.0, began + 1.5, 4.5) == []


def test_a_departure_below_the_bound_never_counts_and_one_above_does() -> None:
    below, above = StepSlowdown(), StepSlowdown()
    assert steps(below, 1 + 0.9 * REPORT_THRESHOLD, 0.0, 60.0) == []
    assert len(steps(above, 1 + 1.1 * REPORT_THRESHOLD, 0.0, 60.0)) == 1
    assert len(steps(StepSlowdown(), 0.5, 0.0, 60.0)) == 1, (
        "quicker than the profile counts as well"
    )


def test_slow_steps_are_a_lot_each_and_an_hour_without_any_changes_nothing() -> None:
    measure = StepSlowdown()
    told = [step for step in range(20) if measure.add_step(6.0, 2.0, 10.0 * step)]
    assert told == [NUM_LOTS - 1]
    assert not measure.add_step(6.0, 2.0, 4000.0)
    assert measure.reported == pytest.approx(3.0)


def run(meter: SlowdownMeter, volumes: list[Volume], seconds: float, since: float) -> list[float]:
    news = []
    for step in range(20):
        meter.begin_step(volumes)
        if meter.end_step(seconds, since + step):
            news.append(since + step)
    return news


def test_decode_and_prefill_steps_have_a_pace_of_their_own() -> None:
    meter = SlowdownMeter(PROFILE)
    assert meter.decode_slowdown == 0.0, "nothing is measured"
    assert run(meter, [volume(8, prefill=False)], 0.04, 0.0)
    # 33 rows are two tiles.
    assert not run(meter, [volume(33, prefill=True, start=1000)], 0.08 + 0.064, 100.0)
    assert meter.slowdown == Slowdown(2.0, 1.0)
    assert meter.decode_slowdown == 2.0
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
def test_steps_of_which_the_profile_says_little_do_not_count(volumes: list[Volume]) -> None:
    assert run(SlowdownMeter(PROFILE), volumes, 9.0, 0.0) == []


def test_without_a_profile_nothing_is_measured() -> None:
    meter = SlowdownMeter(UNKNOWN_PROFILE)
    assert run(meter, [volume(1, prefill=False)], 9.0, 0.0) == []
    assert meter.slowdown == Slowdown()


def test_whatever_a_step_takes_what_is_told_is_a_pace() -> None:
    measure = StepSlowdown()
    steps(measure, 1e9, 0.0, 60.0)
    assert measure.reported == MAX_SLOWDOWN
    steps(measure, 0.0, 100.0, 60.0)
    assert measure.reported == 1 / MAX_SLOWDOWN


def test_a_pace_of_a_profile() -> None:
    paced = Slowdown(2.0, 3.0).apply_to(PROFILE)
    assert paced.decode_s(1) == pytest.approx(2 * PROFILE.decode_s(1))
    assert paced.prefill_s(64, 100) == pytest.approx(3 * PROFILE.prefill_s(64, 100))


def test_every_stage_knows_every_pace() -> None:
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
def test_a_report_that_makes_no_sense_changes_nothing(report: SlowdownReport) -> None:
    one = SlowdownReports(1, 3)
    assert not one.accept_report(report)
    assert one.slowdowns == (Slowdown(),) * 3


@pytest.mark.parametrize(
    "change", [{"decode": 0.0}, {"prefill": MAX_SLOWDOWN + 1}, {"decode": -1.0}, {"stage": 256}]
)
def test_what_is_no_pace_is_not_decoded(change: dict[str, Any]) -> None:
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
