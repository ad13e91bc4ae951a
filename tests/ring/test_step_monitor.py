"""Step predictions are never too short for a healthy stage; failures tell broken devices from large
batches.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.profile import Profile
from molink.ring.step_monitor import (
    LARGE_STEP_WEIGHT,
    MAX_FAILED_STEPS,
    SLACK,
    WINDOW_S,
    BubbleMeter,
    FailureTracker,
    StepSize,
    StepTimePredictor,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import RequestSlice, Volume


def test_bubbles_need_live_requests_and_no_step() -> None:
    bubbles = BubbleMeter(100.0)
    bubbles.update_state(103.0, live=True, computing=False)
    assert bubbles.seconds == 0
    bubbles.update_state(104.0, live=True, computing=True)
    bubbles.update_state(106.5, live=True, computing=False)
    bubbles.update_state(107.0, live=False, computing=False)
    bubbles.update_state(109.0, live=False, computing=False)
    assert bubbles.seconds == 1.5


def test_bubble_share_covers_the_last_window() -> None:
    bubbles = BubbleMeter(0.0)
    bubbles.update_state(0.0, live=True, computing=True)
    bubbles.update_state(3.0, live=True, computing=False)
    assert bubbles.bubble_share == 0
    bubbles.update_state(4.0, live=False, computing=False)
    bubbles.update_state(WINDOW_S, live=False, computing=False)
    assert (bubbles.bubble_share, bubbles.busy_share) == (0.25, 0.6)
    bubbles.update_state(2 * WINDOW_S, live=False, computing=False)
    assert bubbles.bubble_share == bubbles.busy_share == 0
    assert bubbles.seconds == 1.0


SMALL, LARGE = StepSize(4, 100), StepSize(512, 512)
PROFILE = Profile(
    decode=((1, 0.01), (8, 0.024)),
    prefill=((16, 0.05), (64, 0.2)),
    context=100,
    decode_token_s=1e-5,
    prefill_token_s=1e-6,
)


def decode(*contexts: int) -> Volume:
    rows = tuple(RequestSlice(i, start, 1, 1) for i, start in enumerate(contexts))
    return Volume(9, False, rows, Payload("i32", (len(rows),)))


def chunk(count: int, start: int = 0) -> Volume:
    return Volume(9, True, (RequestSlice(0, start, count, 1),), Payload("i32", (count,)))


@pytest.mark.parametrize(
    ("volumes", "seconds"),
    [
        ([decode(100)], 0.01),
        ([decode(0, 50, 100)], 0.014),
        ([decode(1100, 100)], 0.012 + 2 * 500 * 1e-5),
        ([chunk(64)], 0.2),
        ([chunk(32, start=1000)], 0.1 + 32 * 1000 * 1e-6),
        ([decode(100), chunk(64)], 0.21),
    ],
)
def test_step_time_is_the_sum_of_its_volumes(volumes: list[Volume], seconds: float) -> None:
    expected = StepTimePredictor(PROFILE).predict_step(volumes)
    assert expected.expected_s == pytest.approx(seconds)
    assert expected.max_s == pytest.approx(SLACK * seconds)


def test_unmeasured_prefill_rows_count_as_steps() -> None:
    times = StepTimePredictor(Profile(decode=((1, 0.5),)))
    assert times.predict_step([chunk(64)]).expected_s == 32.0


def test_without_a_profile_nothing_is_predicted() -> None:
    times = StepTimePredictor(Profile())
    assert times.predict_step([decode(1), chunk(64)]).max_s == 0.0
    times.add_step(times.predict_step([chunk(64)]), 5.0)
    assert times.predict_step([chunk(64)]).max_s == 0.0


def test_fast_steps_do_not_lower_the_maximum() -> None:
    times = StepTimePredictor(PROFILE)
    for _ in range(100):
        times.add_step(times.predict_step([decode(100)]), 0.03)
    slow = times.predict_step([decode(100)])
    assert slow.expected_s == pytest.approx(0.03, rel=0.01)
    assert slow.max_s == pytest.approx(SLACK * 0.03, rel=0.01)
    for _ in range(100):
        times.add_step(times.predict_step([decode(100)]), 0.005)
    quick = times.predict_step([decode(100)])
    assert quick.expected_s == pytest.approx(0.005, rel=0.01)
    assert quick.max_s == pytest.approx(SLACK * 0.01)


@given(st.lists(st.floats(0, 10), max_size=50), st.integers(1, 1024), st.integers(0, 10_000))
def test_maximum_exceeds_the_profile_after_any_history(
    past: list[float], count: int, start: int
) -> None:
    times = StepTimePredictor(PROFILE)
    for seconds in past:
        times.add_step(times.predict_step([decode(100)]), seconds)
    maximum = times.predict_step([chunk(count, start)]).max_s
    assert maximum >= SLACK * PROFILE.prefill_s(count, start) * (1 - 1e-9)


def test_consecutive_failures_exhaust_the_tracker() -> None:
    tracker = FailureTracker()
    tracker.on_step_succeeded(LARGE)
    for _ in range(MAX_FAILED_STEPS - 1):
        tracker.on_step_failed(SMALL, out_of_memory=False)
        assert not tracker.is_exhausted
    tracker.on_step_failed(SMALL, out_of_memory=False)
    assert tracker.is_exhausted
    assert tracker.failures == MAX_FAILED_STEPS


def test_success_resets_the_tracker() -> None:
    tracker = FailureTracker()
    for _ in range(10 * MAX_FAILED_STEPS):
        tracker.on_step_failed(SMALL, out_of_memory=False)
        tracker.on_step_succeeded(SMALL)
    assert not tracker.is_exhausted
    assert tracker.failures == 0


def test_large_batches_without_memory_count_less() -> None:
    tracker = FailureTracker()
    tracker.on_step_succeeded(SMALL)
    for _ in range(MAX_FAILED_STEPS * LARGE_STEP_WEIGHT - 1):
        tracker.on_step_failed(LARGE, out_of_memory=True)
        assert not tracker.is_exhausted


def test_large_batches_without_memory_exhaust_the_tracker_eventually() -> None:
    tracker = FailureTracker()
    for _ in range(MAX_FAILED_STEPS * LARGE_STEP_WEIGHT):
        tracker.on_step_failed(LARGE, out_of_memory=True)
    assert tracker.is_exhausted


def test_lost_memory_exhausts_the_tracker_soon() -> None:
    tracker = FailureTracker()
    tracker.on_step_succeeded(LARGE)
    for _ in range(MAX_FAILED_STEPS):
        tracker.on_step_failed(SMALL, out_of_memory=True)
    assert tracker.is_exhausted


def test_step_size_compares_rows_and_positions() -> None:
    volume = Volume(
        3, False, (RequestSlice(0, 99, 1, 1), RequestSlice(1, 7, 3, 1)), Payload("i32", (4,))
    )
    assert StepSize.of_volumes([volume]) == StepSize(4, 110)
    assert StepSize.of_volumes([]) == StepSize()
    worked = StepSize(4, 110)
    assert not worked.exceeds(worked)
    assert StepSize(5, 5).exceeds(worked)
    assert StepSize(1, 111).exceeds(worked)
    assert worked.merge_with(StepSize(5, 5)) == StepSize(5, 110)
