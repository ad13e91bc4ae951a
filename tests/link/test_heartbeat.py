import math

from molink.link.heartbeat import BeatClock, Liveness, RoundTrip


def look(liveness: Liveness, start: float, stop: float) -> str | None:
    """Look twice a second from ``start`` to ``stop``."""
    now = start
    while now <= stop:
        reason = liveness.death(now)
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


def test_work_without_progress() -> None:
    liveness = Liveness(0.0)
    liveness.beat(5, 0, 0.0, 0.0)
    liveness.beat(5, 2, 0.0, 1.0)
    for tenth in range(10, 39):
        liveness.beat(5, 2, 0.0, tenth / 10)
        assert liveness.death(tenth / 10) is None
    liveness.beat(5, 3, 0.0, 4.0)
    assert liveness.death(4.0) == "3 volumes wait and none was completed for 3.0 s"
    liveness.beat(6, 3, 0.0, 4.1)
    assert liveness.death(4.1) is None


def test_a_slow_stage_has_more_time() -> None:
    liveness = Liveness(0.0)
    liveness.beat(5, 1, 2.0, 0.0)
    assert look(liveness, 0.0, 60.0) == "10.0: no sign of life for 10.0 s"


def test_a_stage_that_was_never_reached_has_more_time_too() -> None:
    assert look(Liveness(0.0), 0.0, 90.0) == "60.0: no sign of life for 60.0 s"


def test_our_own_pause_is_not_its_death() -> None:
    liveness = Liveness(0.0)
    liveness.beat(5, 1, 0.0, 0.0)
    assert liveness.death(0.4) is None
    assert liveness.death(100.0) is None
    assert look(liveness, 100.5, 160.0) == "103.0: no sign of life for 3.4 s"


def test_round_trips() -> None:
    trip = RoundTrip()
    for wrong in (math.nan, math.inf, -1.0, 0.0, 1e9):
        trip.measured(wrong)
    assert trip == RoundTrip()
    trip.measured(0.030)
    trip.measured(0.046)
    assert trip.least == 0.030
    assert 0.030 < trip.smooth < 0.046
