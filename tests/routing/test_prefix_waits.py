"""Waits of prompts that begin alike: when they have doubled."""

from molink.routing.prefix_waits import MIN_WAITS, PrefixWaits

HALF = 90.0


def wait(waits: PrefixWaits, seconds: float, at: float, count: int = MIN_WAITS) -> None:
    for _ in range(count):
        waits.add_wait(7, seconds, at)


def test_twice_as_long_as_before_and_longer_than_it_is_worth() -> None:
    waits = PrefixWaits(HALF)
    wait(waits, 1.0, 0.0)
    wait(waits, 3.0, HALF)
    assert not waits.has_doubled(7, 4.0, HALF)
    assert waits.has_doubled(7, 2.0, HALF)
    assert not waits.has_doubled(7, 2.0, HALF), "once in a half"


def test_where_nothing_is_known_of_before_nothing_has_doubled() -> None:
    waits = PrefixWaits(HALF)
    assert not waits.has_doubled(7, 0.0, 0.0)
    wait(waits, 9.0, 0.0)
    assert not waits.has_doubled(7, 0.0, 0.0)
    wait(waits, 99.0, 2 * HALF)
    assert not waits.has_doubled(7, 0.0, 2 * HALF), "the half before is not known"
    wait(waits, 1.0, 3 * HALF, MIN_WAITS - 1)
    wait(waits, 99.0, 4 * HALF)
    assert not waits.has_doubled(7, 0.0, 4 * HALF), "too few told of it"
