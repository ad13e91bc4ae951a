from molink.wire.sockets.misbehaviour import MisbehaviourScore


def test_violations_at_the_limit_block_the_peer() -> None:
    violations = MisbehaviourScore(limit=3)
    assert [violations.add_violation("a", 0.0) for _ in range(3)] == [False, False, True]
    assert not violations.add_violation("a", 0.0)


def test_violations_are_per_peer_and_expire() -> None:
    violations = MisbehaviourScore(limit=2)
    assert not violations.add_violation("a", 0.0)
    assert not violations.add_violation("b", 0.0)
    assert not violations.add_violation("a", 100.0)
    assert violations.add_violation("a", 101.0)
