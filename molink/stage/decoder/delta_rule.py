"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464, §3), in float32.

A head's memory ``S`` maps keys to values. A row with key ``k``, value ``v``, decay ``a`` and rate
``b`` first fades it and then corrects what it has for the key:

    S ← a S;  S ← S + b k (v - k S);  the row reads q S

Decays are given by their logarithms. Several rows are computed together in chunks (§3.3): rows of a
chunk depend on one another through a triangular system, and on rows before it through ``S`` only.
"""

import torch
from torch import Tensor

from molink.stage.decoder.state_scan import fade_between

#: Rows of a chunk: a product of that size is efficient, and its triangular system still small.
_CHUNK_ROWS = 64


def update_memories(
    memories: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
) -> Tensor:
    """Apply one row to each of ``memories`` (``[B, H, K, V]``), in place.

    ``queries`` and ``keys`` are ``[B, H, K]``, ``values`` ``[B, H, V]``, ``decays`` and ``rates``
    ``[B, H]``. Returns what the rows read, ``[B, H, V]``.
    """
    memories.mul_(decays.exp()[..., None, None])
    known = torch.matmul(keys.unsqueeze(-2), memories)
    corrections = (values.unsqueeze(-2) - known).mul_(rates[..., None, None])
    memories.addcmul_(keys.unsqueeze(-1), corrections)
    return torch.matmul(queries.unsqueeze(-2), memories).squeeze(-2)


def run_chunks(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
) -> Tensor:
    """Apply consecutive rows to one ``memory`` (``[H, K, V]``), in place.

    ``queries`` and ``keys`` are ``[T, H, K]``, ``values`` ``[T, H, V]``, ``decays`` and ``rates``
    ``[T, H]``. Returns what the rows read, ``[T, H, V]``.
    """
    parts = (torch.split(part, _CHUNK_ROWS) for part in (queries, keys, values, decays, rates))
    read = [
        _run_chunk(memory, *(part.transpose(0, 1) for part in chunk))
        for chunk in zip(*parts, strict=True)
    ]
    return torch.cat(read, dim=1).transpose(0, 1)


def _run_chunk(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
) -> Tensor:
    """The same for a chunk whose tensors begin with heads, as the result does."""
    total = decays.cumsum(-1)  # [H, T]: since the chunk's start
    faded = total.exp().unsqueeze(-1)
    between = fade_between(total)
    transposed = keys.transpose(-1, -2)
    rated = keys * rates.unsqueeze(-1)
    # Row i corrects the memory that rows before it leave: (I + A) C = B (V - faded K S).
    system = torch.matmul(rated, transposed).mul_(between)
    wanted = values * rates.unsqueeze(-1) - torch.matmul(rated * faded, memory)
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = torch.matmul(queries * faded, memory)
    read += torch.matmul(torch.matmul(queries, transposed).mul_(between), corrections)
    remaining = (total[:, -1:] - total).exp_().unsqueeze(-1)
    memory.mul_(faded[:, -1:]).add_(torch.matmul((keys * remaining).transpose(-1, -2), corrections))
    return read
