import pytest

from molink.facts.profile import Profile
from molink.facts.ring_times import LinkFacts, RingTimes
from molink.ring.round_trip import MAX_SLOWDOWN, OVERDUE, SMOOTHING, RoundTripClock
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import RequestSlice, Volume

#: Two stages of 10 ms, and 40 ms on each link: a round trip takes 100 ms.
TIMES = RingTimes([Profile(decode=((64, 0.01),))] * 2, [LinkFacts(0.04)] * 2, 8192)
ROUND_TRIP = 0.1


def decode(*requests: int) -> Volume:
    rows = tuple(RequestSlice(request, 4, 1, 0) for request in requests)
    return Volume(1, False, rows, Payload("f32", (len(rows), 4)))


def test_requests_return_after_a_round_trip() -> None:
    clock = RoundTripClock(TIMES)
    assert clock.on_decode_finished(decode(1, 2), 1.0) == pytest.approx(ROUND_TRIP)
    assert clock.on_decode_finished(decode(3, 4), 1.03) == pytest.approx(ROUND_TRIP - 0.03)
    assert clock.on_decode_finished(decode(1, 2), 1.1) == pytest.approx(0.03)
    assert clock.on_decode_finished(decode(3, 4), 1.13) == pytest.approx(0.07)


def test_lookahead_rows_are_no_round_trip() -> None:
    clock = RoundTripClock(TIMES)
    assert clock.on_decode_finished(decode(1), 1.0) == pytest.approx(ROUND_TRIP)
    ahead = Volume(2, False, (RequestSlice(1, 5, 2, 1, drafts=(7, 8)),), Payload("f32", (2, 4)))
    assert clock.on_decode_finished(ahead, 1.02) == pytest.approx(ROUND_TRIP - 0.02)
    assert clock.on_decode_finished(decode(1), 1.0 + ROUND_TRIP) == pytest.approx(ROUND_TRIP)


def test_requests_may_return_in_other_batches() -> None:
    clock = RoundTripClock(TIMES)
    clock.on_decode_finished(decode(1, 2), 1.0)
    clock.on_decode_finished(decode(3), 1.02)
    assert clock.on_decode_finished(decode(2, 3), 1.05) == pytest.approx(0.05), "1 is still to come"


def test_late_rows_are_given_up() -> None:
    clock = RoundTripClock(TIMES)
    clock.on_decode_finished(decode(1), 1.0)
    assert clock.on_decode_finished(decode(2), 1.0 + ROUND_TRIP + 0.01) == 0
    late = 1.0 + ROUND_TRIP * (1 + OVERDUE) + 0.001
    assert clock.on_decode_finished(decode(3), late) == pytest.approx(1.11 + ROUND_TRIP - late)


def test_finished_requests_are_not_expected() -> None:
    clock = RoundTripClock(TIMES)
    clock.on_decode_finished(decode(1, 2), 1.0)
    clock.on_request_finished(1)
    assert clock.on_decode_finished(decode(3), 1.05) == pytest.approx(0.05)
    clock.on_request_finished(2)
    clock.on_request_finished(2)
    assert clock.on_decode_finished(decode(3), 1.15) == pytest.approx(ROUND_TRIP)


def test_slow_round_trips_raise_the_prediction() -> None:
    clock = RoundTripClock(TIMES)
    now, after = 1.0, None
    for _ in range(40):
        after = clock.on_decode_finished(decode(1, 2), now)
        now += 2 * ROUND_TRIP
    assert after == pytest.approx(2 * ROUND_TRIP, rel=0.01)
    now += 100 * ROUND_TRIP
    assert clock.on_decode_finished(decode(1, 2), now) == pytest.approx(
        ROUND_TRIP * (2 + SMOOTHING * (MAX_SLOWDOWN - 2)), rel=0.01
    )


def test_volumes_that_never_return_are_dropped() -> None:
    clock = RoundTripClock(TIMES)
    for request in range(1000):
        clock.on_decode_finished(decode(request), request * ROUND_TRIP)
    assert len(clock._expected) < 10
    assert len(clock._by_request) < 10


@pytest.mark.parametrize("times", [RingTimes([], [], 8192), RingTimes([Profile()], [], 8192)])
def test_unknown_ring_predicts_nothing(times: RingTimes) -> None:
    clock = RoundTripClock(times)
    assert clock.on_decode_finished(decode(1), 1.0) is None
    clock.times = TIMES
    assert clock.on_decode_finished(decode(1), 1.1) == pytest.approx(ROUND_TRIP)
