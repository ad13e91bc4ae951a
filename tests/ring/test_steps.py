"""Predictions of steps: never too short for a healthy stage, whatever came before.

And when failing steps mean a broken device, and when only a batch that was too large.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.facts.profile import Profile
from molink.ring.steps import (
    LARGE_STEPS,
    MAX_FAILED_STEPS,
    SLACK,
    Patience,
    StepSize,
    StepTimes,
)
from molink.wire.messages.base import Payload
from molink.wire.messages.data import Rows, Volume

SMALL, LARGE = StepSize(4, 100), StepSize(512, 512)
PROFILE = Profile(
    decode=((1, 0.01), (8, 0.024)),
    prefill=((16, 0.05), (64, 0.2)),
    context=100,
    decode_token_s=1e-5,
    prefill_token_s=1e-6,
)


def decode(*contexts: int) -> Volume:
    rows = tuple(Rows(i, start, 1, 1) for i, start in enumerate(contexts))
    return Volume(9, False, rows, Payload("i32", (len(rows),)))


def chunk(count: int, start: int = 0) -> Volume:
    return Volume(9, True, (Rows(0, start, count, 1),), Payload("i32", (count,)))


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
def test_a_step_takes_as_long_as_its_volumes_one_after_another(
    volumes: list[Volume], seconds: float
) -> None:
    expected = StepTimes(PROFILE).begin(volumes)
    assert expected.likely == pytest.approx(seconds)
    assert expected.maximum == pytest.approx(SLACK * seconds)


def test_without_a_measured_chunk_a_row_counts_as_a_step() -> None:
    times = StepTimes(Profile(decode=((1, 0.5),)))
    assert times.begin([chunk(64)]).likely == 32.0


def test_without_a_profile_nothing_is_predicted() -> None:
    times = StepTimes(Profile())
    assert times.begin([decode(1), chunk(64)]).maximum == 0.0
    times.end(5.0)
    assert times.begin([chunk(64)]).maximum == 0.0


def test_slow_steps_raise_the_prediction_and_quick_ones_only_the_likely_time() -> None:
    times = StepTimes(PROFILE)
    for _ in range(100):
        times.begin([decode(100)])
        times.end(0.03)
    slow = times.begin([decode(100)])
    assert slow.likely == pytest.approx(0.03, rel=0.01)
    assert slow.maximum == pytest.approx(SLACK * 0.03, rel=0.01)
    for _ in range(100):
        times.begin([decode(100)])
        times.end(0.005)
    quick = times.begin([decode(100)])
    assert quick.likely == pytest.approx(0.005, rel=0.01)
    assert quick.maximum == pytest.approx(SLACK * 0.01)


@given(st.lists(st.floats(0, 10), max_size=50), st.integers(1, 1024), st.integers(0, 10_000))
def test_after_any_past_a_chunk_has_more_time_than_was_measured(
    past: list[float], count: int, start: int
) -> None:
    times = StepTimes(PROFILE)
    for seconds in past:
        times.begin([decode(100)])
        times.end(seconds)
    maximum = times.begin([chunk(count, start)]).maximum
    assert maximum >= SLACK * PROFILE.prefill_s(count, start) * (1 - 1e-9)


def test_failures_one_after_another_end_it() -> None:
    patience = Patience()
    patience.worked(LARGE)
    for _ in range(MAX_FAILED_STEPS - 1):
        patience.failed(SMALL, out_of_memory=False)
        assert not patience.exhausted
    patience.failed(SMALL, out_of_memory=False)
    assert patience.exhausted
    assert patience.failures == MAX_FAILED_STEPS


def test_a_step_that_works_forgives_all_before_it() -> None:
    patience = Patience()
    for _ in range(10 * MAX_FAILED_STEPS):
        patience.failed(SMALL, out_of_memory=False)
        patience.worked(SMALL)
    assert not patience.exhausted
    assert patience.failures == 0


def test_large_batches_that_run_out_of_memory_are_their_own_fault() -> None:
    patience = Patience()
    patience.worked(SMALL)
    for _ in range(MAX_FAILED_STEPS * LARGE_STEPS - 1):
        patience.failed(LARGE, out_of_memory=True)
        assert not patience.exhausted


def test_but_not_for_ever() -> None:
    patience = Patience()
    for _ in range(MAX_FAILED_STEPS * LARGE_STEPS):
        patience.failed(LARGE, out_of_memory=True)
    assert patience.exhausted


def test_memory_that_is_gone_for_steps_which_worked_before_ends_it_soon() -> None:
    patience = Patience()
    patience.worked(LARGE)
    for _ in range(MAX_FAILED_STEPS):
        patience.failed(SMALL, out_of_memory=True)
    assert patience.exhausted


def test_a_step_is_larger_if_it_has_more_rows_or_a_longer_context() -> None:
    volume = Volume(3, False, (Rows(0, 99, 1, 1), Rows(1, 7, 3, 1)), Payload("i32", (4,)))
    assert StepSize.of([volume]) == StepSize(4, 110)
    assert StepSize.of([]) == StepSize()
    worked = StepSize(4, 110)
    assert not worked.exceeds(worked)
    assert StepSize(5, 5).exceeds(worked)
    assert StepSize(1, 111).exceeds(worked)
    assert worked.merged(StepSize(5, 5)) == StepSize(5, 110)
