"""The idle interval ``T_a``: numbers worked out by hand from the paper's three cases (§4).

A decode that starts at ``t_s`` and takes ``t_d`` needs the link at ``t_s + t_d``. After the first
decode of an iteration has finished at ``t_p``, the next one finishes a whole turn later, at
``t_p + t_o + t_m``. The interval is what is left until then.
"""

import pytest

from molink.link.policies.base import DecodeFinished, DecodeStarted, LinkEstimate
from molink.link.policies.interval import OVERDUE, IdleInterval


def test_nothing_is_known_before_a_decode() -> None:
    interval = IdleInterval()
    interval.handle(LinkEstimate(0.03, 0.03), 1.0)
    assert interval.at(1.0) is None
    assert interval.given_up_at is None


def test_case_1_starts_with_a_decode() -> None:
    interval = IdleInterval()
    interval.handle(DecodeStarted(8, 0.02), 1.0)
    # It starts now and takes 20 ms: all of them are left.
    assert interval.at(1.0) == 0.02


@pytest.mark.parametrize(("now", "left"), [(1.005, 0.015), (1.019, 0.001), (1.02, 0), (1.05, 0)])
def test_case_2_while_a_decode_runs(now: float, left: float) -> None:
    interval = IdleInterval()
    interval.handle(DecodeStarted(8, 0.02), 1.0)
    # It ends at 1.020; one that is late may end at any moment.
    assert interval.at(now) == pytest.approx(left, abs=1e-12)


def test_case_3_after_the_last_decode_of_an_iteration() -> None:
    interval = IdleInterval()
    interval.handle(DecodeStarted(8, 0.02), 0.98)
    # A turn of 60 ms of computing and 100 ms of transmissions: the next one ends at 1.160.
    interval.handle(DecodeFinished(8, 0.16), 1.0)
    assert interval.at(1.0) == pytest.approx(0.16)
    assert interval.at(1.03) == pytest.approx(0.13)
    # It starts at 1.140, so that case 1 expects its end at 1.160 as well.
    assert interval.at(1.14) == pytest.approx(0.02)
    interval.handle(DecodeStarted(8, 0.02), 1.14)
    assert interval.at(1.14) == 0.02


@pytest.mark.parametrize("event", [DecodeStarted(8, 0.02), DecodeFinished(8, 0.02)])
def test_what_is_far_too_late_is_not_expected(event: DecodeStarted | DecodeFinished) -> None:
    assert OVERDUE == 0.1
    interval = IdleInterval()
    interval.handle(event, 1.0)
    # Expected at 1.020, and for 100 ms more.
    assert interval.given_up_at == pytest.approx(1.12)
    assert interval.at(1.119) == 0
    assert interval.at(1.121) is None


def test_nobody_decodes() -> None:
    interval = IdleInterval()
    interval.handle(DecodeStarted(8, 0.02), 1.0)
    interval.handle(DecodeFinished(8), 1.02)
    assert interval.at(1.02) is None
