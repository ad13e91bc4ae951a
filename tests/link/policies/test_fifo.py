from molink.link.policies.base import (
    DecodeFinishedEvent,
    DecodeStartedEvent,
    MessageAcknowledgedEvent,
    RowsProducedEvent,
    SendRowsAction,
    WaitAction,
)
from molink.link.policies.create import create_policy
from molink.wire.messages.data_plane import Channel

BOTH = (Channel.DECODE, Channel.BULK)


def test_order_of_production() -> None:
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
