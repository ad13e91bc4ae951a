"""Outstanding work of pipelines, in exact seconds, and waits by prefix."""

from molink.routing.load_tracker import MIN_WAITS, LoadTracker, PrefixWaits, RoutedRequest


def left(loads: LoadTracker, now: float) -> float:
    return loads.work_of("a", now).remaining_s(now)


def test_prefills_run_one_after_another() -> None:
    loads = LoadTracker(100.0)
    loads.add_request("first", RoutedRequest("a", 10.0, prefill_s=8.0, answer_s=1.0))
    loads.add_request("second", RoutedRequest("a", 12.0, prefill_s=4.0, answer_s=1.0))
    assert left(loads, 12.0) == 12.0
    assert left(loads, 30.0) == 6.0  # it is late, but the remaining work isn't negative
    loads.on_first_token("first", 20.0)
    assert left(loads, 21.0) == 5.0
    loads.on_request_end("first", 9, 22.0)
    loads.on_request_end("second", 0, 22.0)
    assert left(loads, 23.0) == 0.0


def test_a_dropped_pipelines_load_is_not_subtracted_again() -> None:
    loads = LoadTracker(100.0)
    loads.add_request("lost", RoutedRequest("a", 0.0, prefill_s=8.0, answer_s=1.0))
    loads.drop_pipeline("a")
    loads.add_request("next", RoutedRequest("a", 1.0, prefill_s=2.0, answer_s=1.0))
    loads.on_request_end("lost", 3, 1.0)
    assert left(loads, 1.0) == 3.0
    assert len(loads) == 1


HALF = 90.0


def wait(waits: PrefixWaits, seconds: float, at: float, count: int = MIN_WAITS) -> None:
    for _ in range(count):
        waits.add_wait(7, seconds, at)


def test_a_doubled_wait_beyond_the_minimum() -> None:
    waits = PrefixWaits(HALF)
    wait(waits, 1.0, 0.0)
    wait(waits, 3.0, HALF)
    assert not waits.has_doubled(7, 4.0, HALF)
    assert waits.has_doubled(7, 2.0, HALF)
    assert not waits.has_doubled(7, 2.0, HALF), "once per half window"


def test_unknown_previous_waits_never_double() -> None:
    waits = PrefixWaits(HALF)
    assert not waits.has_doubled(7, 0.0, 0.0)
    wait(waits, 9.0, 0.0)
    assert not waits.has_doubled(7, 0.0, 0.0)
    wait(waits, 99.0, 2 * HALF)
    assert not waits.has_doubled(7, 0.0, 2 * HALF), "the previous half is unknown"
    wait(waits, 1.0, 3 * HALF, MIN_WAITS - 1)
    wait(waits, 99.0, 4 * HALF)
    assert not waits.has_doubled(7, 0.0, 4 * HALF), "too few waits"
