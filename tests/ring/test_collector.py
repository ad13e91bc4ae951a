"""One report of a volume that is sampled in pieces."""

import pytest

from molink.facts.drafts import MAX_DRAFTS
from molink.ring.ends import Collector
from molink.ring.work import SegmentResult
from molink.wire.messages.base import Payload
from molink.wire.messages.codec import MAX_HEADER, data_codec
from molink.wire.messages.data import (
    MAX_GROUPS,
    Choice,
    Forced,
    Frame,
    Lane,
    Rows,
    Sampled,
    TopLogprobs,
    Volume,
)

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


def test_forced_tokens_of_all_pieces_come_with_the_last() -> None:
    collector, forced = Collector(), (Forced(0, (3, 4)), Forced(2, (5,)))
    for piece in forced:
        sampled = Sampled(4, (), (), (piece,))
        sent = collector.add(sampled, SegmentResult(VOLUME, None, sampled), last=piece is forced[1])
    assert sent == [Sampled(4, (), (), forced)]


@pytest.mark.parametrize("groups", [1, 20, 60, MAX_GROUPS])
def test_as_many_forced_tokens_as_a_header_and_the_next_volume_have_room_for(groups: int) -> None:
    large = 2**31 - 1
    choices = tuple(Choice(large - index, large, large, -0.5) for index in range(groups))
    forced = tuple(Forced(each.request, (large,) * MAX_DRAFTS) for each in choices)
    sampled = Sampled(large, choices, (), forced)
    (found,) = Collector().add(sampled, SegmentResult(VOLUME, None, sampled), last=True)
    assert isinstance(found, Sampled)
    assert found.choices == choices
    assert len(found.forced) == min(groups, 8, (4000 - 25 * groups) // 82)
    frame = Frame(large, Lane.DECODE, large, found)
    (header,) = data_codec().encode(frame)
    assert len(header) <= MAX_HEADER
    assert data_codec().decode([header]) == (frame, None)
