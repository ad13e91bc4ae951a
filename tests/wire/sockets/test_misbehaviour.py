from molink.wire.sockets.misbehaviour import MisbehaviourScore


def test_offences_at_the_limit_block_the_peer() -> None:
    offences = MisbehaviourScore(limit=3)
    assert [offences.add_violation("a", 0.0) for _ in range(3)] == [False, False, True]
    assert not offences.add_violation("a", 0.0)


def test_offences_are_per_peer_and_expire() -> None:
    offences = MisbehaviourScore(limit=2)
    assert not offences.add_violation("a", 0.0)
    assert not offences.add_violation("b", 0.0)
    assert not offences.add_violation("a", 100.0)
    assert offences.add_violation("a", 101.0)
