"""Reads and writes of a pool are the same for each layout in memory."""

from types import SimpleNamespace

import pytest
import torch

from molink.facts.model import KVCacheDType
from molink.stage.kv_pool import KVPool

SHAPE = SimpleNamespace(kv_heads=2, head_dim=4, kv_kinds=2)
PAGE, BLOCKS, LAYERS = 3, 5, 2


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def pool(request: pytest.FixtureRequest) -> KVPool:
    made = KVPool(SHAPE, LAYERS, BLOCKS, PAGE, request.param, torch.device("cpu"), True)
    made._storage[:, :, :BLOCKS] = torch.nan
    return made


def write(pool: KVPool, *slots: int) -> None:
    """Write keys and values that encode their positions."""
    place = torch.tensor(slots, dtype=torch.float32).view(-1, 1, 1, 1)
    kind = torch.tensor([0.0, 0.5]).view(1, 2, 1, 1)
    head = torch.tensor([0.0, 0.25]).view(1, 1, 2, 1)
    rows = (place + kind + head).expand(-1, 2, 2, 4)
    pool.write_rows(1, torch.tensor(slots), rows.to(pool._storage.dtype))


@pytest.mark.parametrize("with_scratch", [False, True])
def test_stored_profiles_are_found(pool: KVPool, with_scratch: bool) -> None:
    write(pool, 6, 7, 8, 12, 13, 14)
    scratch = torch.empty(2 * 4 * PAGE * 8, dtype=pool._storage.dtype) if with_scratch else None
    keys, values = pool.read_blocks(1, torch.tensor([2, 4, 4, 2]), 2, scratch)
    assert keys.shape == values.shape == (2, 2, 2 * PAGE, 4)
    assert keys[0, 0, :, 0].tolist() == [6, 7, 8, 12, 13, 14]
    assert values[1, 1, :, 3].tolist() == [12.75, 13.75, 14.75, 6.75, 7.75, 8.75]


@pytest.mark.parametrize("kept", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_that_serve_as_values_are_stored_once(dtype: torch.dtype, kept: KVCacheDType) -> None:
    shape = SimpleNamespace(kv_heads=2, head_dim=4, kv_kinds=1)
    pools = [
        KVPool(each, LAYERS, BLOCKS, PAGE, dtype, torch.device("cpu"), kv_cache_dtype=kept)
        for each in (shape, SHAPE)
    ]
    assert 2 * pools[0].block_view(0).numel() == pools[1].block_view(0).numel()
    rows = torch.rand(PAGE, 2, 2, 4).to(dtype)
    for pool in pools:
        pool.write_rows(1, torch.arange(PAGE, 2 * PAGE), rows)
    for blocks in (slice(1, 2), torch.tensor([1])):
        keys, values = pools[0].read_blocks(1, blocks, 1)
        expected, _ = pools[1].read_blocks(1, blocks, 1)
        assert torch.equal(keys, expected)
        assert torch.equal(values, expected)
    pools[0].copy_block(1, 3, PAGE)
    assert torch.equal(pools[0].block_view(1), pools[0].block_view(3))


def test_consecutive_blocks_are_not_copied(pool: KVPool) -> None:
    write(pool, *range(3, 9))
    keys, values = pool.read_blocks(1, slice(1, 3), 1)
    assert keys[0, 1, :, 2].tolist() == [3.25, 4.25, 5.25, 6.25, 7.25, 8.25]
    own = pool._storage.untyped_storage().data_ptr()
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == own
    both, _ = pool.read_blocks(1, slice(1, 3), 2)
    assert both[:, 0, :, 0].tolist() == [[3, 4, 5], [6, 7, 8]]


def test_pages_are_what_kernels_want(pool: KVPool) -> None:
    write(pool, 4, 5)
    keys, values = pool.layer_pages(1)
    assert keys.shape == values.shape == (BLOCKS + 1, PAGE, 2, 4)
    assert keys.stride(-1) == values.stride(-1) == 1
    assert keys[1, 1:, 1, 0].tolist() == [4.25, 5.25]
    assert values[1, 1:, 0, 0].tolist() == [4.5, 5.5]


def test_a_copy_ends_in_zeros(pool: KVPool) -> None:
    write(pool, 6, 7, 8)
    pool.copy_block(2, 0, 2)
    keys, _ = pool.layer_pages(1)
    assert keys[0, :, 0, 0].tolist() == [6, 7, 0]


def test_the_spare_block_holds_zeros(pool: KVPool) -> None:
    assert pool.padding_block == BLOCKS
    for layer in range(LAYERS):
        assert not any(part[BLOCKS].any() for part in pool.layer_pages(layer))
    assert KVPool(SHAPE, 1, 2, PAGE, torch.float32, torch.device("cpu")).padding_block is None
