"""Connections that start slowly, and again after a pause."""

from molink.sim.medium import Medium
from molink.sim.plan import plan_ring
from molink.sim.profiles import LinkProfile
from molink.sim.scenario import Scenario
from molink.sim.tcp import FIRST_WINDOW, SEGMENT, SlowStart
from molink.sim.workload import Workload
from molink.wire.data import Lane

ROUND_TRIP = 0.1


def test_the_window_doubles_in_a_round_trip_up_to_its_bound() -> None:
    connection = SlowStart(ROUND_TRIP, 5 * FIRST_WINDOW)
    windows, now = [], 0.0
    for _ in range(4):
        windows.append(room := connection.room(now))
        connection.sent(room, now, now, now + ROUND_TRIP)
        assert connection.room(now) == 0
        now = connection.next_room()
    assert windows == [FIRST_WINDOW * times for times in (1, 2, 4, 5)]


def test_a_pause_halves_it_for_every_timeout() -> None:
    connection = SlowStart(ROUND_TRIP, 64 * FIRST_WINDOW)
    now = 0.0
    while connection.window < 32 * FIRST_WINDOW:
        connection.sent(connection.room(now), now, now, now + ROUND_TRIP)
        now += ROUND_TRIP
        connection.room(now)
    timeout = ROUND_TRIP + 0.2
    before = connection.window
    assert connection.room(now - ROUND_TRIP + timeout) == before
    assert connection.room(now + 2 * timeout) == before // 4
    assert connection.room(now + 100.0) == FIRST_WINDOW


def test_a_message_longer_than_the_window_takes_round_trips() -> None:
    medium = Medium(rate=1e6, latency=0.05, queue=256_000, slow_start=True)
    nbytes = 3 * FIRST_WINDOW
    begin, end, arrival = medium.send(Lane.BULK, nbytes, 0.0)
    assert begin == 0.0
    first = FIRST_WINDOW / 1e6
    assert end == first + 0.1 + 2 * FIRST_WINDOW / 1e6
    assert arrival == end + 0.05
    # Meanwhile the other lane goes on.
    assert medium.send(Lane.DECODE, SEGMENT, 0.02)[1] == 0.02 + SEGMENT / 1e6
    # And nothing on this one overtakes.
    assert medium.send(Lane.BULK, SEGMENT, 0.03)[1] >= end


def test_prompts_after_a_pause_take_longer() -> None:
    load = Workload(rate=1.0, duration=1.0)
    steady, slow = (
        plan_ring(Scenario(load, link=LinkProfile(slow_start=starts)), 1, 512, 4)
        for starts in (False, True)
    )
    assert slow.ttft_s > steady.ttft_s + ROUND_TRIP
    assert slow.floor_s == steady.floor_s
