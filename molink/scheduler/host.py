"""KV blocks in the host memory of all stages."""

from collections.abc import Iterable
from dataclasses import dataclass

from molink.errors import InvariantError


@dataclass(slots=True, eq=False)
class HostCopy:
    """The KV of a request's first ``tokens`` tokens in ``blocks`` of host memory, in order.

    ``filled`` is the tick of the order that copies them there; 0 until that is issued.
    """

    blocks: tuple[int, ...]
    tokens: int
    filled: int = 0


class HostBlocks:
    """Gives out ids of host blocks; one id means the same block at every stage.

    A block that is given back can be given out at once: orders to copy are carried out in the order
    in which they are issued, at every stage.
    """

    def __init__(self) -> None:
        self.total = 0
        #: A stack: what was given back last is used first.
        self._free: list[int] = []
        self._held: set[int] = set()

    @property
    def held(self) -> int:
        """Blocks that are given out."""
        return len(self._held)

    @property
    def left(self) -> int:
        """Blocks that are not given out."""
        return len(self._free)

    def open(self, blocks: int) -> None:
        """From now on there are so many; none of them was given out before."""
        if not self.total:
            self.total = blocks
            self._free = list(range(blocks - 1, -1, -1))

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """``count`` blocks, or ``None`` if there are not that many."""
        if count > len(self._free):
            return None
        blocks = tuple(self._free.pop() for _ in range(count))
        self._held.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """They are not needed any more.

        Raises:
            InvariantError: one was not given out.
        """
        for block in blocks:
            if block not in self._held:
                raise InvariantError(f"can't free host block {block}: nobody has it")
            self._held.remove(block)
            self._free.append(block)

    def validate(self, copies: Iterable[HostCopy]) -> None:
        """Every block is free, or in exactly one of the ``copies``.

        Raises:
            InvariantError: one is not.
        """
        held = [block for copy in copies for block in copy.blocks]
        if sorted(held) != sorted(self._held):
            raise InvariantError("host blocks are not those of the copies that there are")
        if sorted([*held, *self._free]) != list(range(self.total)):
            raise InvariantError("a host block is in no state, or in two")
