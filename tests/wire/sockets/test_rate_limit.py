from molink.wire.sockets.rate_limit import PeerRateLimit


def test_a_burst_and_then_a_rate() -> None:
    pace = PeerRateLimit(3, 2)
    assert [pace.try_acquire("ann", 10.0) for _ in range(4)] == [True, True, True, False]
    assert pace.try_acquire("bob", 10.0)
    assert not pace.try_acquire("ann", 10.4)
    assert pace.try_acquire("ann", 10.6)
    assert not pace.try_acquire("ann", 10.7)
    assert [pace.try_acquire("ann", 99.0) for _ in range(4)] == [True, True, True, False]


def test_forgotten() -> None:
    pace = PeerRateLimit(1, 0.1)
    assert pace.try_acquire("ann", 1.0)
    assert not pace.try_acquire("ann", 1.0)
    pace.drop_peer("ann")
    assert pace.try_acquire("ann", 1.0)
