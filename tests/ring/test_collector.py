"""One report of a volume that is sampled in pieces."""

from molink.ring.ends import Collector
from molink.ring.work import SegmentResult
from molink.wire.messages.base import Payload
from molink.wire.messages.data import Choice, Rows, Sampled, TopLogprobs, Volume

VOLUME = Volume(4, True, (Rows(0, 0, 1, 1),), Payload("i32", (1,)))
ONE, TWO = Choice(0, 5, 11), Choice(2, 7, 12)
TOP = TopLogprobs(0, 5, (11,), (-0.5,))


def test_the_last_piece_brings_all_choices() -> None:
    collector = Collector()
    first, last = Sampled(4, (ONE,), (1,)), Sampled(4, (TWO,), (1, 3))
    assert collector.add(first, SegmentResult(VOLUME, None, first, (TOP,)), last=False) == [TOP]
    assert len(collector) == 1
    other = Sampled(5, (ONE,))
    assert collector.add(other, SegmentResult(VOLUME, None, other), last=True) == [other]
    assert collector.add(last, SegmentResult(VOLUME, None, last), last=True) == [
        Sampled(4, (ONE, TWO), (1, 3))
    ]
    assert not len(collector)
