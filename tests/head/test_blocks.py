import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from molink.errors import InvariantError
from molink.head.blocks import BlockAllocator


def test_life_of_a_block():
    blocks = BlockAllocator(3)
    assert blocks.allocate(2) == [0, 1]
    assert blocks.allocate(2) is None
    blocks.share([0])
    blocks.retire(7, [0, 1])
    assert (blocks.free, blocks.held, blocks.retired) == (1, 1, 1)
    assert blocks.references(0) == 1
    assert blocks.reclaim(7) == 1
    assert blocks.reclaim(7) == 0
    assert (blocks.released_at([1]), blocks.released_at([0, 2]), blocks.released_at([])) == (
        7,
        0,
        0,
    )
    blocks.retire(9, [0])
    assert blocks.allocate(3) is None
    assert blocks.reclaim(9) == 1
    assert sorted(blocks.allocate(3)) == [0, 1, 2]
    blocks.validate()


@pytest.mark.parametrize("held", [[0, 0], [1], [5], [-1]])
def test_a_block_that_nobody_holds_cannot_be_released(held):
    blocks = BlockAllocator(2)
    blocks.allocate(1)
    with pytest.raises(InvariantError):
        blocks.retire(1, held)
    assert blocks.held == 1
    blocks.validate()


def test_a_retired_block_cannot_be_shared():
    blocks = BlockAllocator(1)
    blocks.retire(1, blocks.allocate(1))
    with pytest.raises(InvariantError):
        blocks.share([0])


class AllocatorMachine(RuleBasedStateMachine):
    """Against a plain model: a list of block tables and releases on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockAllocator(12)
        self.tables: list[list[int]] = []
        self.pending: dict[int, list[int]] = {}
        self.tick = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count):
        free = self.blocks.free
        table = self.blocks.allocate(count)
        assert (table is None) == (count > free)
        if table is not None:
            used = {block for other in self.tables for block in other}
            used |= {block for gone in self.pending.values() for block in gone}
            assert len(set(table)) == count
            assert not used & set(table)
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data):
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(0, len(table)))]
        self.blocks.share(shared)
        self.tables.append(list(shared))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def retire(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.tick += 1
        self.blocks.retire(self.tick, table)
        left = {block for other in self.tables for block in other}
        self.pending[self.tick] = [block for block in table if block not in left]

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def reclaim(self, data):
        tick = data.draw(st.sampled_from(sorted(self.pending)))
        gone = self.pending.pop(tick)
        assert self.blocks.reclaim(tick) == len(gone)
        assert not gone or self.blocks.released_at(gone) == tick

    @invariant()
    def accounts(self):
        self.blocks.validate()
        assert self.blocks.held == len({block for table in self.tables for block in table})
        assert self.blocks.retired == sum(map(len, self.pending.values()))


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
