"""``T_a`` by hand: decode steps on a time line, and the time left until their end."""

import pytest

from molink.link.policies.base import DecodeFinishedEvent, DecodeStartedEvent, LinkEstimatedEvent
from molink.link.policies.interval import IdleInterval


def test_case_1_the_transmission_starts_with_the_decode_execution() -> None:
    interval = IdleInterval()
    interval.handle(DecodeStartedEvent(4, predicted=0.020), 7.0)
    assert interval.interval_at(7.0) == pytest.approx(0.020)


def test_case_2_a_decode_execution_is_running() -> None:
    # The step started at 7.000 and ends at 7.020, so 12 ms are left at 7.008.
    interval = IdleInterval()
    interval.handle(DecodeStartedEvent(4, predicted=0.020), 7.0)
    assert interval.interval_at(7.008) == pytest.approx(0.012)


def test_case_3_the_first_batch_returns_after_a_round_trip() -> None:
    # The first batch finished at t_p = 2.000. Three stages of 8 ms each and 84 ms of links make a
    # round trip of 108 ms, so it will have finished here again at 2.108. The last batch finished at
    # 2.040, 68 ms before that; a transmission that starts at 2.050 has 58 ms.
    interval = IdleInterval()
    interval.handle(DecodeFinishedEvent(4, next_predicted=0.068), 2.040)
    assert interval.interval_at(2.050) == pytest.approx(0.058)


def test_late_rows_leave_no_interval() -> None:
    interval = IdleInterval()
    interval.handle(DecodeStartedEvent(4, predicted=0.020), 7.0)
    assert interval.interval_at(7.021) == 0.0
    assert interval.interval_at(7.119) == 0.0, "up to 0.1 s late"


@pytest.mark.parametrize(
    ("predicted", "expected_until"),
    [
        pytest.param(0.020, 0.120, id="soon: 0.1 s late"),
        pytest.param(0.300, 0.600, id="far away: as late again"),
    ],
)
def test_overdue_rows_are_given_up(predicted: float, expected_until: float) -> None:
    interval = IdleInterval()
    interval.handle(DecodeFinishedEvent(4, next_predicted=predicted), 1.0)
    assert interval.interval_at(1.0 + expected_until - 0.001) == 0.0
    assert interval.interval_at(1.0 + expected_until + 0.001) is None


def test_no_interval_without_decoding() -> None:
    interval = IdleInterval()
    assert interval.interval_at(1.0) is None
    interval.handle(DecodeStartedEvent(4, predicted=0.020), 1.0)
    interval.handle(LinkEstimatedEvent(0.06, 0.06, 1e6), 1.01)
    assert interval.interval_at(1.01) is not None, "other events don't matter"
    interval.handle(DecodeFinishedEvent(4, next_predicted=None), 1.02)
    assert interval.interval_at(1.02) is None
