"""Which seconds count."""

from hypothesis import given
from hypothesis import strategies as st

from molink.swarm.running_time import STANDSTILL, RunningTime


def test_a_standstill_does_not_count() -> None:
    time = RunningTime(100.0)
    assert time.at(100.5) == 100.5
    assert time.at(130.5) == 100.5
    assert time.at(131.0) == 101.0
    assert time.lost == 30.0


@given(st.lists(st.integers(0, 16)))
def test_it_never_goes_back_nor_ahead_of_the_clock(steps: list[int]) -> None:
    time, now, counted = RunningTime(0.0), 0.0, 0.0
    for step in (each / 4 for each in steps):
        now += step
        before, counted = counted, time.at(now)
        assert counted - before == (0.0 if step > STANDSTILL else step)
    assert now - counted == time.lost
