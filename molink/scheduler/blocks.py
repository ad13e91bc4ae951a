"""KV block ids of the whole pipeline."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

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
        self._released = [0] * blocks
        #: Releases of each block that have not gone round.
        self._outstanding = [0] * blocks
        #: The blocks of each release that has not gone round.
        self._pending: dict[int, Sequence[int]] = {}
        #: Whether the prefix cache has the block.
        self._kept = bytearray(blocks)
        #: Cached blocks, the one whose last reference went first is first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._settled = 0
        self._retired = 0

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def cached(self) -> Iterable[int]:
        """The cached blocks, the one to be forgotten first is first."""
        return self._idle

    @property
    def settled(self) -> int:
        """Cached blocks that would be free at once."""
        return self._settled

    @property
    def releasing(self) -> int:
        """Blocks, cached or retired, that can be used when their releases have gone round."""
        return self._retired + len(self._idle) - self._settled

    @property
    def held(self) -> int:
        """Blocks with at least one reference."""
        return self.total - self.free - self._retired - len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or ``None`` if there are not that many."""
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        blocks = self._free[cut:][::-1]
        del self._free[cut:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, which must be held or cached.

        Raises:
            InvariantError: one is neither.
        """
        for block in blocks:
            if not self._references[block]:
                if not self._kept[block]:
                    raise InvariantError(f"can't share block {block}: nobody holds it")
                del self._idle[block]
                self._settled -= not self._outstanding[block]
            self._references[block] += 1

    def unshare(self, block: int) -> None:
        """Drop a reference that no stage uses any more: no release has to go round for it.

        Raises:
            InvariantError: the block is not held.
        """
        self._check_held((block,), "let go of")
        self._drop(block)

    def retire(self, tick: int, blocks: Sequence[int]) -> None:
        """Drop one reference to each of ``blocks``, as of the release ``tick``.

        Raises:
            InvariantError: one is not held, or is named twice.
        """
        self._check_held(blocks, "release")
        if len(set(blocks)) != len(blocks):
            raise InvariantError(f"release {tick} names a block twice")
        self._pending[tick] = blocks
        for block in blocks:
            self._released[block] = tick
            self._outstanding[block] += 1
            self._drop(block)

    def reclaim(self, tick: int) -> int:
        """The release ``tick`` has gone round; returns how many blocks can be used thereby."""
        before = len(self._free) + self._settled
        for block in reversed(self._pending.pop(tick, ())):
            self._outstanding[block] -= 1
            if self._outstanding[block] or self._references[block]:
                continue
            if self._kept[block]:
                self._settled += 1
            else:
                self._retired -= 1
                self._free.append(block)
        return len(self._free) + self._settled - before

    # --- the prefix cache --------------------------------------------------------------------

    def keep(self, block: int) -> None:
        """The prefix cache has a held block from now on.

        Raises:
            InvariantError: it is not held, or is there already.
        """
        self._check_held((block,), "keep")
        if self._kept[block]:
            raise InvariantError(f"block {block} is kept already")
        self._kept[block] = True

    def touch(self, blocks: Iterable[int]) -> None:
        """These cached blocks, as far as they are cached, are the last to be forgotten."""
        for block in blocks:
            if block in self._idle:
                self._idle.move_to_end(block)

    def forget(self, block: int) -> None:
        """The prefix cache no longer has a cached block: it is free, or will be.

        Raises:
            InvariantError: it is not cached.
        """
        if block not in self._idle:
            raise InvariantError(f"can't forget block {block}: it is not cached")
        del self._idle[block]
        self._kept[block] = False
        if self._outstanding[block]:
            self._retired += 1
        else:
            self._settled -= 1
            self._free.append(block)

    def is_cached(self, block: int) -> bool:
        """Whether only the prefix cache has ``block``."""
        return block in self._idle

    def settled_among(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are cached and settled."""
        idle, outstanding = self._idle, self._outstanding
        return sum(1 for block in blocks if block in idle and not outstanding[block])

    # --- reports -----------------------------------------------------------------------------

    def released_at(self, blocks: Iterable[int]) -> int:
        """The latest tick that released one of ``blocks``; 0 if none ever was."""
        return max((self._released[block] for block in blocks), default=0)

    def references(self, block: int) -> int:
        """How many block tables hold ``block`` and rows in flight copy from it."""
        return self._references[block]

    def validate(self, references: Mapping[int, int], kept: Iterable[int]) -> None:
        """Every block is in exactly one of the four states, held by whom it should be.

        ``references`` counts the tables and copies there are of each block, ``kept`` are those of
        the prefix cache.

        Raises:
            InvariantError: one is not.
        """
        held = {block: count for block, count in enumerate(self._references) if count}
        if held != {block: count for block, count in references.items() if count}:
            raise InvariantError("references to blocks are not those of tables and copies")
        if sorted(kept) != [block for block in range(self.total) if self._kept[block]]:
            raise InvariantError("the prefix cache does not have the blocks that are kept for it")
        outstanding = Counter(block for blocks in self._pending.values() for block in blocks)
        if any(count != outstanding[block] for block, count in enumerate(self._outstanding)):
            raise InvariantError("releases of a block that have not gone round are miscounted")
        cached = {block for block in range(self.total) if self._kept[block] and block not in held}
        retired = {block for block in outstanding if not self._kept[block] and block not in held}
        if cached != self._idle.keys() or len(retired) != self._retired:
            raise InvariantError("a block is cached or retired, but not counted as such")
        if sum(1 for block in cached if not outstanding[block]) != self._settled:
            raise InvariantError("settled blocks are miscounted")
        states = [*self._free, *held, *cached, *retired]
        if sorted(states) != list(range(self.total)):
            raise InvariantError("a block is in no state, or in two")

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._kept[block]:
            self._idle[block] = None
            self._settled += not self._outstanding[block]
        elif self._outstanding[block]:
            self._retired += 1
        else:
            self._free.append(block)

    def _check_held(self, blocks: Iterable[int], act: str) -> None:
        for block in blocks:
            if not 0 <= block < self.total or not self._references[block]:
                raise InvariantError(f"can't {act} block {block}: nobody holds it")


class Returning:
    """Counts blocks that can be used once all releases are round: those that nobody else holds."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._holds = Counter[int]()
        self.count = allocator.releasing

    def add(self, blocks: Iterable[int]) -> int:
        """Somebody is to let go of these as well; how many blocks more that makes."""
        more = 0
        for block in blocks:
            self._holds[block] += 1
            more += self._holds[block] == self._allocator.references(block)
        self.count += more
        return more
