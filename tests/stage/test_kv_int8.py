"""Keys and values in 8 bits: what is stored of a row, and that copies of blocks include it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from molink.stage.host_kv_pool import HostKVPool
from molink.stage.kv_pool import KVPool, block_bytes
from molink.stage.kv_quantizer import dequantize_rows, quantize_rows

CPU = torch.device("cpu")
LAYERS, BLOCKS = 2, 5
#: On a CPU each type has its layout; the last ones have an odd number of codes before scales.
LAYOUTS = pytest.mark.parametrize(
    ("dtype", "page", "head_dim"),
    [
        (torch.float32, 16, 8),
        (torch.bfloat16, 3, 5),
        (torch.float16, 16, 8),
        (torch.float16, 3, 5),
    ],
)


def make_pool(dtype: torch.dtype, page: int, head_dim: int, kv_heads: int = 3) -> KVPool:
    """A pool whose memory is filled with one bits, which is NaN."""
    shape = SimpleNamespace(kv_heads=kv_heads, head_dim=head_dim, kv_kinds=2)
    pool = KVPool(shape, LAYERS, BLOCKS, page, dtype, CPU, kv_cache_dtype="int8")
    pool._memory.fill_(-1)
    return pool


def make_rows(pool: KVPool, count: int, seed: int = 0) -> Tensor:
    """Keys and values of ``count`` positions, with heads of different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 2, pool.kv_heads, pool.head_dim, generator=generator)
    return (rows * torch.logspace(-2, 1, pool.kv_heads)[:, None]).to(pool.dtype)


def read_positions(pool: KVPool, layer: int, table: list[int]) -> Tensor:
    """Keys and values ``[positions, 2, kv_heads, head_dim]`` of whole blocks."""
    keys, values = pool.read_blocks(layer, torch.tensor(table), 1)
    return torch.stack((keys[0], values[0])).permute(2, 0, 1, 3)


@settings(deadline=None)
@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=8
    ),
    st.integers(-120, 0),
)
def test_a_row_is_kept_within_half_a_scale(row: list[float], exponent: int) -> None:
    rows = torch.tensor([row]) * 2.0**exponent
    codes, scales = quantize_rows(rows)
    assert int(codes.min()) >= -127
    error = (dequantize_rows(codes, scales, torch.float32) - rows).abs().max()
    assert float(error) <= 0.501 * float(scales) + 1e-36
    assert float(scales) <= 1.01 / 127 * float(rows.abs().max()) + 1e-36


def test_zeros_stay_zeros() -> None:
    codes, scales = quantize_rows(torch.zeros(2, 4))
    assert not codes.any()
    assert not scales.any()


@LAYOUTS
def test_rows_are_read_as_they_are_rounded(dtype: torch.dtype, page: int, head_dim: int) -> None:
    pool = make_pool(dtype, page, head_dim)
    rows = make_rows(pool, 2 * page)
    table = [4, 1]
    slots = [table[at // page] * page + at % page for at in range(2 * page)]
    pool.write_rows(1, torch.tensor(slots), rows)
    kept = pool.round_rows(rows)
    assert kept.dtype == dtype
    assert torch.equal(read_positions(pool, 1, table), kept)
    scratch = torch.empty(rows.numel(), dtype=dtype)
    keys, _ = pool.read_blocks(1, torch.tensor(table), 1, scratch)
    assert keys.untyped_storage().data_ptr() == scratch.untyped_storage().data_ptr()
    assert torch.equal(keys[0], kept[:, 0].transpose(0, 1))
    _, alone = pool.read_blocks(1, slice(1, 2), 1)
    assert torch.equal(alone[0], kept[page:, 1].transpose(0, 1))
    pages, scales = pool.layer_pages(1), pool.layer_scales(1)
    assert scales is not None
    assert pages[1].shape == (BLOCKS, page, 3, head_dim)
    assert pages[1].stride(-1) == 1
    found = dequantize_rows(pages[1][4], scales[1][4], dtype)
    assert torch.equal(found, kept[:page, 1])


@LAYOUTS
def test_a_stored_row_depends_on_no_other(dtype: torch.dtype, page: int, head_dim: int) -> None:
    together, alone = (make_pool(dtype, page, head_dim) for _ in range(2))
    rows, slots = make_rows(together, page), torch.arange(page).flip(0)
    together.write_rows(0, slots, rows)
    for row, slot in zip(rows.split(1), slots.split(1), strict=True):
        alone.write_rows(0, slot, row)
    assert torch.equal(together.block_view(0), alone.block_view(0))


@LAYOUTS
def test_a_copy_takes_scales_along_and_is_zero_beyond(
    dtype: torch.dtype, page: int, head_dim: int
) -> None:
    pool = make_pool(dtype, page, head_dim)
    rows = make_rows(pool, page)
    for layer in range(LAYERS):
        pool.write_rows(layer, torch.arange(2 * page, 3 * page), rows)
    pool.copy_block(2, 0, 2)
    expected = pool.round_rows(rows)
    expected[2:] = 0
    for layer in range(LAYERS):
        assert torch.equal(read_positions(pool, layer, [0]), expected)


@LAYOUTS
def test_zeroed_blocks_are_zero(dtype: torch.dtype, page: int, head_dim: int) -> None:
    pool = make_pool(dtype, page, head_dim)
    pool.zero_blocks((1, 3))
    for layer in range(LAYERS):
        assert not read_positions(pool, layer, [1, 3]).any()
        assert read_positions(pool, layer, [0, 2, 4]).isnan().all()


@LAYOUTS
def test_swapped_blocks_come_back(dtype: torch.dtype, page: int, head_dim: int) -> None:
    pool = make_pool(dtype, page, head_dim)
    rows = make_rows(pool, page)
    for layer in range(LAYERS):
        pool.write_rows(layer, torch.arange(page), rows + layer)
    host = HostKVPool(pool, 3, CPU)
    host.copy_out((0,), (2,))
    pool.block_view(0).fill_(-1)
    host.copy_in((4,), (2,))
    # A block that was copied in can be copied out again, regardless of its padding.
    host.copy_out((4,), (1,))
    host.copy_in((0,), (1,))
    for layer in range(LAYERS):
        expected = pool.round_rows(rows + layer)
        assert torch.equal(read_positions(pool, layer, [4]), expected)
        assert torch.equal(read_positions(pool, layer, [0]), expected)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory_of_a_block(dtype: torch.dtype, head_dim: int) -> None:
    pool = make_pool(dtype, 16, head_dim)
    config = SimpleNamespace(kv_heads=3, head_dim=head_dim, kv_kinds=2)
    found, plain = (block_bytes(config, LAYERS, 16, dtype, kept) for kept in ("int8", "auto"))
    assert pool._memory.nbytes == BLOCKS * found
    assert found * 2 * head_dim == plain * (head_dim + 2)
