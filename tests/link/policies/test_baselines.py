from molink.link.policies.base import (
    DecodeFinishedEvent,
    DecodeStartedEvent,
    MessageAcknowledgedEvent,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.link.policies.baselines import FRAGMENT_BYTES, ConcurrentPolicy
from molink.link.policies.create import create_policy
from molink.wire.messages.data_plane import Channel

BOTH = (Channel.DECODE, Channel.BULK)


def test_fifo_keeps_the_order_of_production() -> None:
    fifo = create_policy("fifo")
    fifo.handle(RowsProducedEvent(0, Channel.BULK, 500, 128), 0.0)
    fifo.handle(DecodeStartedEvent(4, 0.02), 0.0)
    fifo.handle(RowsProducedEvent(1, Channel.DECODE, 4, 128), 0.0)
    fifo.handle(DecodeFinishedEvent(4), 0.02)
    assert fifo.choose_action(0.0, (Channel.DECODE,)) == WaitAction()
    assert fifo.choose_action(0.0, BOTH) == SendRowsAction(0, 500)
    fifo.handle(MessageAcknowledgedEvent(Channel.BULK, 64_000, 0.03), 0.1)
    assert fifo.choose_action(0.0, (Channel.DECODE,)) == WaitAction()
    assert fifo.choose_action(0.0, (Channel.BULK,)) == SendRowsAction(1, 4)
    assert fifo.choose_action(0.0, BOTH) == WaitAction(None)


def test_all_volumes_share_the_link() -> None:
    policy = ConcurrentPolicy()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 5, FRAGMENT_BYTES // 2), 0.0)
    policy.handle(RowsProducedEvent(1, Channel.BULK, 3, FRAGMENT_BYTES // 2), 0.0)
    policy.handle(RowsProducedEvent(2, Channel.DECODE, 3, FRAGMENT_BYTES // 2), 0.0)
    policy.handle(DecodeStartedEvent(3, 0.02), 0.0)
    sends = [policy.choose_action(0.0, BOTH) for _ in range(8)]
    assert sends == [
        SendRowsAction(0, 2),
        SendRowsAction(1, 2),
        SendRowsAction(2, 2),
        SendRowsAction(0, 2),
        SendRowsAction(1, 1),
        SendRowsAction(2, 1),
        SendRowsAction(0, 1),
        WaitAction(),
    ]


def test_a_new_volume_joins_the_round() -> None:
    policy = ConcurrentPolicy()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 4, 2 * FRAGMENT_BYTES), 0.0)
    assert policy.choose_action(0.0, BOTH) == SendRowsAction(0, 1), "at least a row"
    policy.handle(RowsProducedEvent(1, Channel.BULK, 1, 2 * FRAGMENT_BYTES), 0.0)
    assert [policy.choose_action(0.0, BOTH) for _ in range(3)] == [
        SendRowsAction(0, 1),
        SendRowsAction(1, 1),
        SendRowsAction(0, 1),
    ]


def test_blocked_channels_are_skipped() -> None:
    policy = ConcurrentPolicy()
    policy.handle(RowsProducedEvent(0, Channel.DECODE, 1, 128), 0.0)
    policy.handle(RowsProducedEvent(1, Channel.BULK, 1, 128), 0.0)
    assert policy.choose_action(0.0, ()) == WaitAction()
    assert policy.choose_action(0.0, (Channel.BULK,)) == SendRowsAction(1, 1)
    assert policy.choose_action(0.0, (Channel.BULK,)) == WaitAction()
    assert policy.choose_action(0.0, (Channel.DECODE,)) == SendRowsAction(0, 1)


def test_more_rows_of_a_volume_join_it_or_bring_it_back() -> None:
    policy = ConcurrentPolicy()
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1, FRAGMENT_BYTES), 0.0)
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1, FRAGMENT_BYTES), 0.0)
    assert [policy.choose_action(0.0, BOTH) for _ in range(3)] == [
        SendRowsAction(0, 1),
        SendRowsAction(0, 1),
        WaitAction(),
    ]
    policy.handle(RowsProducedEvent(0, Channel.BULK, 1, FRAGMENT_BYTES), 0.0)
    assert policy.choose_action(0.0, BOTH) == SendRowsAction(0, 1)
