"""KV block ids of the whole pipeline."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from molink.errors import InvariantError


class BlockAllocator:
    """Gives out block ids ``0 … blocks - 1``; one id means the same block at every stage.

    A block is in exactly one of four states:

    - *free*: it can be given out;
    - *held*: by as many references as there are block tables with it and rows in flight that copy
      from it; whether the prefix cache has it too does not matter meanwhile;
    - *cached*: only the prefix cache has it, which can be made to forget it;
    - *retired*: nobody has it, but a release that let go of it has not gone round, so that stages
      may still run rows that use it.

    A cached block is *settled* once all releases that let go of it have gone round: forgotten, it
    is free at once, and else retired.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        #: A stack: what was freed last is used first.
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        #: Tick of the release that last let go of each block.
        self._release_seqs = [0] * blocks
        #: Releases of each block that have not gone round.
        self._outstanding = [0] * blocks
        #: The blocks of each release that has not gone round.
        self._pending: dict[int, Sequence[int]] = {}
        #: Whether the prefix cache has the block.
        self._in_tree = bytearray(blocks)
        #: Cached blocks, the one whose last reference went first is first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_settled = 0
        self._num_retired = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def cached_blocks(self) -> Iterable[int]:
        """The cached blocks, the one to be forgotten first is first."""
        return self._cached

    @property
    def num_settled(self) -> int:
        """Cached blocks that would be free at once."""
        return self._num_settled

    @property
    def num_releasing(self) -> int:
        """Blocks, cached or retired, that can be used when their releases have gone round."""
        return self._num_retired + len(self._cached) - self._num_settled

    @property
    def num_held(self) -> int:
        """Blocks with at least one reference."""
        return self.total - self.num_free - self._num_retired - len(self._cached)

    def allocate_blocks(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or ``None`` if there are not that many."""
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        blocks = self._free[cut:][::-1]
        del self._free[cut:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share_blocks(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, which must be held or cached.

        Raises:
            InvariantError: one is neither.
        """
        for block in blocks:
            if not self._references[block]:
                if not self._in_tree[block]:
                    raise InvariantError(f"can't share block {block}: nobody holds it")
                del self._cached[block]
                self._num_settled -= not self._outstanding[block]
            self._references[block] += 1

    def unshare_block(self, block: int) -> None:
        """Drop a reference that no stage uses any more: no release has to go round for it.

        Raises:
            InvariantError: the block is not held.
        """
        self._check_held((block,), "let go of")
        self._drop_reference(block)

    def release_blocks(self, seq: int, blocks: Sequence[int]) -> None:
        """Drop one reference to each of ``blocks``, as of the release ``tick``.

        Raises:
            InvariantError: one is not held, or is named twice.
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
        """The release ``tick`` has gone round; returns how many blocks can be used thereby."""
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

    # --- the prefix cache --------------------------------------------------------------------

    def mark_cached(self, block: int) -> None:
        """The prefix cache has a held block from now on.

        Raises:
            InvariantError: it is not held, or is there already.
        """
        self._check_held((block,), "keep")
        if self._in_tree[block]:
            raise InvariantError(f"block {block} is kept already")
        self._in_tree[block] = True

    def touch_blocks(self, blocks: Iterable[int]) -> None:
        """These cached blocks, as far as they are cached, are the last to be forgotten."""
        for block in blocks:
            if block in self._cached:
                self._cached.move_to_end(block)

    def evict_block(self, block: int) -> None:
        """The prefix cache no longer has a cached block: it is free, or will be.

        Raises:
            InvariantError: it is not cached.
        """
        if block not in self._cached:
            raise InvariantError(f"can't forget block {block}: it is not cached")
        del self._cached[block]
        self._in_tree[block] = False
        if self._outstanding[block]:
            self._num_retired += 1
        else:
            self._num_settled -= 1
            self._free.append(block)

    def is_cached(self, block: int) -> bool:
        """Whether only the prefix cache has ``block``."""
        return block in self._cached

    def count_settled(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are cached and settled."""
        idle, outstanding = self._cached, self._outstanding
        return sum(1 for block in blocks if block in idle and not outstanding[block])

    # --- reports -----------------------------------------------------------------------------

    def latest_release(self, blocks: Iterable[int]) -> int:
        """The latest tick that released one of ``blocks``; 0 if none ever was."""
        return max((self._release_seqs[block] for block in blocks), default=0)

    def reference_count(self, block: int) -> int:
        """How many block tables hold ``block`` and rows in flight copy from it."""
        return self._references[block]

    def validate(self, references: Mapping[int, int], kept: Iterable[int]) -> None:
        """Every block is in exactly one of the four states, held by whom it should be.

        ``reference_count`` counts the tables and copies there are of each block, ``kept`` are those
        of the prefix cache.

        Raises:
            InvariantError: one is not.
        """
        held = {block: count for block, count in enumerate(self._references) if count}
        if held != {block: count for block, count in references.items() if count}:
            raise InvariantError("references to blocks are not those of tables and copies")
        if sorted(kept) != [block for block in range(self.total) if self._in_tree[block]]:
            raise InvariantError("the prefix cache does not have the blocks that are kept for it")
        outstanding = Counter(block for blocks in self._pending.values() for block in blocks)
        if any(count != outstanding[block] for block, count in enumerate(self._outstanding)):
            raise InvariantError("releases of a block that have not gone round are miscounted")
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
                raise InvariantError(f"can't {act} block {block}: nobody holds it")


class ReleasingBlocks:
    """Counts blocks that can be used once all releases are round: those that nobody else holds."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._holds = Counter[int]()
        self.count = allocator.num_releasing

    def add_blocks(self, blocks: Iterable[int]) -> int:
        """Somebody is to let go of these as well; how many blocks more that makes."""
        more = 0
        for block in blocks:
            self._holds[block] += 1
            more += self._holds[block] == self._allocator.reference_count(block)
        self.count += more
        return more


@dataclass(slots=True, eq=False)
class HostCopy:
    """The KV of a request's first ``num_tokens`` tokens in ``blocks`` of host memory, in order.

    ``filled_seq`` is the tick of the order that copies them there; 0 until that is issued.
    """

    blocks: tuple[int, ...]
    num_tokens: int
    filled_seq: int = 0


class HostBlockAllocator:
    """Gives out ids of host blocks; one id means the same block at every stage.

    A block that is given back can be given out at once: orders to copy are carried out in the order
    in which they are issued, at every stage.
    """

    def __init__(self) -> None:
        self.total = 0
        #: A stack: what was given back last is used first.
        self._free: list[int] = []
        self._allocated: set[int] = set()

    @property
    def num_held(self) -> int:
        """Blocks that are given out."""
        return len(self._allocated)

    @property
    def num_free(self) -> int:
        """Blocks that are not given out."""
        return len(self._free)

    def set_total(self, blocks: int) -> None:
        """From now on there are so many; none of them was given out before."""
        if not self.total:
            self.total = blocks
            self._free = list(range(blocks - 1, -1, -1))

    def allocate_blocks(self, count: int) -> tuple[int, ...] | None:
        """``count`` blocks, or ``None`` if there are not that many."""
        if count > len(self._free):
            return None
        blocks = tuple(self._free.pop() for _ in range(count))
        self._allocated.update(blocks)
        return blocks

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """They are not needed any more.

        Raises:
            InvariantError: one was not given out.
        """
        for block in blocks:
            if block not in self._allocated:
                raise InvariantError(f"can't free host block {block}: nobody has it")
            self._allocated.remove(block)
            self._free.append(block)

    def validate(self, copies: Iterable[HostCopy]) -> None:
        """Every block is free, or in exactly one of the ``copies``.

        Raises:
            InvariantError: one is not.
        """
        held = [block for copy in copies for block in copy.blocks]
        if sorted(held) != sorted(self._allocated):
            raise InvariantError("host blocks are not those of the copies that there are")
        if sorted([*held, *self._free]) != list(range(self.total)):
            raise InvariantError("a host block is in no state, or in two")
