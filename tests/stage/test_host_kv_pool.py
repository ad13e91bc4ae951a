"""Blocks keep their content on the way to host memory and back."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from molink.errors import InvariantError
from molink.stage.host_kv_pool import HostKVPool, _PendingCopy
from molink.stage.kv_pool import KVPool
from molink.stage.mixed_kv_pool import MixedKVPool


class Shape:
    kv_heads, head_dim, kv_kinds = 2, 8, 2


@pytest.fixture(params=[torch.float32, torch.float16], ids=["heads first", "rows first"])
def pool(request: pytest.FixtureRequest) -> KVPool:
    found = KVPool(Shape(), 3, 6, 4, request.param, torch.device("cpu"))
    for block in range(6):
        found.block_view(block).copy_(torch.randn(found.block_view(block).shape))
    return found


def test_swapped_blocks_return_to_other_blocks(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molink.stage.host_kv_pool._SLAB_BYTES", 2 * pool.block_view(0).nbytes)
    host = HostKVPool(pool, 5, torch.device("cpu"))
    before = [pool.block_view(block).clone() for block in range(6)]
    host.copy_out((4, 1, 3), (0, 4, 2))
    for block in range(6):
        pool.block_view(block).zero_()
    host.copy_in((0, 5), (4, 0))
    assert torch.equal(pool.block_view(0), before[1])
    assert torch.equal(pool.block_view(5), before[4])
    host.copy_in((2,), (2,))
    assert torch.equal(pool.block_view(2), before[3])
    assert not pool.block_view(4).any()
    host.wait_for_copies([(0, 5)])  # copies on a CPU end at once


def test_blocks_of_layers_whose_heads_differ() -> None:
    cpu, other = torch.device("cpu"), Shape()
    other.kv_heads, other.head_dim = 1, 12
    parts = [KVPool(shape, 2, 4, 4, torch.float32, cpu) for shape in (Shape(), other)]
    pool = MixedKVPool(parts, [(0, 0), (1, 0), (1, 1), (0, 1)])
    assert pool.locate_layer(2) == (parts[1], 1)
    pool.zero_blocks(range(4))
    for part in parts:
        for block in range(4):
            part.block_view(block).fill_(block + 1)
    host = HostKVPool(pool, 2, cpu)
    host.copy_out((1, 3), (1, 0))
    pool.zero_blocks((1, 3))
    host.copy_in((3, 1), (1, 0))
    pool.copy_block(3, 0, 2)
    for part in parts:
        assert [float(part.block_view(block).max()) for block in range(4)] == [2, 4, 3, 2]
        keys, _ = part.read_blocks(0, slice(0, 1), 1)
        assert keys[0, 0, :, 0].tolist() == [2, 2, 0, 0]


@pytest.mark.gpu
def test_gpu_copies_use_pinned_memory_in_stream_order() -> None:
    """Blocks are reused as soon as they are copied out, and again as soon as they are back."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; run `pytest -m gpu` on a PC that has one")
    device = torch.device("cuda:0")
    pool = KVPool(Shape(), 3, 6, 4, torch.float16, device)
    for block in range(6):
        pool.block_view(block).copy_(torch.randn(pool.block_view(block).shape))
    host = HostKVPool(pool, 5, device)
    assert all(slab.is_pinned() for slabs in host._slabs for slab in slabs)
    before = [pool.block_view(block).clone() for block in range(6)]
    for turn in range(20):
        host.copy_out((4, 1, 3), (0, 4, 2))
        host.wait_for_copies([(4, 1), (3,)])
        for block in (4, 1, 3):
            pool.block_view(block).fill_(turn)
        host.copy_in((1, 3, 4), (4, 2, 0))
        host.wait_for_copies([(1, 3, 4)])
        for block in range(6):
            assert torch.equal(pool.block_view(block), before[block])
    assert host.measure_block_s() > 0


def test_it_is_timed_both_ways(pool: KVPool) -> None:
    assert HostKVPool(pool, 3, torch.device("cpu")).measure_block_s() > 0


@pytest.mark.parametrize(
    ("blocks", "hosts"),
    [((6,), (0,)), ((-1,), (0,)), ((0,), (5,)), ((1, 1), (0, 1)), ((0, 1), (2, 2))],
)
def test_blocks_that_do_not_exist_are_not_copied(
    pool: KVPool, blocks: tuple[int, ...], hosts: tuple[int, ...]
) -> None:
    host = HostKVPool(pool, 5, torch.device("cpu"))
    with pytest.raises(InvariantError, match="duplicated or not below"):
        host.copy_out(blocks, hosts)


def test_blocks_must_be_swapped_out_before_in(pool: KVPool) -> None:
    host = HostKVPool(pool, 5, torch.device("cpu"))
    host.copy_out((0, 1), (0, 1))
    host.copy_in((0,), (0,))
    with pytest.raises(InvariantError, match="never copied"):
        host.copy_in((2, 3), (0, 1))


def test_only_steps_that_use_copied_blocks_wait(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU steps wait for the unfinished copies of blocks that they use, and for no others."""
    waited: list[str] = []
    stream = SimpleNamespace(wait_event=lambda event: waited.append(event.name))
    monkeypatch.setattr("torch.cuda.current_stream", lambda _: stream)
    host = HostKVPool(pool, 5, torch.device("cpu"))

    def copying(name: str, blocks: set[int], over: bool) -> Any:
        event: Any = SimpleNamespace(name=name, query=lambda: over)
        return _PendingCopy(frozenset(blocks), event)

    host._pending = [copying("over", {1}, True), copying("out", {1, 2}, False)]
    host._pending.append(copying("in", {4}, False))
    host.wait_for_copies([(0, 3), (5,)])
    assert waited == []
    host.wait_for_copies(table for table in ((0, 2), (3,)))
    assert waited == ["out"]
    host.wait_for_copies([(4, 1)])
    assert waited == ["out", "out", "in"]
