import pytest

from molink.util.ewma import Ewma


def test_first_sample_becomes_the_mean() -> None:
    mean = Ewma(0.5)
    assert mean.value is None
    assert mean.get_or(7.0) == 7.0
    assert mean.add_sample(4.0) == 4.0
    assert mean.add_sample(8.0) == 6.0
    assert mean.get_or(7.0) == 6.0


def test_initial_value_is_weighted_like_a_sample() -> None:
    mean = Ewma(0.1, 1.0)
    assert mean.add_sample(2.0) == pytest.approx(1.1)
    assert mean.add_sample(2.1, weight=0.5) == pytest.approx(1.6)
