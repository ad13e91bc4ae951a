"""Which seconds count."""

from hypothesis import given
from hypothesis import strategies as st

from molink.swarm.running_time import MAX_STEP, RunningTime


def test_standstill_is_skipped() -> None:
    time = RunningTime(100.0)
    assert time.counted_time(100.5) == 100.5
    assert time.counted_time(130.5) == 100.5
    assert time.counted_time(131.0) == 101.0
    assert time.skipped_s == 30.0


@given(st.lists(st.integers(0, 16)))
def test_running_time_never_decreases_nor_exceeds_the_clock(steps: list[int]) -> None:
    time, now, counted = RunningTime(0.0), 0.0, 0.0
    for step in (each / 4 for each in steps):
        now += step
        before, counted = counted, time.counted_time(now)
        assert counted - before == (0.0 if step > MAX_STEP else step)
    assert now - counted == time.skipped_s
