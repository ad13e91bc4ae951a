"""The KV cache of layers with different heads: one pool per kind, with the same block ids."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool

if TYPE_CHECKING:
    from array import array


class MixedKVPool:
    """Pools ``parts``; ``places`` has each layer's part and its index there.

    :class:`~molink.stage.kv_pool.KVPool` describes the methods.
    """

    def __init__(self, parts: Sequence[KVPool], places: Sequence[tuple[int, int]]) -> None:
        self.parts, self._places = tuple(parts), tuple(places)
        first = self.parts[0]
        self.blocks, self.block_size = first.blocks, first.block_size
        self.padding_block = first.padding_block

    def locate_layer(self, layer: int) -> tuple[KVPool, int]:
        """Return a layer's pool, and the layer's index in it."""
        part, index = self._places[layer]
        return self.parts[part], index

    def copy_block(self, source: int, target: int, positions: int) -> None:
        """Copy the first ``positions`` of a block in all layers, and zero the rest."""
        for part in self.parts:
            part.copy_block(source, target, positions)

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Zero blocks in all layers."""
        for part in self.parts:
            part.zero_blocks(block_ids)

    def locate_rows(
        self, sequences: Sequence[SequenceRows]
    ) -> "tuple[array[int], array[int], list[int]]":
        """Return positions, slots and unfilled blocks, which all parts share."""
        return self.parts[0].locate_rows(sequences)


#: The KV cache of a stage.
AnyKVPool = KVPool | MixedKVPool
