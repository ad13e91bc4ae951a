"""Cached prefixes by pipeline: bounds under any events, and eviction from the end of a path."""

import random

from hypothesis import given
from hypothesis import strategies as st

from molink.routing.cache_report import SPAN_TOKENS
from molink.routing.span_tree import MAX_SPANS, SpanTree

HALF = 10.0


def path(family: int, length: int) -> tuple[int, ...]:
    return tuple(family * 1000 + index for index in range(length))


def test_spans_are_tracked_by_pipeline() -> None:
    tree = SpanTree(HALF)
    tree.use_spans("a", path(1, 5), 0.0)
    tree.add_spans("b", path(1, 3))
    assert [tree.match_prefix(name, path(1, 8)) for name in "abc"] == [5, 3, 0]
    assert tree.match_prefix("a", path(2, 3)) == 0
    tree.remove_spans("a", path(1, 5)[3:])
    assert tree.match_prefix("a", path(1, 8)) == 3
    tree.drop_pipeline("a")
    assert [tree.match_prefix(name, path(1, 8)) for name in "ab"] == [0, 3]


def test_requests_are_counted_in_a_window() -> None:
    tree = SpanTree(HALF)
    for now in (1.0, 2.0, 12.0):
        tree.use_spans("a", path(1, 2), now)
    counts = [tree.count_requests("a", 1000, now) for now in (12.0, 19.0, 21.0, 31.0)]
    assert counts == [3, 3, 1, 0]


def test_eviction_is_lru_from_the_end() -> None:
    tree = SpanTree(HALF)
    tree.set_capacity("a", 6 * SPAN_TOKENS)
    tree.use_spans("a", path(1, 4), 0.0)
    tree.use_spans("a", path(2, 4), 1.0)
    assert [tree.match_prefix("a", path(family, 4)) for family in (1, 2)] == [2, 4]
    tree.validate()


def test_evictions_count_shared_spans_once() -> None:
    tree = SpanTree(HALF)
    tree.set_capacity("a", 4 * SPAN_TOKENS)
    tree.use_spans("a", path(1, 4), 0.0)
    assert tree.estimate_evictions("a", 2, 1.0) == 0
    for _ in range(3):
        tree.use_spans("a", path(1, 4), 0.0)
    assert tree.estimate_evictions("a", 2, 1.0) == 2
    assert tree.estimate_evictions("a", 0, 1.0) == 0
    assert tree.estimate_evictions("a", 2, 100.0) == 0


def test_the_total_is_bounded() -> None:
    tree = SpanTree(HALF, maximum=10)
    for name in "abcd":
        tree.set_capacity(name, 8 * SPAN_TOKENS)
        tree.use_spans(name, path(1, 6), 0.0)
        tree.add_spans(name, path(2, 6))
        tree.validate()
    assert len(tree) == 10


def test_large_capacities_keep_the_bound() -> None:
    tree = SpanTree(HALF)
    tree.set_capacity("a", 1 << 40)
    tree.add_spans("a", range(MAX_SPANS + 5))
    tree.validate()
    assert len(tree) == MAX_SPANS


@given(st.integers(0, 2**32))
def test_paths_have_no_holes(seed: int) -> None:
    rng = random.Random(seed)
    tree = SpanTree(HALF, maximum=20)
    for now in range(40):
        name = rng.choice("ab")
        if rng.random() < 0.1:
            tree.set_capacity(name, rng.randrange(1, 12) * SPAN_TOKENS)
        family, length = rng.randrange(4), rng.randrange(1, 9)
        tree.use_spans(name, path(family, length), float(now))
        tree.validate()
        for each in range(4):
            present = [tree.count_requests(name, digest, now) > 0 for digest in path(each, 8)]
            there = tree.match_prefix(name, path(each, 8))
            assert not any(present[there:])
