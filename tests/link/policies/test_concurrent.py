from molink.link.policies.base import DecodeStarted, Produced, SendRows, Wait
from molink.link.policies.concurrent import PIECE, Concurrent
from molink.wire.messages.data import Lane

BOTH = (Lane.DECODE, Lane.BULK)


def test_all_volumes_share_the_link() -> None:
    policy = Concurrent()
    policy.handle(Produced(0, Lane.BULK, 5, PIECE // 2), 0.0)
    policy.handle(Produced(1, Lane.BULK, 3, PIECE // 2), 0.0)
    policy.handle(Produced(2, Lane.DECODE, 3, PIECE // 2), 0.0)
    policy.handle(DecodeStarted(3, 0.02), 0.0)
    sends = [policy.decide(0.0, BOTH) for _ in range(8)]
    assert sends == [
        SendRows(0, 2),
        SendRows(1, 2),
        SendRows(2, 2),
        SendRows(0, 2),
        SendRows(1, 1),
        SendRows(2, 1),
        SendRows(0, 1),
        Wait(),
    ]


def test_a_new_volume_joins_the_round() -> None:
    policy = Concurrent()
    policy.handle(Produced(0, Lane.BULK, 4, 2 * PIECE), 0.0)
    assert policy.decide(0.0, BOTH) == SendRows(0, 1), "at least a row"
    policy.handle(Produced(1, Lane.BULK, 1, 2 * PIECE), 0.0)
    assert [policy.decide(0.0, BOTH) for _ in range(3)] == [
        SendRows(0, 1),
        SendRows(1, 1),
        SendRows(0, 1),
    ]


def test_only_what_can_travel_takes_its_turn() -> None:
    policy = Concurrent()
    policy.handle(Produced(0, Lane.DECODE, 1, 128), 0.0)
    policy.handle(Produced(1, Lane.BULK, 1, 128), 0.0)
    assert policy.decide(0.0, ()) == Wait()
    assert policy.decide(0.0, (Lane.BULK,)) == SendRows(1, 1)
    assert policy.decide(0.0, (Lane.BULK,)) == Wait()
    assert policy.decide(0.0, (Lane.DECODE,)) == SendRows(0, 1)


def test_more_rows_of_a_volume_join_it_or_bring_it_back() -> None:
    policy = Concurrent()
    policy.handle(Produced(0, Lane.BULK, 1, PIECE), 0.0)
    policy.handle(Produced(0, Lane.BULK, 1, PIECE), 0.0)
    assert [policy.decide(0.0, BOTH) for _ in range(3)] == [SendRows(0, 1), SendRows(0, 1), Wait()]
    policy.handle(Produced(0, Lane.BULK, 1, PIECE), 0.0)
    assert policy.decide(0.0, BOTH) == SendRows(0, 1)
