from hypothesis import given
from hypothesis import strategies as st

from molink.ring.ticks import TickSet


@given(st.lists(st.integers(1, 30)))
def test_is_a_set(ticks: list[int]) -> None:
    done = TickSet()
    for tick in ticks:
        done.add(tick)
    assert {tick for tick in range(1, 40) if tick in done} == set(ticks)
    assert 0 in done
    assert done.missing(range(40)) == set(range(1, 40)) - set(ticks)
    assert len(done) + done.watermark == len(set(ticks))


@given(st.permutations(range(1, 30)))
def test_remembers_nothing_below_the_watermark(ticks: list[int]) -> None:
    done = TickSet()
    for tick in ticks:
        done.add(tick)
    assert (done.watermark, len(done)) == (29, 0)
