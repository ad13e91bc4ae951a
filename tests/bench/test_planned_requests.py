import itertools
import math

import pytest

from molink.bench.planned_requests import poisson_arrivals
from molink.errors import UsageError


def test_infinite_rate_sends_all_at_once() -> None:
    assert poisson_arrivals(math.inf, 3, seed=0) == [0.0, 0.0, 0.0]


def test_poisson_arrivals_ascend_from_zero_with_the_mean_rate() -> None:
    times = poisson_arrivals(4.0, 20_000, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    # An exponential's standard deviation is its mean.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(
        mean, rel=0.05
    )


def test_equal_seeds_give_equal_plans() -> None:
    assert poisson_arrivals(1.0, 9, seed=7) == poisson_arrivals(1.0, 9, seed=7)
    assert poisson_arrivals(1.0, 9, seed=7) != poisson_arrivals(1.0, 9, seed=8)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_invalid_rates_are_rejected(rate: float) -> None:
    with pytest.raises(UsageError, match="--rate"):
        poisson_arrivals(rate, 1, seed=0)


def test_zero_requests_are_rejected() -> None:
    with pytest.raises(UsageError, match="--requests"):
        poisson_arrivals(1.0, 0, seed=0)
