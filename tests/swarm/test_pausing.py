"""When a PC holds no layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.swarm.pausing import DRAINED, DailyTime, Pausing

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
def test_a_time_of_each_day(text: str, minute: int, holds: bool) -> None:
    assert DailyTime.parse(text).holds(minute) is holds


@pytest.mark.parametrize(
    "text",
    ["", "18", "18:00", "18:00-18:00", "25:00-26:00", "10:60-11:00", "a:00-b:00", "1:00-24:30"],
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="18:00-23:30"):
        DailyTime.parse(text)


@given(begin=MINUTES, end=MINUTES, minute=MINUTES)
def test_a_time_and_its_rest_are_the_day(begin: int, end: int, minute: int) -> None:
    if begin != end:
        time, rest = DailyTime(begin, end), DailyTime(end, begin)
        assert time.holds(minute) is not rest.holds(minute)
        assert DailyTime.parse(str(time)) == time


def test_the_user_and_the_day() -> None:
    pausing = Pausing(["18:00-20:00", "23:00-1:00"])
    assert pausing.reason(0) == "paused from 23:00 to 01:00"
    assert pausing.reason(19 * 60) == "paused from 18:00 to 20:00"
    assert pausing.reason(2 * 60) == ""
    pausing.drained = True
    assert pausing.reason(2 * 60) == DRAINED
