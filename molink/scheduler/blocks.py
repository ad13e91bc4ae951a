"""Block allocators: KV blocks on the devices and in host memory, by pipeline-wide ids."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from molink.errors import InvariantError


class BlockAllocator:
    """Allocates block ids ``0 … blocks - 1``; an id names the same block at every stage.

    A block is in exactly one of four states:

    - *free*: it can be allocated;
    - *held*: block tables, or rows in flight that copy from it, reference it; it may also be in the
      prefix tree;
    - *cached*: only the prefix tree references it, and it can be evicted;
    - *retired*: nothing references it, but a release of it is in flight, so stages may still run
      rows that use it.

    A cached block is *settled* once all its releases have completed. Evicting a settled block frees
    it; evicting another retires it.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        #: A stack, so that the most recently freed block is reused first.
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        #: ``seq`` of the latest release of each block.
        self._release_seqs = [0] * blocks
        #: Releases of each block in flight.
        self._outstanding = [0] * blocks
        #: The blocks of each release in flight.
        self._pending: dict[int, Sequence[int]] = {}
        #: Whether the prefix tree has the block.
        self._in_tree = bytearray(blocks)
        #: Cached blocks in LRU order.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_settled = 0
        self._num_retired = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def eviction_order(self) -> Iterable[int]:
        """Cached blocks in order of eviction, least recently used first."""
        return self._cached

    @property
    def num_settled(self) -> int:
        """Cached blocks that eviction would free at once."""
        return self._num_settled

    @property
    def num_releasing(self) -> int:
        """Cached or retired blocks that become usable when their releases complete."""
        return self._num_retired + len(self._cached) - self._num_settled

    @property
    def num_held(self) -> int:
        """Blocks with at least one reference."""
        return self.total - self.num_free - self._num_retired - len(self._cached)

    def allocate_blocks(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks with one reference each; ``None`` if too few are free."""
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        blocks = self._free[cut:][::-1]
        del self._free[cut:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share_blocks(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``.

        Raises:
            InvariantError: a block is neither held nor cached.
        """
        for block in blocks:
            if not self._references[block]:
                if not self._in_tree[block]:
                    raise InvariantError(f"can't share block {block}: it is not held")
                del self._cached[block]
                self._num_settled -= not self._outstanding[block]
            self._references[block] += 1

    def unshare_block(self, block: int) -> None:
        """Drop a reference that no stage uses any longer, without a release.

        Raises:
            InvariantError: the block is not held.
        """
        self._check_held((block,), "let go of")
        self._drop_reference(block)

    def release_blocks(self, seq: int, blocks: Sequence[int]) -> None:
        """Drop one reference to each of ``blocks`` as of the release ``seq``.

        Raises:
            InvariantError: a block is not held, or occurs twice.
        """
        self._check_held(blocks, "release")
        if len(set(blocks)) != len(blocks):
            raise InvariantError(f"release {seq} names a block twice")
        self._pending[seq] = blocks
        for block in blocks:
            self._release_seqs[block] = seq
            self._outstanding[block] += 1
            self._drop_reference(block)

    def reclaim_released(self, seq: int) -> int:
        """Complete the release ``seq``; return how many blocks became usable."""
        before = len(self._free) + self._num_settled
        for block in reversed(self._pending.pop(seq, ())):
            self._outstanding[block] -= 1
            if self._outstanding[block] or self._references[block]:
                continue
            if self._in_tree[block]:
                self._num_settled += 1
            else:
                self._num_retired -= 1
                self._free.append(block)
        return len(self._free) + self._num_settled - before

    def mark_cached(self, block: int) -> None:
        """Record that a held block is in the prefix tree.

        Raises:
            InvariantError: it is not held, or already in the tree.
        """
        self._check_held((block,), "cache")
        if self._in_tree[block]:
            raise InvariantError(f"block {block} is cached already")
        self._in_tree[block] = True

    def touch_blocks(self, blocks: Iterable[int]) -> None:
        """Mark those of ``blocks`` that are cached as most recently used."""
        for block in blocks:
            if block in self._cached:
                self._cached.move_to_end(block)

    def evict_block(self, block: int) -> None:
        """Remove a cached block from the prefix tree's blocks.

        Raises:
            InvariantError: it is not cached.
        """
        if block not in self._cached:
            raise InvariantError(f"can't evict block {block}: it is not cached")
        del self._cached[block]
        self._in_tree[block] = False
        if self._outstanding[block]:
            self._num_retired += 1
        else:
            self._num_settled -= 1
            self._free.append(block)

    def is_cached(self, block: int) -> bool:
        """Whether only the prefix tree references ``block``."""
        return block in self._cached

    def count_settled(self, blocks: Iterable[int]) -> int:
        """Count the ``blocks`` that are cached and settled."""
        idle, outstanding = self._cached, self._outstanding
        return sum(1 for block in blocks if block in idle and not outstanding[block])

    def latest_release(self, blocks: Iterable[int]) -> int:
        """Return the latest ``seq`` that released one of ``blocks``; 0 if none was released."""
        return max((self._release_seqs[block] for block in blocks), default=0)

    def reference_count(self, block: int) -> int:
        """Count the references to ``block`` by block tables and rows in flight."""
        return self._references[block]

    def validate(self, references: Mapping[int, int], kept: Iterable[int]) -> None:
        """Check that each block is in one state and that all counts agree.

        ``references`` counts the block tables and copies of each block; ``kept`` are the prefix
        tree's blocks.

        Raises:
            InvariantError: they disagree.
        """
        held = {block: count for block, count in enumerate(self._references) if count}
        if held != {block: count for block, count in references.items() if count}:
            raise InvariantError("references to blocks are not those of tables and copies")
        if sorted(kept) != [block for block in range(self.total) if self._in_tree[block]]:
            raise InvariantError("the cached blocks are not those of the prefix tree")
        outstanding = Counter(block for blocks in self._pending.values() for block in blocks)
        if any(count != outstanding[block] for block, count in enumerate(self._outstanding)):
            raise InvariantError("releases of a block in flight are miscounted")
        cached = {
            block for block in range(self.total) if self._in_tree[block] and block not in held
        }
        retired = {block for block in outstanding if not self._in_tree[block] and block not in held}
        if cached != self._cached.keys() or len(retired) != self._num_retired:
            raise InvariantError("a block is cached or retired, but not counted as such")
        if sum(1 for block in cached if not outstanding[block]) != self._num_settled:
            raise InvariantError("settled blocks are miscounted")
        states = [*self._free, *held, *cached, *retired]
        if sorted(states) != list(range(self.total)):
            raise InvariantError("a block is in no state, or in two")

    def _drop_reference(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._in_tree[block]:
            self._cached[block] = None
            self._num_settled += not self._outstanding[block]
        elif self._outstanding[block]:
            self._num_retired += 1
        else:
            self._free.append(block)

    def _check_held(self, blocks: Iterable[int], act: str) -> None:
        for block in blocks:
            if not 0 <= block < self.total or not self._references[block]:
                raise InvariantError(f"can't {act} block {block}: it is not held")


class ReleasingBlocks:
    """Counts blocks that become usable once all releases complete."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._holds = Counter[int]()
        self.count = allocator.num_releasing

    def add_blocks(self, blocks: Iterable[int]) -> int:
        """Add blocks whose references will be dropped; return how many more become usable."""
        more = 0
        for block in blocks:
            self._holds[block] += 1
            more += self._holds[block] == self._allocator.reference_count(block)
        self.count += more
        return more


@dataclass(slots=True, eq=False)
class HostCopy:
    """The KV of a request's first ``num_tokens`` tokens in host ``blocks``, in order.

    ``filled_seq`` is the ``seq`` of the SwapOut that fills them, 0 until it is issued.
    """

    blocks: tuple[int, ...]
    num_tokens: int
    filled_seq: int = 0


class HostBlockAllocator:
    """Allocates ids of host blocks; an id names the same block at every stage.

    A freed block can be reused at once, since every stage executes copies in the order of their
    ``seq``.
    """

    def __init__(self) -> None:
        self.total = 0
        #: A stack, so that the most recently freed block is reused first.
        self._free: list[int] = []
        self._allocated: set[int] = set()

    @property
    def num_held(self) -> int:
        return len(self._allocated)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def set_total(self, blocks: int) -> None:
        """Set the number of blocks, once."""
        if not self.total:
            self.total = blocks
            self._free = list(range(blocks - 1, -1, -1))

    def allocate_blocks(self, count: int) -> tuple[int, ...] | None:
        """Allocate ``count`` blocks; ``None`` if too few are free."""
        if count > len(self._free):
            return None
        blocks = tuple(self._free.pop() for _ in range(count))
        self._allocated.update(blocks)
        return blocks

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """Free allocated blocks.

        Raises:
            InvariantError: a block is not allocated.
        """
        for block in blocks:
            if block not in self._allocated:
                raise InvariantError(f"can't free host block {block}: it is not allocated")
            self._allocated.remove(block)
            self._free.append(block)

    def validate(self, copies: Iterable[HostCopy]) -> None:
        """Check that each block is free or in exactly one of ``copies``.

        Raises:
            InvariantError: a block is not.
        """
        held = [block for copy in copies for block in copy.blocks]
        if sorted(held) != sorted(self._allocated):
            raise InvariantError("host blocks are not those of the copies")
        if sorted([*held, *self._free]) != list(range(self.total)):
            raise InvariantError("a host block is in no state, or in two")
