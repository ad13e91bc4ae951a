import pytest

from molink.link.policies.base import DecodeFinished, DecodeStarted, LinkEstimate
from molink.link.policies.interval import (
    OVERDUE,
    IdleInterval,
    after_last_decode,
    during_decode,
    first_chunk,
    idle_interval,
)


def test_the_general_form_and_its_three_cases() -> None:
    t_s, t_d = 10.0, 0.02
    assert idle_interval(t_s, t_d, t_s) == pytest.approx(first_chunk(t_d))
    assert idle_interval(t_s, t_d, 10.005) == pytest.approx(during_decode(t_s, t_d, 10.005))
    # A batch that finished at t_p is finished again a turn later: it starts t_d before that.
    t_p, t_o, t_m, t_c = 10.0, 0.06, 0.1, 10.03
    assert after_last_decode(t_p, t_o, t_m, t_c) == pytest.approx(0.13)
    next_start = t_p + t_o + t_m - t_d
    assert idle_interval(next_start, t_d, t_c) == pytest.approx(0.13)


def test_nothing_is_known_before_a_decode() -> None:
    interval = IdleInterval()
    interval.handle(LinkEstimate(0.03, 0.03), 1.0)
    assert interval.at(1.0) is None
    assert interval.given_up_at is None


def test_case_1_starts_with_a_decode() -> None:
    interval = IdleInterval()
    interval.handle(DecodeStarted(8, 0.02), 1.0)
    assert interval.at(1.0) == first_chunk(0.02) == 0.02


def test_case_2_while_a_decode_runs() -> None:
    interval = IdleInterval()
    interval.handle(DecodeStarted(8, 0.02), 1.0)
    assert interval.at(1.005) == during_decode(1.0, 0.02, 1.005) == pytest.approx(0.015)
    assert interval.at(1.05) == 0, "late"


def test_case_3_after_the_last_decode_of_an_iteration() -> None:
    interval = IdleInterval()
    interval.handle(DecodeStarted(8, 0.02), 0.98)
    interval.handle(DecodeFinished(8, 0.06 + 0.1), 1.0)
    assert interval.at(1.03) == pytest.approx(after_last_decode(1.0, 0.06, 0.1, 1.03))
    interval.handle(DecodeStarted(8, 0.02), 1.14)
    assert interval.at(1.14) == 0.02, "and again case 1"


@pytest.mark.parametrize("event", [DecodeStarted(8, 0.02), DecodeFinished(8, 0.02)])
def test_what_is_far_too_late_is_not_expected(event: DecodeStarted | DecodeFinished) -> None:
    interval = IdleInterval()
    interval.handle(event, 1.0)
    assert interval.given_up_at == pytest.approx(1.02 + OVERDUE)
    assert interval.at(1.02 + 0.99 * OVERDUE) == 0
    assert interval.at(1.02 + OVERDUE) is None


def test_nobody_decodes() -> None:
    interval = IdleInterval()
    interval.handle(DecodeStarted(8, 0.02), 1.0)
    interval.handle(DecodeFinished(8), 1.02)
    assert interval.at(1.02) is None
