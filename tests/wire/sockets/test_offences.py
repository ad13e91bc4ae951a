from molink.wire.sockets.offences import Offences


def test_the_last_one_tolerated() -> None:
    offences = Offences(limit=3)
    assert [offences.count("a", 0.0) for _ in range(3)] == [False, False, True]
    assert not offences.count("a", 0.0)


def test_users_are_counted_apart_and_forgiven_in_time() -> None:
    offences = Offences(limit=2)
    assert not offences.count("a", 0.0)
    assert not offences.count("b", 0.0)
    assert not offences.count("a", 100.0)
    assert offences.count("a", 101.0)
