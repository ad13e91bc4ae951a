from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from molink.errors import InvariantError
from molink.scheduler.blocks import BlockAllocator


def test_block_states() -> None:
    blocks = BlockAllocator(3)
    assert blocks.allocate_blocks(2) == [0, 1]
    assert blocks.allocate_blocks(2) is None
    blocks.share_blocks([0])
    blocks.release_blocks(7, [0, 1])
    assert (blocks.num_free, blocks.num_held, blocks.num_releasing) == (1, 1, 1)
    assert blocks.reference_count(0) == 1
    assert blocks.reclaim_released(7) == 1
    assert blocks.reclaim_released(7) == 0
    assert blocks.latest_release([1]) == blocks.latest_release([0, 2]) == 7
    assert blocks.latest_release([]) == blocks.latest_release([2]) == 0
    blocks.release_blocks(9, [0])
    assert blocks.allocate_blocks(3) is None
    assert blocks.reclaim_released(9) == 1
    assert sorted(blocks.allocate_blocks(3)) == [0, 1, 2]
    blocks.validate({0: 1, 1: 1, 2: 1}, [])


def test_a_block_is_freed_by_its_last_release() -> None:
    blocks = BlockAllocator(1)
    blocks.share_blocks(blocks.allocate_blocks(1))
    blocks.release_blocks(1, [0])
    blocks.release_blocks(2, [0])
    assert blocks.reclaim_released(2) == 0
    assert blocks.num_releasing == 1
    blocks.validate({}, [])
    assert blocks.reclaim_released(1) == 1
    assert blocks.allocate_blocks(1) == [0]


def test_a_cached_block_is_settled_after_its_release() -> None:
    blocks = BlockAllocator(2)
    blocks.allocate_blocks(2)
    for block in (0, 1):
        blocks.mark_cached(block)
    blocks.release_blocks(1, [1])
    blocks.release_blocks(2, [0])
    assert list(blocks.eviction_order) == [1, 0]
    blocks.touch_blocks([1])
    assert list(blocks.eviction_order) == [0, 1]
    assert (blocks.num_settled, blocks.num_releasing, blocks.num_held, blocks.num_free) == (
        0,
        2,
        0,
        0,
    )
    assert blocks.reclaim_released(1) == 1
    assert (blocks.num_settled, blocks.num_releasing) == (1, 1)
    assert blocks.count_settled([0, 1]) == 1
    blocks.evict_block(1)
    blocks.evict_block(0)
    assert (blocks.num_free, blocks.num_settled, blocks.num_releasing) == (1, 0, 1)
    blocks.validate({}, [])
    assert blocks.reclaim_released(2) == 1
    assert blocks.num_free == 2


def test_a_cached_block_can_be_shared_and_unshared() -> None:
    blocks = BlockAllocator(1)
    blocks.allocate_blocks(1)
    blocks.mark_cached(0)
    blocks.release_blocks(1, [0])
    blocks.share_blocks([0])
    assert blocks.reclaim_released(1) == 0
    assert (blocks.num_held, blocks.num_settled) == (1, 0)
    assert not blocks.is_cached(0)
    blocks.unshare_block(0)
    assert (blocks.num_held, blocks.num_settled) == (0, 1)
    assert blocks.is_cached(0)
    blocks.validate({}, [0])


@pytest.mark.parametrize("held", [[0, 0], [1], [5], [-1]])
def test_an_unheld_block_cannot_be_released(held: list[int]) -> None:
    blocks = BlockAllocator(2)
    blocks.allocate_blocks(1)
    with pytest.raises(InvariantError):
        blocks.release_blocks(1, held)
    assert blocks.num_held == 1
    blocks.validate({0: 1}, [])


def test_invalid_transitions_are_rejected() -> None:
    blocks = BlockAllocator(1)
    blocks.release_blocks(1, blocks.allocate_blocks(1))
    for act in (
        blocks.unshare_block,
        blocks.mark_cached,
        blocks.evict_block,
        lambda block: blocks.share_blocks([block]),
    ):
        with pytest.raises(InvariantError):
            act(0)
    blocks.reclaim_released(1)
    blocks.mark_cached(*blocks.allocate_blocks(1))
    with pytest.raises(InvariantError):
        blocks.mark_cached(0)
    with pytest.raises(InvariantError):
        blocks.evict_block(0)


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against a model of block tables, cached blocks and releases in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(12)
        self.tables: list[list[int]] = []
        self.kept: set[int] = set()
        self.pending: dict[int, list[int]] = {}
        self.seq = 0

    def held(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    def on_their_way(self) -> set[int]:
        return {block for gone in self.pending.values() for block in gone}

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        free = self.blocks.num_free
        table = self.blocks.allocate_blocks(count)
        assert (table is None) == (count > free)
        if table is not None:
            assert len(set(table)) == count
            assert not (self.held().keys() | self.on_their_way() | self.kept) & set(table)
            self.tables.append(table)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        able = sorted(self.held().keys() | self.kept)
        if able:
            shared = data.draw(st.lists(st.sampled_from(able), unique=True))
            self.blocks.share_blocks(shared)
            self.tables.append(shared)

    @precondition(lambda self: self.held().keys() - self.kept)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held().keys() - self.kept)))
        self.blocks.mark_cached(block)
        self.kept.add(block)

    @precondition(lambda self: self.kept - self.held().keys())
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept - self.held().keys())))
        self.blocks.evict_block(block)
        self.kept.discard(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.seq += 1
        self.blocks.release_blocks(self.seq, table)
        self.pending[self.seq] = table

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def unshare(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        self.blocks.unshare_block(table.pop())

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def reclaim(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.pending)))
        gone = self.pending.pop(seq)
        able = set(gone) - self.held().keys() - self.on_their_way()
        assert self.blocks.reclaim_released(seq) == len(able)

    @invariant()
    def accounts(self) -> None:
        held, cached = self.held(), self.kept - self.held().keys()
        self.blocks.validate(held, self.kept)
        assert self.blocks.num_held == len(held)
        assert set(self.blocks.eviction_order) == cached
        assert self.blocks.num_settled == len(cached - self.on_their_way())
        assert self.blocks.num_releasing == len(self.on_their_way() - held.keys())


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
