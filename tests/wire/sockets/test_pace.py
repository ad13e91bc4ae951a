from molink.wire.sockets.pace import Allowance


def test_a_burst_and_then_a_rate() -> None:
    pace = Allowance(3, 2)
    assert [pace.take("ann", 10.0) for _ in range(4)] == [True, True, True, False]
    assert pace.take("bob", 10.0)
    assert not pace.take("ann", 10.4)
    assert pace.take("ann", 10.6)
    assert not pace.take("ann", 10.7)
    assert [pace.take("ann", 99.0) for _ in range(4)] == [True, True, True, False]


def test_forgotten() -> None:
    pace = Allowance(1, 0.1)
    assert pace.take("ann", 1.0)
    assert not pace.take("ann", 1.0)
    pace.forget("ann")
    assert pace.take("ann", 1.0)
