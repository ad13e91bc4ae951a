"""Where the rows of a batch are in their requests and in the KV pool."""

from array import array
from collections.abc import Sequence

from molink.errors import InvariantError
from molink.stage.batch import SequenceRows
from molink.stage.pool import KVPool


def locate(
    sequences: Sequence[SequenceRows], pool: KVPool
) -> "tuple[array[int], array[int], list[int]]":
    """Position and slot of each row, and the blocks that are begun here but not filled.

    Raises:
        InvariantError: rows don't fit their blocks, or blocks the pool.
    """
    size = pool.block_size
    positions, slots = array("q"), array("q")
    fresh: list[int] = []
    for sequence in sequences:
        start, end, blocks = sequence.start, sequence.start + sequence.count, sequence.blocks
        if start < 0 or end <= start or end > len(blocks) * size:
            raise InvariantError(f"rows {start}:{end} don't fit {len(blocks)} blocks of {size}")
        last = (end - 1) // size
        for index in range(start // size, last + 1):
            block = blocks[index]
            if not 0 <= block < pool.blocks:
                raise InvariantError(f"block {block} is not in a pool of {pool.blocks}")
            first, stop = max(start, index * size), min(end, (index + 1) * size)
            positions.extend(range(first, stop))
            slots.extend(range((block - index) * size + first, (block - index) * size + stop))
        if start <= last * size and end % size:
            fresh.append(blocks[last])
    return positions, slots, fresh
