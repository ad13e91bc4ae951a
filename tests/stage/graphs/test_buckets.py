"""Which decode steps get a CUDA graph, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.stage.batch import SequenceRows
from molink.stage.graphs import buckets
from molink.stage.graphs.buckets import (
    MAX_RUNS_BEFORE_CAPTURE,
    GraphBucket,
    GraphPlan,
    block_bucket,
    row_bucket,
    split_rows,
)


def steps(*starts: int, count: int = 1) -> list[SequenceRows]:
    return [SequenceRows(start, count, range(99)) for start in starts]


def test_rows_and_tables_are_padded_to_few_sizes() -> None:
    assert [row_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65, 97)] == [
        1, 2, 4, 4, 8, 8, 16, 16, 24, 64, 96, 128,
    ]  # fmt: skip
    assert [block_bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17)] == [
        1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 24,
    ]  # fmt: skip


@given(st.integers(1, 1024), st.integers(1, 10**6))
def test_a_step_fits_its_bucket(rows: int, blocks: int) -> None:
    assert rows <= row_bucket(rows) <= max(2 * rows - 1, rows + (7 if rows <= 64 else 31))
    assert blocks <= block_bucket(blocks) <= max(2, 1.5 * blocks)


@pytest.mark.parametrize(("block_size", "blocks"), [(16, 16), (256, 1), (1024, 1)])
def test_short_contexts_share_a_bucket(block_size: int, blocks: int) -> None:
    plan = GraphPlan(block_size, 1 << 30)
    assert plan.find_bucket(steps(0, 5, 255)) == GraphBucket(4, blocks)


def test_only_decode_steps_have_one() -> None:
    plan = GraphPlan(16, 1 << 30)
    assert plan.find_bucket(steps(300)) == GraphBucket(1, 24)
    assert plan.find_bucket([*steps(4), *steps(0, count=2)]) is None
    assert plan.find_bucket(steps(*range(64))) == GraphBucket(64, 16)
    assert plan.find_bucket(steps(*range(65))) is None
    adapted = SequenceRows(4, 1, range(99), adapter=1)
    assert plan.find_bucket([*steps(4), adapted]) is None


def test_drafts_count_as_rows() -> None:
    plan = GraphPlan(16, 1 << 30, max_rows=20, max_drafts=3)
    assert plan.find_bucket([*steps(4), *steps(250, count=4)]) == GraphBucket(8, 16)
    assert plan.find_bucket(steps(4, count=5)) is None
    assert plan.find_bucket(steps(*range(5), count=4)) == GraphBucket(24, 16)
    assert plan.find_bucket(steps(*range(5), count=4) + steps(9)) is None


def test_rows_of_a_request_are_split() -> None:
    alone, table = SequenceRows(7, 1, (5,), 90), (1, 2)
    rows = [SequenceRows(14, 1, table, 17), SequenceRows(15, 1, table, 17)]
    assert split_rows([alone, SequenceRows(14, 3, table)]) == [
        alone,
        *rows,
        SequenceRows(16, 1, table, 17),
    ]
    # Angles depend on the request's maximum length, not on the row's position.
    assert {one.max_positions for one in split_rows([SequenceRows(14, 3, table, 99)])} == {99}


def test_attention_in_place_has_one_graph_for_all_lengths() -> None:
    plan = GraphPlan(16, 1 << 30, max_rows=100, context=5000)
    for longest in (0, 255, 256, 4999):
        assert plan.find_bucket(steps(longest)) == GraphBucket(1, 313)
    assert plan.find_bucket(steps(5000)) is None
    assert plan.find_bucket(steps(*range(100))) == GraphBucket(128, 313)
    assert plan.find_bucket(steps(*range(101))) is None
    # Timing uses short requests, for which launches matter most.
    assert plan.typical_blocks(GraphBucket(1, 313)) == 16
    found = []
    while (bucket := plan.next_bucket()) is not None:
        found.append(bucket)
        plan.record_capture(bucket, 0, True)
    assert found == [GraphBucket(rows, 313) for rows in (1, 2, 4, 8)]


@pytest.fixture
def nothing_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only buckets that occurred are captured."""
    monkeypatch.setattr(buckets, "_EXPECTED_SHAPES", ())


def test_a_repeated_bucket_runs_eagerly_until_it_is_captured(nothing_expected: None) -> None:
    plan, one, other = GraphPlan(16, 1 << 30), GraphBucket(1, 16), GraphBucket(2, 16)
    assert plan.choose_action(one) == "eager"
    assert plan.next_bucket() is None
    assert [plan.choose_action(one) for _ in range(9)] == ["eager"] * 9
    assert [plan.choose_action(other) for _ in range(20)] == ["eager"] * 20
    assert plan.next_bucket() == other
    plan.record_capture(other, 5 << 20, True)
    assert plan.choose_action(other) == "replay"
    assert (plan.nbytes, plan.remaining_bytes) == (5 << 20, (1 << 30) - (5 << 20))
    # A graph that is no faster is neither kept nor captured again, but its memory isn't freed.
    assert plan.next_bucket() == one
    plan.record_capture(one, 4 << 20, False)
    assert plan.next_bucket() is None
    assert [plan.choose_action(one) for _ in range(2 * MAX_RUNS_BEFORE_CAPTURE)] == [
        "eager"
    ] * 2 * MAX_RUNS_BEFORE_CAPTURE
    assert plan.nbytes == 9 << 20


def test_a_busy_stage_captures_overdue_graphs() -> None:
    plan, one = GraphPlan(16, 1 << 30), GraphBucket(1, 16)
    uses = [plan.choose_action(one) for _ in range(MAX_RUNS_BEFORE_CAPTURE + 1)]
    assert uses == ["eager"] * MAX_RUNS_BEFORE_CAPTURE + ["capture"]


def test_a_new_stage_captures_expected_shapes() -> None:
    plan, found = GraphPlan(16, 1 << 30), []
    while (bucket := plan.next_bucket()) is not None:
        found.append(bucket)
        plan.record_capture(bucket, 0, True)
    assert found == [
        GraphBucket(1, 32),
        GraphBucket(2, 16),
        GraphBucket(4, 16),
        GraphBucket(1, 64),
        GraphBucket(8, 16),
    ]
    for _ in range(2):
        plan.choose_action(GraphBucket(16, 16))
    assert plan.next_bucket() == GraphBucket(16, 16)
    plan.disable_graphs()
    assert plan.next_bucket() is None


def test_graphs_are_bounded(nothing_expected: None) -> None:
    plan = GraphPlan(16, 3 << 20)
    made = 0
    for rows in range(1, 10):
        for _ in range(4):
            plan.choose_action(GraphBucket(rows, 16))
        bucket = plan.next_bucket()
        if bucket is not None:
            made += 1
            plan.record_capture(bucket, 0, True)  # counts, although no memory was measured
    assert made == 3
    assert "capture" not in [
        plan.choose_action(GraphBucket(9, 16)) for _ in range(2 * MAX_RUNS_BEFORE_CAPTURE)
    ]
    plan.disable_graphs()
    assert plan.find_bucket(steps(1)) is None
    assert plan.nbytes == 0
