"""KV block ids of the whole pipeline."""

from collections.abc import Iterable, Sequence

from molink.errors import InvariantError


class BlockAllocator:
    """Gives out block ids ``0 … blocks - 1``; one id means the same block at every stage.

    A block is *free*, *held* (by as many references as there are block tables with it) or
    *retired*: nobody holds it, but stages may still run rows that use it, until the tick of the
    release that let go of it has gone round.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        #: A stack: what was freed last is used first.
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        #: Tick of the release that last let go of each block.
        self._released = [0] * blocks
        self._retired: dict[int, list[int]] = {}
        self._retired_count = 0

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def retired(self) -> int:
        """Blocks that will be free when their releases have gone round."""
        return self._retired_count

    @property
    def held(self) -> int:
        """Blocks in at least one block table."""
        return self.total - self.free - self.retired

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
        """Add a reference to each of ``blocks``, which must be held.

        Raises:
            InvariantError: one is not held.
        """
        blocks = list(blocks)
        self._check_held(blocks, "share")
        for block in blocks:
            self._references[block] += 1

    def retire(self, tick: int, blocks: Sequence[int]) -> None:
        """Drop one reference to each of ``blocks``, as of the release ``tick``.

        Raises:
            InvariantError: one is not held, or is named twice.
        """
        self._check_held(blocks, "release")
        if len(set(blocks)) != len(blocks):
            raise InvariantError(f"release {tick} names a block twice")
        gone = []
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._released[block] = tick
                gone.append(block)
        self._retired[tick] = self._retired.get(tick, []) + gone
        self._retired_count += len(gone)

    def reclaim(self, tick: int) -> int:
        """The release ``tick`` has gone round: free its blocks; returns how many."""
        blocks = self._retired.pop(tick, [])
        self._retired_count -= len(blocks)
        self._free.extend(reversed(blocks))
        return len(blocks)

    def released_at(self, blocks: Iterable[int]) -> int:
        """The latest tick that released one of ``blocks``; 0 if none ever was."""
        return max((self._released[block] for block in blocks), default=0)

    def references(self, block: int) -> int:
        """How many block tables hold ``block``."""
        return self._references[block]

    def validate(self) -> None:
        """Every block is in exactly one of the three states.

        Raises:
            InvariantError: one is not.
        """
        retired = [block for blocks in self._retired.values() for block in blocks]
        loose = self._free + retired
        if len(set(loose)) != len(loose):
            raise InvariantError("a block is free or retired twice")
        if any(self._references[block] for block in loose):
            raise InvariantError("a block that is free or retired is still referenced")
        if sum(1 for count in self._references if count) != self.total - len(loose):
            raise InvariantError("a block is neither free, retired nor referenced")
        if self._retired_count != len(retired):
            raise InvariantError(f"{len(retired)} blocks are retired, not {self._retired_count}")

    def _check_held(self, blocks: Iterable[int], act: str) -> None:
        for block in blocks:
            if not 0 <= block < self.total or not self._references[block]:
                raise InvariantError(f"can't {act} block {block}: nobody holds it")
