"""How fast PCs may join."""

from hypothesis import given
from hypothesis import strategies as st

from molink.swarm.membership.join_rate_limit import JoinRateLimiter
from molink.util.token_bucket import RateLimit


def test_burst_then_steady_rate() -> None:
    rate = JoinRateLimiter(100.0, RateLimit(2, 0.5), RateLimit(99, 99.0))
    assert [rate.admit_join("a", 100.0) for _ in range(4)] == [0.0, 0.0, 2.0, 2.0]
    assert rate.admit_join("a", 101.0) == 1.0
    assert rate.admit_join("a", 102.0) == 0.0
    assert rate.admit_join("b", 102.0) == 0.0, "another invitation has a bucket of its own"
    assert [rate.admit_join("a", 999.0) for _ in range(3)] == [0.0, 0.0, 2.0], (
        "no more than a burst"
    )
    rate.drop_invitation("a")
    assert rate.admit_join("a", 999.0) == 0.0
    rate.drop_invitation("never seen")


def test_overall_rate_is_bounded() -> None:
    rate = JoinRateLimiter(0.0, RateLimit(2, 1.0), RateLimit(3, 1.0))
    assert [rate.admit_join(id, 0.0) for id in "aabbc"] == [0.0, 0.0, 0.0, 1.0, 1.0]
    # What was refused has cost nothing.
    assert rate.admit_join("b", 1.0) == 0.0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-1.0, 3.0)), max_size=60))
def test_never_more_than_burst_and_rate_allow(events: list[tuple[str, float]]) -> None:
    now, admitted = 0.0, 0
    rate = JoinRateLimiter(now, RateLimit(3, 1.0), RateLimit(4, 1.5))
    latest = 0.0
    for invitation, passed in events:
        now += passed  # a clock that goes back gives nothing away
        latest = max(latest, now)
        wait = rate.admit_join(invitation, now)
        assert wait >= 0.0
        admitted += wait == 0.0
        assert admitted <= 4 + 1.5 * latest + 1e-6
