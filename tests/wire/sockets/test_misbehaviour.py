from molink.wire.sockets.misbehaviour import MisbehaviourScore


def test_the_last_one_tolerated() -> None:
    offences = MisbehaviourScore(limit=3)
    assert [offences.add_offence("a", 0.0) for _ in range(3)] == [False, False, True]
    assert not offences.add_offence("a", 0.0)


def test_users_are_counted_apart_and_forgiven_in_time() -> None:
    offences = MisbehaviourScore(limit=2)
    assert not offences.add_offence("a", 0.0)
    assert not offences.add_offence("b", 0.0)
    assert not offences.add_offence("a", 100.0)
    assert offences.add_offence("a", 101.0)
