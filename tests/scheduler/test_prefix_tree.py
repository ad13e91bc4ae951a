"""The prefix tree against a list of sequences, and its span log."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import InvariantError
from molink.routing.cache_report import DIGEST_BYTES, MAX_DIGESTS, SPAN_TOKENS, span_digests
from molink.scheduler.prefix_tree import (
    MAX_CHANGES,
    OTHER_ROOT,
    ROOT,
    PrefixMatch,
    PrefixTree,
    SpanLog,
    find_root,
)

SIZE = 4


def add(tree: PrefixTree, tokens: list[int], first_block: int) -> int:
    """Insert ``tokens``, with blocks from ``first_block`` on for the missing parts."""
    at = ROOT
    for number, first in enumerate(range(0, len(tokens), SIZE)):
        key = tuple(tokens[first : first + SIZE])
        there = tree.find_child(at, key)
        if there is None:
            tree.insert_block(at, key, first_block + number)
        at = first_block + number if there is None else there
    return at


def test_a_match_has_full_blocks_and_a_partial_one() -> None:
    tree = PrefixTree(SIZE)
    assert [*tree.path_to_root(add(tree, [*range(10)], 100))] == [102, 101, 100]
    assert tree.match_prefix([*range(10), 77]) == PrefixMatch(101, (100, 101), 102, 10)
    assert tree.match_prefix([*range(9)]) == PrefixMatch(101, (100, 101), 102, 9)
    assert tree.match_prefix([*range(8)]) == PrefixMatch(101, (100, 101), -1, 8)
    assert tree.match_prefix([*range(7), 77, 78]) == PrefixMatch(100, (100,), 101, 7)
    assert tree.match_prefix([77]) == tree.match_prefix([]) == PrefixMatch()


def test_the_best_partial_match_is_copied() -> None:
    tree = PrefixTree(SIZE)
    for block, key in enumerate([(1, 2, 3, 4), (1, 2, 3, 7), (1, 2, 5, 6), (1, 9), (2, 2)]):
        tree.insert_block(ROOT, key, block)
    tree.validate()
    assert tree.match_prefix([1, 2, 3, 7]).blocks == (1,)
    assert (
        tree.match_prefix([1, 2, 5, 9]).copy_source,
        tree.match_prefix([1, 2, 5, 9]).num_tokens,
    ) == (2, 3)
    assert tree.match_prefix([1, 9, 9, 9]).num_tokens == 2
    assert tree.match_prefix([1, 8, 3, 4]).num_tokens == 1
    assert tree.match_prefix([3]).copy_source == -1


@given(st.sets(st.binary(max_size=16), min_size=2, max_size=8))
def test_each_salt_has_roots_of_its_own(salts: set[bytes]) -> None:
    roots = [find_root(salt, is_other=other) for salt in sorted(salts) for other in (False, True)]
    assert len(set(roots)) == 2 * len(salts)
    assert max(roots) < 0
    assert (find_root(b""), find_root(b"", is_other=True)) == (ROOT, OTHER_ROOT)
    tree = PrefixTree(SIZE)
    for block, root in enumerate(roots):
        tree.insert_block(root, (1, 2, 3, 4), block)
        tree.validate()
    for block, root in enumerate(roots):
        assert tree.match_prefix([1, 2, 3, 4, 5], root) == PrefixMatch(block, (block,), -1, 4)
        tree.remove_block(block)
        assert tree.match_prefix([1, 2, 3, 4, 5], root) == PrefixMatch(root)


def test_longer_and_shorter_siblings() -> None:
    tree = PrefixTree(SIZE)
    tree.insert_block(ROOT, (1, 2), 0)
    assert tree.has_extension(ROOT, (1,))
    assert tree.has_extension(ROOT, (1, 2))
    assert not tree.has_extension(ROOT, (1, 2, 3))
    assert tree.find_shorter(ROOT, (1, 2, 3)) == 0
    assert tree.find_shorter(ROOT, (1, 2)) is None
    assert tree.find_shorter(ROOT, (1, 3, 3)) is None


def test_list_subtree() -> None:
    tree = PrefixTree(SIZE)
    add(tree, [*range(10)], 0)
    add(tree, [*range(6)], 10)
    add(tree, [9], 20)
    assert tree.list_subtree(0) == [0, 11, 1, 2]
    assert {tree.parent_of(block) for block in (0, 20)} == {ROOT}


def test_invalid_blocks_are_rejected() -> None:
    tree = PrefixTree(SIZE)
    tree.insert_block(ROOT, (1, 2, 3, 4), 0)
    tree.insert_block(0, (5,), 1)
    for parent, key, block in [
        (1, (6,), 2),
        (0, (5,), 2),
        (0, (6,), 1),
        (0, (), 2),
        (0, (1, 2, 3, 4, 5), 2),
    ]:
        with pytest.raises(InvariantError):
            tree.insert_block(parent, key, block)
    with pytest.raises(InvariantError):
        tree.remove_block(0)
    tree.remove_block(1)
    tree.remove_block(0)
    assert len(tree) == 0
    tree.validate()


def common(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=12),
    tokens=st.lists(st.integers(0, 2), max_size=14),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_match_is_the_longest_prefix(
    sequences: list[list[int]], tokens: list[int], data: st.DataObject
) -> None:
    tree = PrefixTree(SIZE)
    there: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        end = add(tree, sequence, 10 * number)
        for depth, block in enumerate([*tree.path_to_root(end)][::-1], 1):
            there[block] = sequence[: depth * SIZE]
        if data.draw(st.booleans()) and tree.list_subtree(end) == [end]:
            tree.remove_block(end)
            del there[end]
        tree.validate()
        assert there.keys() == set(tree)
    found = tree.match_prefix(tokens)
    assert found.num_tokens == max((common(each, tokens) for each in there.values()), default=0)
    assert len(found.blocks) == found.num_tokens // SIZE
    for number, block in enumerate(found.blocks, 1):
        assert there[block] == tokens[: number * SIZE]
    assert (found.copy_source >= 0) == (found.num_tokens % SIZE > 0)
    if found.copy_source >= 0:
        assert there[found.copy_source][: found.num_tokens] == tokens[: found.num_tokens]


def cached(log: SpanLog, first: int, tokens: list[int], size: int) -> list[int]:
    """Blocks of ``size`` tokens, numbered from ``first``."""
    parent, blocks = ROOT, []
    for end in range(size, len(tokens) + 1, size):
        block = first + len(blocks)
        log.add_block(block, parent, tuple(tokens[end - size : end]))
        parent = block
        blocks.append(block)
    return blocks


@given(st.sampled_from([1, 16, 24, 64, 100, 256]), st.integers(0, 600))
def test_spans_are_independent_of_the_block_size(size: int, length: int) -> None:
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


def test_salted_spans_differ_also_where_the_preceding_digest_is_known() -> None:
    log, tokens, salt = SpanLog(), list(range(3 * SPAN_TOKENS)), b"salt"
    parent = find_root(salt)
    for block in range(6):  # two blocks of each span
        half = SPAN_TOKENS // 2
        log.add_block(block, parent, tuple(tokens[block * half : (block + 1) * half]), salt)
        parent = block
    reported = log.changes_since(-1)[1]
    assert reported == span_digests(tokens, cache_scope=salt)
    assert not {*reported} & {*span_digests(tokens), *span_digests(tokens, cache_scope=b"other")}
    for index, digest in enumerate(reported[:-1]):
        known = digest.to_bytes(DIGEST_BYTES, "little")
        (guess,) = span_digests(tokens[(index + 1) * SPAN_TOKENS :][:SPAN_TOKENS], known)
        assert guess not in reported
    for block in reversed(range(6)):
        log.remove_block(block)
    assert log.changes_since(-1)[1] == ()


def test_blocks_may_share_a_span() -> None:
    log, shared = SpanLog(), list(range(SPAN_TOKENS))
    one = cached(log, 0, [*shared, *[1] * SPAN_TOKENS], 2 * SPAN_TOKENS)
    cached(log, 10, [*shared, *[2] * SPAN_TOKENS], 2 * SPAN_TOKENS)
    log.remove_block(one[0])
    left = span_digests([*shared, *[2] * SPAN_TOKENS])
    assert set(log.changes_since(-1)[1]) == set(left)


def test_the_other_root_is_not_reported() -> None:
    log = SpanLog()
    log.add_block(0, OTHER_ROOT, tuple(range(SPAN_TOKENS)))
    log.add_block(1, 0, tuple(range(SPAN_TOKENS)))
    log.add_block(2, find_root(b"s", is_other=True), tuple(range(SPAN_TOKENS)), b"s")
    log.remove_block(2)
    log.remove_block(1)
    log.remove_block(0)
    assert log.changes_since(-1) == (True, (), ())


def test_an_old_version_gets_a_full_report() -> None:
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
