"""Which blocks and positions are read, and which rows run together."""

from molink.stage.attention.base import AttentionShape
from molink.stage.attention.gather import first_position
from molink.stage.attention.work_groups import (
    Span,
    as_slice,
    block_ids,
    bucket_spans,
    effective_windows,
)
from molink.stage.batch import SequenceRows

TABLE = (9, 8, 7, 6, 5, 4)


def span(row: int, start: int, count: int = 1, window: int = 0) -> Span:
    sequence, shape = SequenceRows(start, count, TABLE), AttentionShape(1, 1, 8, 1.0, (window,))
    return Span.from_sequence(row, sequence, first_position(shape, sequence, window), 4)


def test_without_a_window_all_is_read() -> None:
    assert span(3, 0) == Span(3, 1, (9,), 0, 1)
    assert span(0, 3) == Span(0, 1, (9,), 0, 4)
    assert span(0, 4) == Span(0, 1, (9, 8), 0, 5)
    assert span(0, 6, 5) == Span(0, 5, (9, 8, 7), 0, 11)


def test_with_a_window_only_its_blocks_are_read() -> None:
    assert span(0, 9, window=1) == Span(0, 1, (7,), 1, 2)
    assert span(0, 9, window=2) == Span(0, 1, (7,), 0, 2)
    assert span(0, 9, window=3) == Span(0, 1, (8, 7), 3, 6)
    # A chunk's first row has the earliest window.
    assert span(0, 9, 6, window=3) == Span(0, 6, (8, 7, 6), 3, 11)


def test_windows_that_leave_nothing_out_are_none() -> None:
    assert effective_windows((0, 8, 9, 4096), 9) == (0, 8, 0, 0)


def test_padding_repeats_a_block_of_the_same_request() -> None:
    assert block_ids([span(0, 9), span(1, 2)]) == [9, 8, 7, 9, 9, 9]


def test_rows_that_suit_each_other_run_together() -> None:
    wide = [Span(row, 1, range(many), 0, 1) for row, many in enumerate([2, 300, 3, 290, 1])]
    kept = [[s.row for s in bucket] for bucket in bucket_spans(wide, 4, 1 << 62)]
    assert kept == [[1, 3], [0, 2, 4]]
    # A limit on what is gathered at once; a single row may exceed it.
    kept = [[s.row for s in bucket] for bucket in bucket_spans(wide, 4, 24)]
    assert kept == [[1], [3], [0, 2], [4]]
    assert bucket_spans([], 4, 24) == []


def test_consecutive_numbers_become_slices() -> None:
    assert as_slice([4]) == slice(4, 5)
    assert as_slice([4, 5, 6]) == slice(4, 7)
    assert as_slice([4, 6, 5]) is None
    assert as_slice([4, 4, 6]) is None
    assert as_slice(range(2, 9)) == slice(2, 9)
