"""KV blocks in the host memory of all stages."""

from collections.abc import Iterable
from dataclasses import dataclass

from molink.errors import InvariantError


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
