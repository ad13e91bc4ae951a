"""The recurrence of Mamba-2 (state space duality, arXiv 2405.21060, §6), in float32.

A head's memory ``S`` maps keys (``B`` there) to values. A row with key ``k``, value ``v`` and decay
``a`` decays it, adds to it, and reads it by a query (``C``):

    S ← a S + k v;  the row reads q S

Decays are given as logarithms. Rows are computed in chunks: within a chunk as attention with
decays, and between chunks through ``S``.
"""

import torch
from torch import Tensor

#: Rows per chunk.
_CHUNK_ROWS = 64


def update_states(
    memories: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor
) -> Tensor:
    """Apply one row to each of ``memories`` (``[B, H, K, V]``), in place.

    ``queries`` and ``keys`` are ``[B, H, K]``, ``values`` ``[B, H, V]``, ``decays`` ``[B, H]``.
    Returns the values read, ``[B, H, V]``.
    """
    memories.mul_(decays.exp()[..., None, None])
    memories.addcmul_(keys.unsqueeze(-1), values.unsqueeze(-2))
    return torch.matmul(queries.unsqueeze(-2), memories).squeeze(-2)


def scan_chunks(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor
) -> Tensor:
    """Apply consecutive rows to one ``memory`` (``[H, K, V]``), in place.

    ``queries`` and ``keys`` are ``[T, H, K]``, ``values`` ``[T, H, V]``, ``decays`` ``[T, H]``.
    Returns the values read, ``[T, H, V]``.
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
    """Apply one chunk; heads are the first dimension of all tensors and of the result."""
    total = decays.cumsum(-1)  # [H, T]: summed since the chunk's start
    read = torch.matmul(queries * total.exp().unsqueeze(-1), memory)
    between = fade_between(total)
    read += torch.matmul(torch.matmul(queries, keys.transpose(-1, -2)).mul_(between), values)
    remaining = (total[:, -1:] - total).exp_().unsqueeze(-1)
    memory.mul_(total[:, -1:, None].exp())
    memory.add_(torch.matmul((keys * remaining).transpose(-1, -2), values))
    return read


def fade_between(total: Tensor) -> Tensor:
    """Return the decay from each earlier row to each later row, ``[H, T, T, …]``; otherwise 0.

    ``total`` (``[H, T, …]``) has the sums of logarithms of decays up to each row.
    """
    rows, others = total.shape[1], (None,) * (total.dim() - 2)
    later = torch.ones(rows, rows, dtype=torch.bool, device=total.device).triu_(1)
    differences = total.unsqueeze(2) - total.unsqueeze(1)
    return differences.masked_fill_(later[(..., *others)], -torch.inf).exp_()
