"""Textbook attention as a reference for backends."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from molink.stage.attention.base import AttentionBackend, AttentionShape
from molink.stage.batch import SequenceRows
from molink.stage.kv_pool import KVPool

#: (earlier positions, rows): a first chunk, decode rows, and chunks across a page boundary.
_TRIAL_ROWS = ((0, 40), (511, 1), (17, 1), (250, 13), (3, 2))


def dense_attention(
    queries: Tensor, both: Tensor, shape: AttentionShape, window: int, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention in float64 for ``queries`` ``[n, heads, d]``, a sequence's last rows.

    ``both`` has its keys and values ``[length, 2, kv_heads, d]``; ``sinks`` are extra scores
    ``[heads]``. Returns ``[n, heads * d]``.
    """
    count, length = len(queries), len(both)
    keys, values = both.double().repeat_interleave(shape.groups, dim=2).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    rows = torch.arange(length - count, length)[:, None]
    places = torch.arange(length)[None, :]
    hidden = places > rows
    if window:
        hidden = hidden | (places < shape.first_visible(rows, window))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        own = sinks.double().view(-1, 1, 1).expand(-1, count, 1)
        scores = torch.cat((scores, own), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


@torch.inference_mode()
def attention_error(
    create: Callable[[AttentionShape], AttentionBackend],
    shape: AttentionShape,
    page: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Return the largest error of a backend, whose outputs have magnitude 1.

    Each window has one run over random rows in unordered pages. NaN if the backend returns any.
    """
    layers = [replace(shape, windows=(window,)) for window in shape.windows]
    errors = [_backend_error(create(layer), layer, page, dtype, device) for layer in layers]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _backend_error(
    backend: AttentionBackend,
    shape: AttentionShape,
    page: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    generator = torch.Generator().manual_seed(shape.windows[0])
    needed = [-(-(before + count) // page) for before, count in _TRIAL_ROWS]
    order = torch.randperm(sum(needed), generator=generator).tolist()
    pool = KVPool(shape, 1, len(order), page, dtype, device)
    pool.zero_blocks(order)
    sequences: list[SequenceRows] = []
    rows, exact = [], []
    split = shape.groups * shape.kv_heads
    sinks = torch.linspace(-4, 4, split) if shape.sinks else None
    for (before, count), many in zip(_TRIAL_ROWS, needed, strict=True):
        table = [order.pop() for _ in range(many)]
        sequences.append(SequenceRows(before, count, table))
        size = (before + count, split + 2 * shape.kv_heads, shape.head_dim)
        every = torch.randn(size, generator=generator).to(dtype)
        both = every[:, split:].view(len(every), 2, shape.kv_heads, shape.head_dim)
        slots = [table[position // page] * page + position % page for position in range(len(every))]
        pool.write_rows(0, torch.tensor(slots, device=device), both.to(device))
        rows.append(every[before:])
        exact.append(dense_attention(every[before:, :split], both, shape, shape.windows[0], sinks))
    given = None if sinks is None else sinks.to(device)
    prepared = backend.prepare_layers(sequences, page, dtype, device)
    found = prepared(0, torch.cat(rows).to(device), pool, given)
    return float((found.double().cpu() - torch.cat(exact)).abs().max())
