"""Heads tell what comes into their caches and leaves them, by the digests that routers make."""

import random

from hypothesis import given
from hypothesis import strategies as st

from molink.routing.report import MAX_DIGESTS
from molink.routing.spans import SPAN, span_digests
from molink.scheduler.prefix import OTHER_ROOT, ROOT
from molink.scheduler.span_log import MAX_CHANGES, SpanLog


def cached(log: SpanLog, first: int, tokens: list[int], size: int) -> list[int]:
    """Blocks of ``size`` tokens, from number ``first`` on."""
    parent, blocks = ROOT, []
    for end in range(size, len(tokens) + 1, size):
        block = first + len(blocks)
        log.added(block, parent, tuple(tokens[end - size : end]))
        parent = block
        blocks.append(block)
    return blocks


@given(st.sampled_from([1, 16, 24, 64, 100, 256]), st.integers(0, 600))
def test_blocks_of_any_size_have_the_spans_of_a_prompt(size: int, length: int) -> None:
    tokens = [random.Random(length).randrange(9) for _ in range(length)]
    log = SpanLog()
    cached(log, 0, tokens, size)
    whole, added, evicted = log.since(-1)
    assert whole
    assert not evicted
    assert added == span_digests(tokens[: length // size * size])


def test_changes_since_a_version() -> None:
    log, tokens = SpanLog(), list(range(4 * SPAN))
    spans = span_digests(tokens)
    blocks = cached(log, 0, tokens[: 2 * SPAN], SPAN)
    version = log.version
    assert log.since(version) == (False, (), ())
    log.removed(blocks[1])
    log.added(7, blocks[0], tuple(tokens[SPAN : 2 * SPAN]))
    assert log.since(version) == (False, spans[1:2], ())
    log.removed(7)
    assert log.since(version) == (False, (), spans[1:2])
    assert log.since(log.version + 1)[0]
    assert log.since(-1) == (True, spans[:1], ())


def test_two_blocks_that_share_a_span_and_differ_behind_it() -> None:
    log, shared = SpanLog(), list(range(SPAN))
    one = cached(log, 0, [*shared, *[1] * SPAN], 2 * SPAN)
    cached(log, 10, [*shared, *[2] * SPAN], 2 * SPAN)
    log.removed(one[0])
    left = span_digests([*shared, *[2] * SPAN])
    assert set(log.since(-1)[1]) == set(left)


def test_what_is_cached_apart_is_not_told() -> None:
    log = SpanLog()
    log.added(0, OTHER_ROOT, tuple(range(SPAN)))
    log.added(1, 0, tuple(range(SPAN)))
    log.removed(1)
    log.removed(0)
    assert log.since(-1) == (True, (), ())


def test_who_asks_too_late_gets_everything() -> None:
    log = SpanLog()
    for number in range(MAX_CHANGES + 10):
        log.added(number, ROOT, (number,) * SPAN)
        log.removed(number)
    assert log.since(3)[0]
    for number in range(MAX_CHANGES + 1):
        log.added(number, ROOT, (number,) * SPAN)
    whole, added, evicted = log.since(3)
    assert not whole
    assert (len(added), evicted) == (MAX_DIGESTS, ())
    assert added[-1] == span_digests((MAX_CHANGES,) * SPAN)[0]
    assert not log.since(log.version - 10)[0]
