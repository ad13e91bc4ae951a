"""Which token sequences are in which KV blocks: a radix tree over token ids."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from molink.errors import InvariantError
from molink.routing.cache_report import (
    DIGEST_BYTES,
    MAX_DIGESTS,
    ROOT_DIGEST,
    SPAN_TOKENS,
    span_digests,
)

#: The token ids that a block holds the keys and values of.
BlockTokens = tuple[int, ...]
#: Stands for the parent of the blocks that sequences begin with; and for that of sequences whose
#: KV is another although their tokens may be the same. Blocks have numbers from 0 on.
ROOT, OTHER_ROOT = -1, -2


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What is cached of a token sequence.

    The full ``blocks`` lead from the root to ``end_node``; ``copy_source`` has those of the
    ``num_tokens`` that follow them, and possibly others after these. If there are none it is -1.
    """

    end_node: int = ROOT
    blocks: tuple[int, ...] = ()
    copy_source: int = -1
    num_tokens: int = 0


class PrefixTree:
    """Maps token sequences to blocks of ``block_size`` tokens. Its nodes are the blocks.

    Only a full block has others below it, and no two of these hold the same tokens. The tree
    decides nothing about memory: who adds or removes a block sees to that. A block is removed
    before the one above it is.

    Plain dictionaries of numbers, not objects that refer to each other: there may be a hundred
    thousand blocks, and the garbage collector would have to look at every object again and again.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: Parent and key of each block.
        self._locations: dict[int, tuple[int, BlockTokens]] = {}
        #: The same the other way round.
        self._children: dict[tuple[int, BlockTokens], int] = {}
        #: Keys below each block that has others below it, in order: the one that shares most with
        #: given tokens is a neighbour of the place where these would be.
        self._sorted_keys: dict[int, list[BlockTokens]] = {}
        #: Rises with every change: what was found before may differ from what there is now.
        self.version = 0

    def __len__(self) -> int:
        return len(self._locations)

    def __iter__(self) -> Iterator[int]:
        return iter(self._locations)

    def match_prefix(self, tokens: Sequence[int], root: int = ROOT) -> PrefixMatch:
        """The longest cached beginning of ``tokens`` below ``root``, token by token."""
        size, end, blocks = self._block_size, root, list[int]()
        for last in range(size, len(tokens) + 1, size):
            block = self._children.get((end, tuple(tokens[last - size : last])))
            if block is None:
                break
            end = block
            blocks.append(block)
        first = len(blocks) * size
        source, extra = self._closest_child(end, tuple(tokens[first : first + size]))
        return PrefixMatch(end, tuple(blocks), source, first + extra)

    def parent_of(self, block: int) -> int:
        """The block above ``block``, or its root."""
        return self._locations[block][0]

    def find_child(self, parent: int, key: BlockTokens) -> int | None:
        """The block with the tokens ``key`` below ``parent_of``."""
        return self._children.get((parent, key))

    def insert_block(self, parent: int, key: BlockTokens, block: int) -> None:
        """A block has the tokens ``key`` after those of ``parent_of``.

        Raises:
            InvariantError: it is in the tree, or these tokens are, or can't be.
        """
        full = parent < 0 or len(self._locations[parent][1]) == self._block_size
        if not full or not 0 < len(key) <= self._block_size or (parent, key) in self._children:
            raise InvariantError(f"block {block} of {len(key)} tokens can't follow {parent}")
        if block in self._locations:
            raise InvariantError(f"block {block} is in the tree twice")
        self._locations[block] = parent, key
        self._children[parent, key] = block
        insort(self._sorted_keys.setdefault(parent, []), key)
        self.version += 1

    def remove_block(self, block: int) -> None:
        """Forget a block with none below it.

        Raises:
            InvariantError: there are some.
        """
        if block in self._sorted_keys:
            raise InvariantError(f"block {block} can't be removed before what follows it")
        parent, key = place = self._locations.pop(block)
        del self._children[place]
        keys = self._sorted_keys[parent]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._sorted_keys[parent]
        self.version += 1

    def has_extension(self, parent: int, key: BlockTokens) -> bool:
        """Whether a block below ``parent_of`` begins with ``key``."""
        keys = self._sorted_keys.get(parent, [])
        at = bisect_left(keys, key)
        return at < len(keys) and keys[at][: len(key)] == key

    def find_shorter(self, parent: int, key: BlockTokens) -> int | None:
        """A block below ``parent_of`` that ``key`` begins with and goes beyond."""
        keys = self._sorted_keys.get(parent, [])
        at = bisect_left(keys, key) - 1
        if at < 0 or key[: len(keys[at])] != keys[at]:
            return None
        return self._children[parent, keys[at]]

    def path_to_root(self, block: int) -> Iterator[int]:
        """From ``block`` up to the one that its sequence begins with."""
        while block >= 0:
            yield block
            block = self._locations[block][0]

    def list_subtree(self, top: int) -> list[int]:
        """``top`` and all blocks below it, each after the one above it."""
        found = [top]
        for block in found:
            found += (self._children[block, key] for key in self._sorted_keys.get(block, ()))
        return found

    def validate(self) -> None:
        """Both directions agree, and every block leads to the root.

        Raises:
            InvariantError: they don't.
        """
        if {place: block for block, place in self._locations.items()} != self._children:
            raise InvariantError("blocks are not below those that they should be below")
        keys: dict[int, list[BlockTokens]] = {}
        for parent, key in self._children:
            keys.setdefault(parent, []).append(key)
            if parent >= 0 and len(self._locations[parent][1]) != self._block_size:
                raise InvariantError(f"block {parent} is not full but others follow it")
        if {parent: sorted(found) for parent, found in keys.items()} != self._sorted_keys:
            raise InvariantError("the keys below a block are not in order")
        led = {*self.list_subtree(ROOT), *self.list_subtree(OTHER_ROOT)}
        if led != {ROOT, OTHER_ROOT, *self._locations}:
            raise InvariantError("a block does not lead to a root")

    def _closest_child(self, parent: int, tokens: BlockTokens) -> tuple[int, int]:
        """The block below ``parent_of`` with most leading ``tokens``, and how many; -1 if none."""
        keys = self._sorted_keys.get(parent, [])
        at = bisect_left(keys, tokens)
        best, maximum = -1, 0
        for key in keys[max(0, at - 1) : at + 1]:
            common = _common_length(key, tokens)
            if common > maximum:
                best, maximum = self._children[parent, key], common
        return best, maximum


def _common_length(one: BlockTokens, other: BlockTokens) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


#: Changes that are remembered: who asks less often gets what came last.
MAX_CHANGES = MAX_DIGESTS


class SpanLog:
    """Spans of the cached blocks, and the latest changes of them.

    A span is cached with the block that it ends in. Sequences whose KV is another although their
    tokens may be the same are left out.
    """

    def __init__(self) -> None:
        #: Of each full block: the digest of its last whole span, the tokens after that, and the
        #: spans that end in it.
        self._blocks: dict[int, tuple[bytes, BlockTokens, tuple[int, ...]]] = {
            ROOT: (ROOT_DIGEST, (), ())
        }
        #: How many blocks each span ends in: with long blocks, several that differ behind it.
        self._span_counts: Counter[int] = Counter()
        self._changed_spans: deque[int] = deque(maxlen=MAX_CHANGES)
        #: Changes so far.
        self.version = 0

    def add_block(self, block: int, parent: int, key: BlockTokens) -> None:
        """A full block is cached, below another one or the root."""
        if parent == OTHER_ROOT or parent not in self._blocks:
            return
        digest, before, _ = self._blocks[parent]
        rest = before + key
        spans = span_digests(rest, digest)
        if spans:
            digest = spans[-1].to_bytes(DIGEST_BYTES, "little")
            rest = rest[len(spans) * SPAN_TOKENS :]
        self._blocks[block] = digest, rest, spans
        for span in spans:
            self._span_counts[span] += 1
            if self._span_counts[span] == 1:
                self._record_change(span)

    def remove_block(self, block: int) -> None:
        """A block is cached no longer; one that wasn't full never was here."""
        _, _, spans = self._blocks.pop(block, (ROOT_DIGEST, (), ()))
        for span in spans:
            self._span_counts[span] -= 1
            if not self._span_counts[span]:
                del self._span_counts[span]
                self._record_change(span)

    def changes_since(self, version: int) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        """What came and what left since then.

        Where that isn't known, what came last; ``True`` if that is all that there is.
        """
        missed = self.version - version
        if not 0 <= missed <= len(self._changed_spans) or version < 0:
            newest = tuple(islice(reversed(self._span_counts), MAX_DIGESTS))
            return len(self._span_counts) <= MAX_DIGESTS, newest[::-1], ()
        changed = dict.fromkeys(list(self._changed_spans)[len(self._changed_spans) - missed :])
        added = tuple(span for span in changed if span in self._span_counts)
        return False, added, tuple(span for span in changed if span not in self._span_counts)

    def _record_change(self, span: int) -> None:
        self._changed_spans.append(span)
        self.version += 1
