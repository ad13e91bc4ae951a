import math

import pytest

from molink.link.heartbeat import IDLE_STALL, PATIENCE, STALL, BeatClock, Liveness, RoundTrip

RATE = 1e7


def look(liveness: Liveness, start: float, stop: float, busy: bool = True) -> str | None:
    """Look twice a second from ``start`` to ``stop``."""
    now = start
    while now <= stop:
        reason = liveness.death(now, busy)
        if reason is not None:
            return f"{now:.1f}: {reason}"
        now += 0.5
    return None


def test_when_to_beat() -> None:
    clock = BeatClock(10.0)
    assert clock.next_at(busy=False) == 10.0
    clock.beat(10.0)
    assert clock.next_at(busy=False) == 11.0
    assert clock.next_at(busy=True) == 10.1


def test_a_stage_that_beats_and_has_nothing_to_do_lives() -> None:
    liveness = Liveness(0.0)
    for second in range(100):
        liveness.beat(5, 0, 0.0, float(second))
        assert look(liveness, float(second), second + 0.5) is None


def test_silence() -> None:
    liveness = Liveness(0.0)
    liveness.beat(5, 0, 0.0, 1.0)
    assert look(liveness, 1.0, 60.0) == "4.0: no sign of life for 3.0 s"
    liveness = Liveness(0.0)
    liveness.beat(5, 0, 0.0, 1.0)
    assert look(liveness, 1.0, 60.0, busy=False) == "5.0: no sign of life for 4.0 s"


def test_work_without_progress() -> None:
    liveness = Liveness(0.0)
    liveness.beat(5, 0, 0.0, 0.0)
    liveness.beat(5, 2, 0.0, 1.0)
    for tenth in range(10, 39):
        liveness.beat(5, 2, 0.0, tenth / 10)
        assert liveness.death(tenth / 10, busy=True) is None
    liveness.beat(5, 3, 0.0, 4.0)
    assert liveness.death(4.0, busy=True) == "3 volumes wait and none was completed for 3.0 s"
    liveness.beat(6, 3, 0.0, 4.1)
    assert liveness.death(4.1, busy=True) is None


def test_a_slow_stage_has_more_time() -> None:
    liveness = Liveness(0.0)
    liveness.beat(5, 1, 2.0, 0.0)
    assert look(liveness, 0.0, 60.0) == "10.0: no sign of life for 10.0 s"


def test_a_stage_that_was_never_reached_has_more_time_too() -> None:
    assert look(Liveness(0.0), 0.0, 90.0) == "60.0: no sign of life for 60.0 s"


def test_our_own_pause_is_not_its_death() -> None:
    liveness = Liveness(0.0)
    liveness.beat(5, 1, 0.0, 0.0)
    assert liveness.death(0.4, busy=True) is None
    assert liveness.death(100.0, busy=True) is None
    assert look(liveness, 100.5, 160.0) == "103.0: no sign of life for 3.4 s"


def came_back(trip: RoundTrip, sent_at: float, seconds: float, ahead: int = 0) -> bool:
    trip.left(sent_at, ahead, 0.0)
    return trip.came_back(sent_at, RATE, sent_at + seconds)


def test_round_trips() -> None:
    trip = RoundTrip()
    assert trip.minimum(0.0, RATE) is None
    for wrong in (math.nan, math.inf, -1.0, 0.5):
        trip.left(1.0, 0, 0.0)
        assert not trip.came_back(wrong, RATE, 2.0)
    assert not came_back(trip, 3.0, 0.0)
    assert not came_back(trip, 4.0, 61.0)
    assert trip.minimum(70.0, RATE) is None
    assert came_back(trip, 70.0, 0.030)
    assert came_back(trip, 70.1, 0.046)
    assert trip.minimum(70.2, RATE) == pytest.approx(0.030)
    assert 0.030 < trip.smooth < 0.046


def test_the_least_round_trip_is_that_of_late() -> None:
    trip = RoundTrip(start=0.5)
    assert trip.minimum(0.0, RATE) == trip.smooth == 0.5
    assert came_back(trip, 0.0, 0.6)
    assert trip.minimum(0.6, RATE) == pytest.approx(0.6)
    assert came_back(trip, 1.0, 0.03)
    assert came_back(trip, 2.0, 0.09)
    assert trip.minimum(2.1, RATE) == pytest.approx(0.03)
    assert trip.minimum(2.3, RATE) == pytest.approx(0.09)
    assert trip.minimum(1e6, RATE) == pytest.approx(0.09), "silence says nothing"


def test_a_full_link_does_not_hide_its_own_round_trip() -> None:
    trip = RoundTrip()
    assert came_back(trip, 0.0, 0.06)
    for beat in range(1, 50):
        assert came_back(trip, beat / 10, 0.075, ahead=int(0.075 * RATE))
        assert trip.minimum(beat / 10 + 0.075, RATE) == pytest.approx(0.06)
    trip.at_most(0.05, 5.0)
    assert trip.minimum(5.0, RATE) == pytest.approx(0.05)


def test_a_longer_trip_on_a_half_empty_link_counts_if_it_stays() -> None:
    trip = RoundTrip()
    assert came_back(trip, 0.0, 0.06)
    for beat in range(1, 30):
        assert came_back(trip, beat / 10, 0.18, ahead=int(0.075 * RATE))
        minimum = 0.06 if beat < 16 else 0.18
        assert trip.minimum(beat / 10 + 0.18, RATE) == pytest.approx(minimum)


def test_connections_are_made_anew_while_nothing_is_heard() -> None:
    liveness = Liveness(0.0)
    assert not liveness.stalled(50.0, busy=True), "it was never reached"
    liveness.beat(5, 0, 0.0, 60.0)
    assert not liveness.stalled(60.0 + STALL - 0.01, busy=True)
    assert liveness.stalled(60.01 + STALL, busy=True)
    assert not liveness.stalled(60.01 + STALL, busy=True), "once"
    assert liveness.stalled(60.02 + 2 * STALL, busy=True), "and once more"
    liveness.beat(5, 0, 0.0, 63.0)
    assert not liveness.stalled(63.0 + STALL - 0.01, busy=True)
    assert STALL + 1.5 < PATIENCE, "a second attempt is in time"
    assert not liveness.stalled(63.0 + IDLE_STALL - 0.01, busy=False)
    assert liveness.stalled(63.0 + IDLE_STALL, busy=False)


def test_our_own_pause_is_no_stall() -> None:
    liveness = Liveness(0.0)
    liveness.beat(5, 0, 0.0, 0.0)
    assert liveness.death(100.0, busy=True) is None
    assert not liveness.stalled(100.0, busy=True)
    assert liveness.stalled(100.01 + STALL, busy=True)
