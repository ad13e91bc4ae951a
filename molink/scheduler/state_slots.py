"""Slots for states of recurrent layers: of requests, and of snapshots for the prefix cache."""

from collections.abc import Mapping

from molink.errors import InvariantError
from molink.scheduler.blocks import BlockAllocator
from molink.scheduler.prefix_tree import PrefixTree


class StateSlots:
    """Allocates slots to requests; the others may keep snapshots.

    A snapshot is the state after a prefix whose KV is cached. It belongs to the KV block with the
    prefix's last token, under the number of that block's tokens that it has seen, and is dropped
    with the block. A block has at most one snapshot per number of its tokens. Requests take slots
    from the least recently used snapshots. For the allocator, slots are blocks, and snapshots are
    cached blocks.
    """

    def __init__(self, slots: int) -> None:
        self.allocator = BlockAllocator(slots)
        #: Slots of each KV block's snapshots, by number of the block's tokens.
        self._snapshots: dict[int, dict[int, int]] = {}
        #: The inverse: KV block and number of its tokens.
        self._places: dict[int, tuple[int, int]] = {}
        #: Incremented by every change of snapshots.
        self.version = 0

    @property
    def are_needed(self) -> bool:
        """Whether the model has states."""
        return self.allocator.total > 0

    def can_allocate(self, source: int) -> bool:
        """Whether a request can get a slot while it holds the snapshot ``source`` (-1: none)."""
        if not self.are_needed:
            return True
        allocator, held = self.allocator, (source,) if source >= 0 else ()
        return allocator.num_free + allocator.num_settled > allocator.count_settled(held)

    def allocate_slot(self) -> int | None:
        """Allocate a slot, if necessary a snapshot's; ``None`` if there is none.

        A snapshot whose release is in flight is kept, since its slot can't be used yet.
        """
        allocator = self.allocator
        if not allocator.num_free:
            snapshots = allocator.eviction_order
            settled = (slot for slot in snapshots if allocator.count_settled((slot,)))
            oldest = next(settled, None)
            if oldest is None:
                return None
            self._drop_snapshot(oldest)
        slots = allocator.allocate_blocks(1)
        return None if slots is None else slots[0]

    def find_snapshot(self, block: int, minimum: int, maximum: int) -> tuple[int, int] | None:
        """Find the snapshot of ``block`` that has seen most of its tokens; return tokens and slot.

        Its tokens are between ``minimum`` and ``maximum``.
        """
        found = self._snapshots.get(block, {})
        tokens = max((each for each in found if minimum <= each <= maximum), default=None)
        return None if tokens is None else (tokens, found[tokens])

    def add_snapshot(self, slot: int, block: int, tokens: int) -> None:
        """Keep a held slot's state, unless there is a snapshot of the same prefix."""
        if tokens not in self._snapshots.get(block, {}):
            self.allocator.mark_cached(slot)
            self._set_place(slot, block, tokens)

    def move_snapshots(self, before: int, block: int) -> None:
        """Move the snapshots of ``before`` to ``block``, which begins with all its tokens."""
        for tokens, slot in tuple(self._snapshots.get(before, {}).items()):
            if tokens not in self._snapshots.get(block, {}):
                self._clear_place(slot)
                self._set_place(slot, block, tokens)

    def drop_snapshots(self, block: int) -> None:
        """Drop the snapshots of ``block`` that no request holds."""
        for slot in tuple(self._snapshots.get(block, {}).values()):
            if self.allocator.is_cached(slot):
                self._drop_snapshot(slot)

    def validate(self, references: Mapping[int, int], tree: PrefixTree) -> None:
        """Check that ``references`` match the slots, and that snapshots are in the tree.

        Raises: InvariantError: they don't.
        """
        self.allocator.validate(references, self._places)
        places = {
            slot: (block, tokens)
            for block, found in self._snapshots.items()
            for tokens, slot in found.items()
        }
        if places != self._places:
            raise InvariantError("a snapshot is not that of its block")
        for slot, (block, tokens) in places.items():
            if block not in tree or not 0 < tokens <= tree.count_tokens(block):
                raise InvariantError(f"slot {slot} keeps the state of a prefix that is not cached")

    def _drop_snapshot(self, slot: int) -> None:
        self._clear_place(slot)
        self.allocator.evict_block(slot)

    def _set_place(self, slot: int, block: int, tokens: int) -> None:
        self._snapshots.setdefault(block, {})[tokens] = slot
        self._places[slot] = block, tokens
        self.version += 1

    def _clear_place(self, slot: int) -> None:
        block, tokens = self._places.pop(slot)
        del self._snapshots[block][tokens]
        if not self._snapshots[block]:
            del self._snapshots[block]
        self.version += 1
