import math

import pytest

from molink.link.heartbeat import (
    IDLE_STALL_TIMEOUT,
    STALL_TIMEOUT,
    TIMEOUT,
    HeartbeatClock,
    LinkLiveness,
    RoundTripEstimator,
)

RATE = 1e7


def look(liveness: LinkLiveness, start: float, stop: float, busy: bool = True) -> str | None:
    """Check twice a second from ``start`` to ``stop``."""
    now = start
    while now <= stop:
        reason = liveness.death_reason(now, busy)
        if reason is not None:
            return f"{now:.1f}: {reason}"
        now += 0.5
    return None


def test_heartbeat_intervals_follow_load() -> None:
    clock = HeartbeatClock(10.0)
    assert clock.next_at(has_requests=False) == 10.0
    clock.mark_sent(10.0)
    assert clock.next_at(has_requests=False) == 11.0
    assert clock.next_at(has_requests=True) == 10.1


def test_idle_stage_with_heartbeats_is_alive() -> None:
    liveness = LinkLiveness(0.0)
    for second in range(100):
        liveness.on_heartbeat(5, 0, 0.0, float(second))
        assert look(liveness, float(second), second + 0.5) is None


def test_silence_is_death() -> None:
    liveness = LinkLiveness(0.0)
    liveness.on_heartbeat(5, 0, 0.0, 1.0)
    assert look(liveness, 1.0, 60.0) == "4.0: no heartbeat for 3.0 s"
    liveness = LinkLiveness(0.0)
    liveness.on_heartbeat(5, 0, 0.0, 1.0)
    assert look(liveness, 1.0, 60.0, busy=False) == "5.0: no heartbeat for 4.0 s"


def test_check_is_due_when_silence_means_death() -> None:
    liveness = LinkLiveness(0.0)
    liveness.on_heartbeat(5, 0, 0.0, 1.0)
    for now, due in ((2.75, 3.25), (3.75, 1.0 + TIMEOUT), (1.0 + TIMEOUT, 1.5 + TIMEOUT)):
        assert liveness.next_check(now) == due


def test_work_without_progress_is_death() -> None:
    liveness = LinkLiveness(0.0)
    liveness.on_heartbeat(5, 0, 0.0, 0.0)
    liveness.on_heartbeat(5, 2, 0.0, 1.0)
    for tenth in range(10, 39):
        liveness.on_heartbeat(5, 2, 0.0, tenth / 10)
        assert liveness.death_reason(tenth / 10, has_requests=True) is None
    liveness.on_heartbeat(5, 3, 0.0, 4.0)
    assert (
        liveness.death_reason(4.0, has_requests=True)
        == "3 volumes are queued and none has completed for 3.0 s"
    )
    liveness.on_heartbeat(6, 3, 0.0, 4.1)
    assert liveness.death_reason(4.1, has_requests=True) is None


def test_predicted_steps_extend_the_timeout() -> None:
    liveness = LinkLiveness(0.0)
    liveness.on_heartbeat(5, 1, 2.0, 0.0)
    assert look(liveness, 0.0, 60.0) == "10.0: no heartbeat for 10.0 s"


def test_unreached_stage_has_a_longer_timeout() -> None:
    assert look(LinkLiveness(0.0), 0.0, 90.0) == "60.0: no heartbeat for 60.0 s"


def test_local_pause_is_not_remote_death() -> None:
    liveness = LinkLiveness(0.0)
    liveness.on_heartbeat(5, 1, 0.0, 0.0)
    assert liveness.death_reason(0.4, has_requests=True) is None
    assert liveness.death_reason(100.0, has_requests=True) is None
    assert look(liveness, 100.5, 160.0) == "103.0: no heartbeat for 3.4 s"


def came_back(trip: RoundTripEstimator, sent_at: float, seconds: float, ahead: int = 0) -> bool:
    trip.on_sent(sent_at, ahead, 0.0)
    return trip.on_echo(sent_at, RATE, sent_at + seconds)


def test_round_trips_are_smoothed() -> None:
    trip = RoundTripEstimator()
    assert trip.min_rtt(0.0, RATE) is None
    for wrong in (math.nan, math.inf, -1.0, 0.5):
        trip.on_sent(1.0, 0, 0.0)
        assert not trip.on_echo(wrong, RATE, 2.0)
    assert not came_back(trip, 3.0, 0.0)
    assert not came_back(trip, 4.0, 61.0)
    assert trip.min_rtt(70.0, RATE) is None
    assert came_back(trip, 70.0, 0.030)
    assert came_back(trip, 70.1, 0.046)
    assert trip.min_rtt(70.2, RATE) == pytest.approx(0.030)
    assert 0.030 < trip.smoothed_rtt < 0.046


def test_minimum_round_trip_is_recent() -> None:
    trip = RoundTripEstimator(start=0.5)
    assert trip.min_rtt(0.0, RATE) == trip.smoothed_rtt == 0.5
    assert came_back(trip, 0.0, 0.6)
    assert trip.min_rtt(0.6, RATE) == pytest.approx(0.6)
    assert came_back(trip, 1.0, 0.03)
    assert came_back(trip, 2.0, 0.09)
    assert trip.min_rtt(2.1, RATE) == pytest.approx(0.03)
    assert trip.min_rtt(2.3, RATE) == pytest.approx(0.09)
    assert trip.min_rtt(1e6, RATE) == pytest.approx(0.09), "silence says nothing"


def test_a_full_link_does_not_hide_its_own_round_trip() -> None:
    trip = RoundTripEstimator()
    assert came_back(trip, 0.0, 0.06)
    for heartbeat in range(1, 50):
        assert came_back(trip, heartbeat / 10, 0.075, ahead=int(0.075 * RATE))
        assert trip.min_rtt(heartbeat / 10 + 0.075, RATE) == pytest.approx(0.06)
    trip.add_upper_bound(0.05, 5.0)
    assert trip.min_rtt(5.0, RATE) == pytest.approx(0.05)


def test_longer_round_trip_on_a_half_full_link_must_last() -> None:
    trip = RoundTripEstimator()
    assert came_back(trip, 0.0, 0.06)
    for heartbeat in range(1, 30):
        assert came_back(trip, heartbeat / 10, 0.18, ahead=int(0.075 * RATE))
        minimum = 0.06 if heartbeat < 16 else 0.18
        assert trip.min_rtt(heartbeat / 10 + 0.18, RATE) == pytest.approx(minimum)


def test_silence_triggers_reconnects() -> None:
    liveness = LinkLiveness(0.0)
    assert not liveness.should_reconnect(50.0, has_requests=True), "it was never reached"
    liveness.on_heartbeat(5, 0, 0.0, 60.0)
    assert not liveness.should_reconnect(60.0 + STALL_TIMEOUT - 0.01, has_requests=True)
    assert liveness.should_reconnect(60.01 + STALL_TIMEOUT, has_requests=True)
    assert not liveness.should_reconnect(60.01 + STALL_TIMEOUT, has_requests=True), "once"
    assert liveness.should_reconnect(60.02 + 2 * STALL_TIMEOUT, has_requests=True), "and once more"
    liveness.on_heartbeat(5, 0, 0.0, 63.0)
    assert not liveness.should_reconnect(63.0 + STALL_TIMEOUT - 0.01, has_requests=True)
    assert STALL_TIMEOUT + 1.5 < TIMEOUT, "a second attempt is in time"
    assert not liveness.should_reconnect(63.0 + IDLE_STALL_TIMEOUT - 0.01, has_requests=False)
    assert liveness.should_reconnect(63.0 + IDLE_STALL_TIMEOUT, has_requests=False)


def test_local_pause_is_no_stall() -> None:
    liveness = LinkLiveness(0.0)
    liveness.on_heartbeat(5, 0, 0.0, 0.0)
    assert liveness.death_reason(100.0, has_requests=True) is None
    assert not liveness.should_reconnect(100.0, has_requests=True)
    assert liveness.should_reconnect(100.01 + STALL_TIMEOUT, has_requests=True)
