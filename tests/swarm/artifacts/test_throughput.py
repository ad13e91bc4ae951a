"""How fast a transfer is said to be."""

from hypothesis import given
from hypothesis import strategies as st

from molink.swarm.throughput import RATE_WINDOW, TransferRate, estimate_eta


def test_rate_covers_the_window() -> None:
    speed = TransferRate(0.0)
    assert speed.rate == 0.0
    for second in range(1, 31):
        speed.observe_bytes(second * 100, float(second))
    assert speed.rate == 100.0
    for second in range(31, 41):
        speed.observe_bytes(3000, float(second))
    assert speed.rate == 0.0


def test_restarted_transfer_resets_the_rate() -> None:
    speed = TransferRate(0.0)
    speed.observe_bytes(1000, 1.0)
    speed.observe_bytes(10, 2.0)
    assert speed.rate == 0.0
    speed.observe_bytes(20, 3.0)
    assert speed.rate == 10.0


def test_eta() -> None:
    assert estimate_eta(100, 50.0) == 2.0
    assert estimate_eta(100, 0.0) is None


@given(st.lists(st.tuples(st.floats(0.001, 5.0), st.integers(0, 10**9)), max_size=200))
def test_samples_are_bounded_and_rate_is_never_negative(
    looks: list[tuple[float, int]],
) -> None:
    speed, now, done = TransferRate(0.0), 0.0, 0
    for seconds, more in looks:
        now, done = now + seconds, done + more
        speed.observe_bytes(done, now)
        assert speed.rate >= 0.0
        assert len(speed._seen) <= 2 * RATE_WINDOW / 0.25 + 3
