"""A backend compared with plain masked softmax in float32, over a pool full of NaN."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from molink.facts.model import KVCacheDType
from molink.stage.attention.base import AttentionBackend, AttentionShape
from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool
from molink.stage.kv_quantizer import dequantize_rows, quantize_rows

#: (cached tokens, new rows) of each sequence of a forward.
Requests = Sequence[tuple[int, int]]


def make_shape(
    groups: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    scale: float | None = None,
    windows: tuple[int, ...] = (0,),
    softcap: float = 0.0,
    sinks: bool = False,
    kv_cache_dtype: KVCacheDType = "auto",
    chunked: bool = False,
) -> AttentionShape:
    scale = scale or head_dim**-0.5
    given = windows, softcap, sinks, kv_cache_dtype
    return AttentionShape(kv_heads, groups, head_dim, scale, *given, chunked=chunked)


def first_seen(shape: AttentionShape, position: int, window: int) -> int:
    if not window:
        return 0
    return position - position % window if shape.chunked else max(0, position - window + 1)


def dense(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """Plain attention of rows ``[count, heads, d]``, the last of ``[length, kv_heads, d]``."""
    count, length = len(queries), len(keys)
    repeated = [part.repeat_interleave(shape.groups, dim=1).float() for part in (keys, values)]
    scores = torch.einsum("qhd,khd->hqk", queries.float(), repeated[0]) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    rows = range(length - count, length)
    firsts = torch.tensor([first_seen(shape, row, window) for row in rows])[:, None]
    places = torch.arange(length)[None, :]
    hidden = (places > torch.tensor(rows)[:, None]) | (places < firsts)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, count, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, repeated[1]).flatten(1)


def fill(
    pool: KVPool, table: Sequence[int], both: Tensor, first: int, layer: int, begun: int | None
) -> None:
    """Write keys and values ``[length, 2, kv_heads, d]`` of positions ``first …`` as a stage does.

    Blocks from the one of position ``begun`` on are cleared first, as new blocks are.
    """
    size = pool.block_size
    if begun is not None:
        pool.zero_blocks([table[index] for index in range(begun // size, -(-len(both) // size))])
    slots = [table[p // size] * size + p % size for p in range(first, len(both))]
    device = pool._storage.device
    pool.write_rows(layer, torch.tensor(slots, device=device), both[first:].to(device))


@torch.inference_mode()
def compare(
    backend: AttentionBackend,
    shape: AttentionShape,
    requests: Requests,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    atol: float = 1e-5,
    consecutive: bool = False,
) -> None:
    """Compare all layers with the dense reference; all other positions hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(before + count) // block_size) for before, count in requests]
    blocks = sum(needed) + 3
    order = torch.randperm(blocks, generator=generator).tolist()
    if consecutive:
        order = list(range(1, blocks + 1))
        blocks += 1
    pool = KVPool(
        shape,
        len(shape.windows),
        blocks,
        block_size,
        dtype,
        torch.device(device),
        kv_cache_dtype=shape.kv_cache_dtype,
    )
    sequences, tables = [], []
    for (before, count), many in zip(requests, needed, strict=True):
        tables.append([order.pop(0) for _ in range(many)])
        # A stage's table may have blocks for rows to come.
        sequences.append(SequenceRows(before, count, [*tables[-1], 0]))
    prepared = backend.prepare_layers(sequences, block_size, dtype, torch.device(device))
    width = (shape.groups + 2) * shape.kv_heads
    sinks = None
    if shape.sinks:
        sinks = 3 * torch.randn(shape.groups * shape.kv_heads, generator=generator)
    for layer, window in enumerate(shape.windows):
        for part in pool.layer_scales(layer) or pool.layer_pages(layer):
            part.fill_(torch.nan)
        rows, expected = [], []
        for (before, count), table in zip(requests, tables, strict=True):
            size = (before + count, width, shape.head_dim)
            every = torch.randn(size, generator=generator).to(dtype)
            split = shape.groups * shape.kv_heads
            both = every[:, split:].unflatten(1, (2, shape.kv_heads))
            exact = both.float()
            if shape.quantizes:
                exact = dequantize_rows(*quantize_rows(both), torch.float32)
            first = first_seen(shape, before, window) // block_size * block_size
            begun = before + count - 1 if backend.reads_unwritten else None
            fill(pool, table, both, first, layer, begun)
            rows.append(every[before:])
            queries = every[before:, :split]
            expected.append(dense(queries, exact[:, 0], exact[:, 1], shape, window, sinks))
        given = None if sinks is None else sinks.to(device)
        result = prepared(layer, torch.cat(rows).to(device), pool, given)
        assert result.dtype == dtype
        torch.testing.assert_close(result.float().cpu(), torch.cat(expected), atol=atol, rtol=0)


@pytest.fixture(scope="session")
def shape_of() -> Callable[..., AttentionShape]:
    """``shape_of(groups=2, kv_heads=2, head_dim=16, scale=None, windows=(0,), softcap=0.0, …)``."""
    return make_shape


@pytest.fixture(scope="session")
def check() -> Callable[..., None]:
    """``check(backend, shape, requests, block_size=4, …)``: see :func:`compare`."""
    return compare
