"""When a PC pauses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.swarm.agent.pause_policy import (
    CONTENTION_REASON,
    DRAINED_REASON,
    PAUSE_DELAY_S,
    RESUME_DELAY_S,
    DailyWindow,
    DeviceContention,
    PausePolicy,
)

MINUTES = st.integers(0, 24 * 60 - 1)


@pytest.mark.parametrize(
    ("text", "minute", "holds"),
    [
        ("18:00-23:30", 18 * 60, True),
        ("18:00-23:30", 23 * 60 + 30, False),
        ("18:00-23:30", 17 * 60 + 59, False),
        ("22:00-06:00", 23 * 60, True),
        ("22:00-06:00", 0, True),
        ("22:00-06:00", 6 * 60, False),
        ("0:00-24:00", 12 * 60, True),
        (" 9:05-9:06 ", 9 * 60 + 5, True),
    ],
)
def test_daily_window_contains_its_minutes(text: str, minute: int, holds: bool) -> None:
    assert DailyWindow.parse(text).contains_minute(minute) is holds


@pytest.mark.parametrize(
    "text",
    ["", "18", "18:00", "18:00-18:00", "25:00-26:00", "10:60-11:00", "a:00-b:00", "1:00-24:30"],
)
def test_invalid_window_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="18:00-23:30"):
        DailyWindow.parse(text)


@given(begin=MINUTES, end=MINUTES, minute=MINUTES)
def test_window_and_its_complement_cover_the_day(begin: int, end: int, minute: int) -> None:
    if begin != end:
        time, rest = DailyWindow(begin, end), DailyWindow(end, begin)
        assert time.contains_minute(minute) is not rest.contains_minute(minute)
        assert DailyWindow.parse(str(time)) == time


def test_drain_and_daily_windows_pause() -> None:
    pausing = PausePolicy(["18:00-20:00", "23:00-1:00"])
    assert pausing.pause_reason(0) == "paused from 23:00 to 01:00"
    assert pausing.pause_reason(19 * 60) == "paused from 18:00 to 20:00"
    assert pausing.pause_reason(2 * 60) == ""
    pausing.drained = True
    assert pausing.pause_reason(2 * 60) == DRAINED_REASON


def watch(others: DeviceContention, share: float, begin: float, seconds: float) -> float:
    """Sample once a second for ``seconds``; returns the time of the last sample."""
    for second in range(1, int(seconds) + 1):
        others.observe_usage(share, begin + second)
    return begin + int(seconds)


def test_sustained_use_pauses_until_it_ends() -> None:
    others = DeviceContention()
    now = watch(others, 0.05, 0.0, 60)
    now = watch(others, 0.95, now, 5)
    assert not others.busy, "a short burst is not contention"
    now = watch(others, 0.0, now, 60)
    now = watch(others, 0.95, now, PAUSE_DELAY_S + 5)
    assert others.busy
    # A loading screen.
    now = watch(others, 0.05, now, RESUME_DELAY_S / 2)
    now = watch(others, 0.95, now, 30)
    now = watch(others, 0.05, now, RESUME_DELAY_S)
    assert others.busy, "the resume delay has not passed"
    watch(others, 0.05, now, 30)
    assert not others.busy


def test_moderate_use_changes_nothing() -> None:
    others = DeviceContention()
    now = watch(others, 0.25, 0.0, 600)
    assert not others.busy
    now = watch(others, 0.9, now, 60)
    assert others.busy
    watch(others, 0.25, now, 600)
    assert others.busy


def test_short_dip_does_not_end_contention() -> None:
    others = DeviceContention()
    for second in range(60):
        others.observe_usage(0.0 if second % 5 == 0 else 0.8, float(second))
    assert others.busy


def test_gap_between_samples_does_not_count() -> None:
    others = DeviceContention()
    others.observe_usage(0.9, 0.0)
    others.observe_usage(0.9, 3600.0)
    assert not others.busy
    now = watch(others, 0.9, 3600.0, 60)
    others.observe_usage(0.0, now + 3600)
    assert others.busy


@given(st.lists(st.floats(0, 1), max_size=300))
def test_contention_changes_only_after_a_delay(shares: list[float]) -> None:
    others, changes = DeviceContention(), [0]
    for second, share in enumerate(shares):
        was = others.busy
        others.observe_usage(share, float(second))
        if others.busy != was:
            assert second - changes[-1] >= (PAUSE_DELAY_S if others.busy else RESUME_DELAY_S)
            changes.append(second)


def test_contention_is_the_pause_reason() -> None:
    pausing = PausePolicy(["18:00-20:00"])
    pausing.contention.busy = True
    assert pausing.pause_reason(0) == CONTENTION_REASON
    assert pausing.pause_reason(19 * 60) == "paused from 18:00 to 20:00"
