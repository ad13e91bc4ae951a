from molink.link.policies.base import (
    Acknowledged,
    DecodeFinished,
    DecodeStarted,
    Produced,
    SendRows,
    Wait,
)
from molink.link.policies.create import create_policy
from molink.wire.messages.data import Lane

BOTH = (Lane.DECODE, Lane.BULK)


def test_order_of_production() -> None:
    fifo = create_policy("fifo")
    fifo.handle(Produced(0, Lane.BULK, 500, 128), 0.0)
    fifo.handle(DecodeStarted(4, 0.02), 0.0)
    fifo.handle(Produced(1, Lane.DECODE, 4, 128), 0.0)
    fifo.handle(DecodeFinished(4), 0.02)
    assert fifo.decide(0.0, (Lane.DECODE,)) == Wait()
    assert fifo.decide(0.0, BOTH) == SendRows(0, 500)
    fifo.handle(Acknowledged(Lane.BULK, 64_000, 0.03), 0.1)
    assert fifo.decide(0.0, (Lane.DECODE,)) == Wait()
    assert fifo.decide(0.0, (Lane.BULK,)) == SendRows(1, 4)
    assert fifo.decide(0.0, BOTH) == Wait(None)
