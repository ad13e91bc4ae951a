"""Heads tell what comes into their caches and leaves them, by the digests that routers make."""

import random

from hypothesis import given
from hypothesis import strategies as st

from molink.routing.cache_report import MAX_DIGESTS
from molink.routing.spans import SPAN_TOKENS, span_digests
from molink.scheduler.prefix_tree import OTHER_ROOT, ROOT
from molink.scheduler.span_log import MAX_CHANGES, SpanLog


def cached(log: SpanLog, first: int, tokens: list[int], size: int) -> list[int]:
    """Blocks of ``size`` tokens, from number ``first`` on."""
    parent, blocks = ROOT, []
    for end in range(size, len(tokens) + 1, size):
        block = first + len(blocks)
        log.add_block(block, parent, tuple(tokens[end - size : end]))
        parent = block
        blocks.append(block)
    return blocks


@given(st.sampled_from([1, 16, 24, 64, 100, 256]), st.integers(0, 600))
def test_blocks_of_any_size_have_the_spans_of_a_prompt(size: int, length: int) -> None:
    tokens = [random.Random(length).randrange(9) for _ in range(length)]
    log = SpanLog()
    cached(log, 0, tokens, size)
    whole, added, evicted = log.changes_since(-1)
    assert whole
    assert not evicted
    assert added == span_digests(tokens[: length // size * size])


def test_changes_since_a_version() -> None:
    log, tokens = SpanLog(), list(range(4 * SPAN_TOKENS))
    spans = span_digests(tokens)
    blocks = cached(log, 0, tokens[: 2 * SPAN_TOKENS], SPAN_TOKENS)
    version = log.version
    assert log.changes_since(version) == (False, (), ())
    log.remove_block(blocks[1])
    log.add_block(7, blocks[0], tuple(tokens[SPAN_TOKENS : 2 * SPAN_TOKENS]))
    assert log.changes_since(version) == (False, spans[1:2], ())
    log.remove_block(7)
    assert log.changes_since(version) == (False, (), spans[1:2])
    assert log.changes_since(log.version + 1)[0]
    assert log.changes_since(-1) == (True, spans[:1], ())


def test_two_blocks_that_share_a_span_and_differ_behind_it() -> None:
    log, shared = SpanLog(), list(range(SPAN_TOKENS))
    one = cached(log, 0, [*shared, *[1] * SPAN_TOKENS], 2 * SPAN_TOKENS)
    cached(log, 10, [*shared, *[2] * SPAN_TOKENS], 2 * SPAN_TOKENS)
    log.remove_block(one[0])
    left = span_digests([*shared, *[2] * SPAN_TOKENS])
    assert set(log.changes_since(-1)[1]) == set(left)


def test_what_is_cached_apart_is_not_told() -> None:
    log = SpanLog()
    log.add_block(0, OTHER_ROOT, tuple(range(SPAN_TOKENS)))
    log.add_block(1, 0, tuple(range(SPAN_TOKENS)))
    log.remove_block(1)
    log.remove_block(0)
    assert log.changes_since(-1) == (True, (), ())


def test_who_asks_too_late_gets_everything() -> None:
    log = SpanLog()
    for number in range(MAX_CHANGES + 10):
        log.add_block(number, ROOT, (number,) * SPAN_TOKENS)
        log.remove_block(number)
    assert log.changes_since(3)[0]
    for number in range(MAX_CHANGES + 1):
        log.add_block(number, ROOT, (number,) * SPAN_TOKENS)
    whole, added, evicted = log.changes_since(3)
    assert not whole
    assert (len(added), evicted) == (MAX_DIGESTS, ())
    assert added[-1] == span_digests((MAX_CHANGES,) * SPAN_TOKENS)[0]
    assert not log.changes_since(log.version - 10)[0]
