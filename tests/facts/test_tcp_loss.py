import pytest

from molink.facts.tcp_loss import expected_loss_s


def test_no_loss_costs_nothing() -> None:
    assert expected_loss_s(8192, 0.03, 0.0) == 0


def test_lost_token_waits_for_a_probe() -> None:
    assert expected_loss_s(64, 0.1, 0.01) == pytest.approx(0.01 * (2 * 0.1 + 0.2))


def test_rows_of_more_segments_lose_more() -> None:
    sizes = (2896, 8192, 14480)
    costs = [expected_loss_s(size, 0.03, 0.01) for size in sizes]
    assert costs == sorted(costs)
    # A row has six segments: one row in 17 loses one, which delays it by about three round trips.
    assert costs[1] == pytest.approx(0.0585 * 3 * 0.03, rel=0.1)


@pytest.mark.parametrize("loss", [0.001, 0.01, 0.1, 1.0])
def test_cost_grows_with_distance_and_is_bounded(loss: float) -> None:
    near, far = (expected_loss_s(8192, seconds, loss) for seconds in (0.01, 0.1))
    assert 0 < near < far <= 10 * 0.1
