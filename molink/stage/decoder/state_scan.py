"""The recurrence of Mamba-2 (state space duality, arXiv 2405.21060, §6), in float32.

A head's memory ``S`` maps keys (``B`` there) to values. A row with key ``k``, value ``v`` and decay
``a`` fades it and adds to it, and is read by a query (``C``):

    S ← a S + k v;  the row reads q S

Decays are given by their logarithms. Several rows are computed together in chunks: within a chunk
as attention with decays, and between chunks through ``S``.
"""

import torch
from torch import Tensor

#: Rows of a chunk.
_CHUNK_ROWS = 64


def update_states(
    memories: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor
) -> Tensor:
    """Apply one row to each of ``memories`` (``[B, H, K, V]``), in place.

    ``queries`` and ``keys`` are ``[B, H, K]``, ``values`` ``[B, H, V]``, ``decays`` ``[B, H]``.
    Returns what the rows read, ``[B, H, V]``.
    """
    memories.mul_(decays.exp()[..., None, None])
    memories.addcmul_(keys.unsqueeze(-1), values.unsqueeze(-2))
    return torch.matmul(queries.unsqueeze(-2), memories).squeeze(-2)


def scan_chunks(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor
) -> Tensor:
    """Apply consecutive rows to one ``memory`` (``[H, K, V]``), in place.

    ``queries`` and ``keys`` are ``[T, H, K]``, ``values`` ``[T, H, V]``, ``decays`` ``[T, H]``.
    Returns what the rows read, ``[T, H, V]``.
    """
    parts = (torch.split(part, _CHUNK_ROWS) for part in (queries, keys, values, decays))
    read = [
        _scan_chunk(memory, *(part.transpose(0, 1) for part in chunk))
        for chunk in zip(*parts, strict=True)
    ]
    return torch.cat(read, dim=1).transpose(0, 1)


def _scan_chunk(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor
) -> Tensor:
    """The same for a chunk whose tensors begin with heads, as the result does."""
    total = decays.cumsum(-1)  # [H, T]: since the chunk's start
    read = torch.matmul(queries * total.exp().unsqueeze(-1), memory)
    between = fade_between(total)
    read += torch.matmul(torch.matmul(queries, keys.transpose(-1, -2)).mul_(between), values)
    remaining = (total[:, -1:] - total).exp_().unsqueeze(-1)
    memory.mul_(total[:, -1:, None].exp())
    memory.add_(torch.matmul((keys * remaining).transpose(-1, -2), values))
    return read


def fade_between(total: Tensor) -> Tensor:
    """Factors by which rows have faded at later ones, ``[H, T, T, …]``; 0 at earlier ones.

    ``total`` (``[H, T, …]``) are sums of logarithms of decays up to each row.
    """
    rows, others = total.shape[1], (None,) * (total.dim() - 2)
    later = torch.ones(rows, rows, dtype=torch.bool, device=total.device).triu_(1)
    differences = total.unsqueeze(2) - total.unsqueeze(1)
    return differences.masked_fill_(later[(..., *others)], -torch.inf).exp_()
