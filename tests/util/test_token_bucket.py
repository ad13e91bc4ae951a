import pytest

from molink.util.token_bucket import KeyedTokenBuckets, RateLimit, TokenBucket


def test_burst_then_steady_rate() -> None:
    bucket = TokenBucket(RateLimit(3, 2.0), 10.0)
    assert [bucket.try_take(10.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_time(10.0) == pytest.approx(0.5)
    assert not bucket.try_take(10.4)
    assert bucket.try_take(10.5)
    assert [bucket.try_take(99.0) for _ in range(4)] == [True, True, True, False]


def test_clock_that_runs_backwards_adds_no_tokens() -> None:
    bucket = TokenBucket(RateLimit(1, 1.0), 10.0)
    assert bucket.try_take(10.0)
    assert not bucket.try_take(5.0)
    assert not bucket.try_take(10.5)
    assert bucket.try_take(11.0)


def test_keys_have_separate_buckets() -> None:
    buckets = KeyedTokenBuckets(RateLimit(1, 1.0))
    assert buckets.try_take("a", 0.0)
    assert not buckets.try_take("a", 0.0)
    assert buckets.try_take("b", 0.0)
    assert len(buckets) == 2
    buckets.drop_key("a")
    buckets.drop_key("c")
    assert len(buckets) == 1
    assert buckets.try_take("a", 0.0)
