"""A radix tree from token sequences to KV blocks, and the log of its changes."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from molink.errors import InvariantError
from molink.facts.images import narrow_id
from molink.routing.cache_report import (
    DIGEST_BYTES,
    MAX_DIGESTS,
    ROOT_DIGEST,
    SPAN_TOKENS,
    span_digests,
)

#: The token ids of a block.
BlockTokens = tuple[int, ...]
#: Parents of first blocks without a scope; the second is for sequences whose keys differ for the
#: same tokens. :func:`find_root` returns the parents for scopes.
ROOT, OTHER_ROOT = -1, -2


def find_root(cache_scope: bytes, *, is_other: bool = False) -> int:
    """Return the parent of first blocks of a scope's sequences: a negative number of its own.

    The number encodes the scope, so roots need no table. ``is_other`` is as in :data:`OTHER_ROOT`.
    """
    number = int.from_bytes(b"\x01" + cache_scope, "big") if cache_scope else 0
    return (OTHER_ROOT if is_other else ROOT) - 2 * number


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a token sequence.

    The full ``blocks`` lead from the root to ``end_node``. ``copy_source`` is a block that begins
    with the following tokens, up to ``num_tokens`` in all; -1 if there is none. With recurrent
    layers, the prefix ends where a ``snapshot`` (a slot) has the state; -1 if there is none.
    ``num_kv_tokens`` counts the tokens whose KV is cached, with or without a state.
    """

    end_node: int = ROOT
    blocks: tuple[int, ...] = ()
    copy_source: int = -1
    num_tokens: int = 0
    snapshot: int = -1
    num_kv_tokens: int = 0

    @property
    def matched_blocks(self) -> tuple[int, ...]:
        """All blocks with the prefix's tokens, in order."""
        return self.blocks if self.copy_source < 0 else (*self.blocks, self.copy_source)


class PrefixTree:
    """Maps token sequences to blocks of ``block_size`` tokens, which are its nodes.

    Only full blocks have children, and siblings differ. The tree does not manage memory; its caller
    removes children before their parent. Plain dictionaries of integers keep the garbage collector
    from traversing a hundred thousand objects.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: Parent and key of each block.
        self._locations: dict[int, tuple[int, BlockTokens]] = {}
        #: The inverse of ``_locations``.
        self._children: dict[tuple[int, BlockTokens], int] = {}
        #: Sorted keys of each block's children; the best partial match is next to the insertion
        #: point.
        self._sorted_keys: dict[int, list[BlockTokens]] = {}
        #: Incremented by every change, which may invalidate earlier matches.
        self.version = 0

    def __len__(self) -> int:
        return len(self._locations)

    def __iter__(self) -> Iterator[int]:
        return iter(self._locations)

    def __contains__(self, block: int) -> bool:
        return block in self._locations

    def match_prefix(self, tokens: Sequence[int], root: int = ROOT) -> PrefixMatch:
        """Find the longest cached prefix of ``tokens`` below ``root``, to the token.

        Blocks below other roots are never used or revealed.
        """
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
        return self._locations[block][0]

    def count_tokens(self, block: int) -> int:
        """Return the number of tokens of a block in the tree."""
        return len(self._locations[block][1])

    def find_child(self, parent: int, key: BlockTokens) -> int | None:
        """Return the child of ``parent`` with the tokens ``key``."""
        return self._children.get((parent, key))

    def insert_block(self, parent: int, key: BlockTokens, block: int) -> None:
        """Insert a block with the tokens ``key`` below ``parent``.

        Raises:
            InvariantError: the block or these tokens are in the tree, or ``parent`` is not full.
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
        """Remove a leaf.

        Raises:
            InvariantError: the block has children.
        """
        if block in self._sorted_keys:
            raise InvariantError(f"block {block} can't be removed before what follows it")
        parent, key = location = self._locations.pop(block)
        del self._children[location]
        keys = self._sorted_keys[parent]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._sorted_keys[parent]
        self.version += 1

    def has_extension(self, parent: int, key: BlockTokens) -> bool:
        """Whether a child of ``parent`` begins with ``key``."""
        keys = self._sorted_keys.get(parent, [])
        at = bisect_left(keys, key)
        return at < len(keys) and keys[at][: len(key)] == key

    def find_shorter(self, parent: int, key: BlockTokens) -> int | None:
        """Return a child of ``parent`` that is a proper prefix of ``key``."""
        keys = self._sorted_keys.get(parent, [])
        at = bisect_left(keys, key) - 1
        if at < 0 or key[: len(keys[at])] != keys[at]:
            return None
        return self._children[parent, keys[at]]

    def path_to_root(self, block: int) -> Iterator[int]:
        """Yield ``block`` and its ancestors, without the root."""
        while block >= 0:
            yield block
            block = self._locations[block][0]

    def list_subtree(self, top: int) -> list[int]:
        """Return ``top`` and its descendants, parents first."""
        found = [top]
        for block in found:
            found += (self._children[block, key] for key in self._sorted_keys.get(block, ()))
        return found

    def validate(self) -> None:
        """Check that both maps agree and that every block leads to a root.

        Raises:
            InvariantError: they don't.
        """
        if {location: block for block, location in self._locations.items()} != self._children:
            raise InvariantError("a block is not below its parent")
        keys: dict[int, list[BlockTokens]] = {}
        for parent, key in self._children:
            keys.setdefault(parent, []).append(key)
            if parent >= 0 and len(self._locations[parent][1]) != self._block_size:
                raise InvariantError(f"block {parent} is not full but others follow it")
        if {parent: sorted(found) for parent, found in keys.items()} != self._sorted_keys:
            raise InvariantError("the keys below a block are not in order")
        roots = [parent for parent in keys if parent < 0]
        led = {block for root in roots for block in self.list_subtree(root)}
        if led != {*roots, *self._locations}:
            raise InvariantError("a block does not lead to a root")

    def _closest_child(self, parent: int, tokens: BlockTokens) -> tuple[int, int]:
        """Return the child with most leading ``tokens`` in common (-1: none), and their number."""
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


#: Number of changes remembered; older reports get the latest spans instead.
MAX_CHANGES = MAX_DIGESTS


class SpanLog:
    """Spans of the cached blocks and their latest changes, for reports to routers.

    A span is cached with the block in which it ends. Sequences below :data:`OTHER_ROOT`, or its
    counterparts of scopes, are left out.
    """

    def __init__(self) -> None:
        #: For each full block: the digest of its last complete span, the tokens after that span,
        #: and the spans that end in the block.
        self._blocks: dict[int, tuple[bytes, BlockTokens, tuple[int, ...]]] = {}
        #: Blocks in which each span ends; several if long blocks differ after the span.
        self._span_counts: Counter[int] = Counter()
        self._changed_spans: deque[int] = deque(maxlen=MAX_CHANGES)
        #: Number of changes.
        self.version = 0

    def add_block(
        self, block: int, parent: int, key: BlockTokens, cache_scope: bytes = b""
    ) -> None:
        """Record a full block of a sequence of ``cache_scope`` that was inserted.

        Digests are those of the ids on the wire, which routers know.
        """
        if parent == find_root(cache_scope):
            digest, before = ROOT_DIGEST, BlockTokens()
        elif parent in self._blocks:
            digest, before, _ = self._blocks[parent]
        else:
            return
        rest = before + tuple(map(narrow_id, key))
        spans = span_digests(rest, digest, cache_scope)
        if spans:
            digest = spans[-1].to_bytes(DIGEST_BYTES, "little")
            rest = rest[len(spans) * SPAN_TOKENS :]
        self._blocks[block] = digest, rest, spans
        for span in spans:
            self._span_counts[span] += 1
            if self._span_counts[span] == 1:
                self._record_change(span)

    def remove_block(self, block: int) -> None:
        """Record a block that was removed; partial blocks are not recorded."""
        _, _, spans = self._blocks.pop(block, (ROOT_DIGEST, (), ()))
        for span in spans:
            self._span_counts[span] -= 1
            if not self._span_counts[span]:
                del self._span_counts[span]
                self._record_change(span)

    def changes_since(self, version: int) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        """Return whether the report is complete, and spans added and evicted since ``version``.

        If ``version`` is too old, the latest spans are reported.
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
