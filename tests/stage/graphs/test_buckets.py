"""Which decode steps get a CUDA graph, and when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.stage.batch import SequenceRows
from molink.stage.graphs.buckets import MAX_ROWS, Bucket, GraphPlan, block_bucket, row_bucket


def steps(*starts: int, count: int = 1) -> list[SequenceRows]:
    return [SequenceRows(start, count, range(99)) for start in starts]


def test_rows_and_tables_are_padded_to_few_sizes() -> None:
    assert [row_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 63, 64)] == [
        1, 2, 4, 4, 8, 8, 16, 16, 24, 64, 64,
    ]  # fmt: skip
    assert [block_bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17)] == [
        1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 24,
    ]  # fmt: skip


@given(st.integers(1, MAX_ROWS), st.integers(1, 10**6))
def test_a_step_fits_its_bucket(rows: int, blocks: int) -> None:
    assert rows <= row_bucket(rows) <= min(MAX_ROWS, max(2 * rows - 1, rows + 7))
    assert blocks <= block_bucket(blocks) <= max(2, 1.5 * blocks)


@pytest.mark.parametrize(("block_size", "blocks"), [(16, 16), (256, 1), (1024, 1)])
def test_short_contexts_share_a_bucket(block_size: int, blocks: int) -> None:
    plan = GraphPlan(block_size, 1 << 30)
    assert plan.bucket(steps(0, 5, 255)) == Bucket(4, blocks)


def test_only_decode_steps_have_one() -> None:
    plan = GraphPlan(16, 1 << 30)
    assert plan.bucket(steps(300)) == Bucket(1, 24)
    assert plan.bucket([*steps(4), *steps(0, count=2)]) is None
    assert plan.bucket(steps(*range(MAX_ROWS))) == Bucket(64, 16)
    assert plan.bucket(steps(*range(MAX_ROWS + 1))) is None


def test_a_bucket_that_comes_again_gets_a_graph() -> None:
    plan, one, other = GraphPlan(16, 1 << 30), Bucket(1, 16), Bucket(2, 16)
    assert [plan.use(one) for _ in range(2)] == ["eager", "capture"]
    plan.captured(one, 5 << 20, True)
    assert plan.use(one) == "replay"
    assert plan.use(other) == "eager"
    assert plan.nbytes == 5 << 20
    # One that is no faster is neither kept nor tried again, but its memory isn't given back.
    assert plan.use(other) == "capture"
    plan.captured(other, 4 << 20, False)
    assert [plan.use(other) for _ in range(9)] == ["eager"] * 9
    assert plan.nbytes == 9 << 20


def test_graphs_are_bounded() -> None:
    plan = GraphPlan(16, 3 << 20)
    made = 0
    for rows in range(1, 10):
        bucket = Bucket(rows, 16)
        if "capture" in [plan.use(bucket) for _ in range(4)]:
            made += 1
            plan.captured(bucket, 0, True)  # as little as it may say, it counts
    assert made == 3
    plan.stop()
    assert plan.bucket(steps(1)) is None
    assert plan.nbytes == 0
