"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464, §3), in float32.

A head's memory ``S`` maps keys to values. A row with key ``k``, value ``v``, decay ``a`` and rate
``b`` first decays it and then corrects its value for the key:

    S ← a S;  S ← S + b k (v - k S);  the row reads q S

Decays are given as logarithms, one per head, or one per channel of its keys (Kimi Delta Attention,
arXiv 2510.26692, §3). Rows are computed in chunks (§3.3): rows of a chunk depend on one another
through a triangular system, and on earlier rows through ``S`` only.
"""

import torch
from torch import Tensor

from molink.stage.decoder.state_scan import fade_between

#: Rows per chunk: products of that size are efficient, and the triangular system is still small.
_CHUNK_ROWS = 64
#: Rows per chunk with decays per channel, which need memory for all channels of all pairs of rows.
_CHANNEL_CHUNK_ROWS = 16
#: Epsilon added to the squared length of queries and keys before division.
_LENGTH_EPS = 1e-6


def divide_lengths(heads: Tensor) -> Tensor:
    """Divide queries or keys ``[…, K]`` by their lengths."""
    squares = heads.square().sum(-1, keepdim=True)
    return heads * squares.add_(_LENGTH_EPS).rsqrt_()


def update_memories(
    memories: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
) -> Tensor:
    """Apply one row to each of ``memories`` (``[B, H, K, V]``), in place.

    ``queries`` and ``keys`` are ``[B, H, K]``, ``values`` ``[B, H, V]``, ``rates`` ``[B, H]``, and
    ``decays`` ``[B, H]`` or ``[B, H, K]``. Returns the values read, ``[B, H, V]``.
    """
    memories.mul_(decays.exp().view(*rates.shape, -1, 1))
    known = torch.matmul(keys.unsqueeze(-2), memories)
    corrections = (values.unsqueeze(-2) - known).mul_(rates[..., None, None])
    memories.addcmul_(keys.unsqueeze(-1), corrections)
    return torch.matmul(queries.unsqueeze(-2), memories).squeeze(-2)


def run_chunks(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
) -> Tensor:
    """Apply consecutive rows to one ``memory`` (``[H, K, V]``), in place.

    ``queries`` and ``keys`` are ``[T, H, K]``, ``values`` ``[T, H, V]``, ``rates`` ``[T, H]``, and
    ``decays`` ``[T, H]`` or ``[T, H, K]``. Returns the values read, ``[T, H, V]``.
    """
    is_head = decays.dim() == 2
    run, size = (_run_chunk, _CHUNK_ROWS) if is_head else (_run_channels, _CHANNEL_CHUNK_ROWS)
    parts = (torch.split(part, size) for part in (queries, keys, values, decays, rates))
    read = [
        run(memory, *(part.transpose(0, 1) for part in chunk)) for chunk in zip(*parts, strict=True)
    ]
    return torch.cat(read, dim=1).transpose(0, 1)


def _run_chunk(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
) -> Tensor:
    """Apply one chunk; heads are the first dimension of all tensors and of the result."""
    total = decays.cumsum(-1)  # [H, T]: summed since the chunk's start
    faded = total.exp().unsqueeze(-1)
    between = fade_between(total)
    transposed = keys.transpose(-1, -2)
    rated = keys * rates.unsqueeze(-1)
    # Row i corrects the memory left by earlier rows: (I + A) C = B (V - faded K S).
    system = torch.matmul(rated, transposed).mul_(between)
    wanted = values * rates.unsqueeze(-1) - torch.matmul(rated * faded, memory)
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = torch.matmul(queries * faded, memory)
    read += torch.matmul(torch.matmul(queries, transposed).mul_(between), corrections)
    remaining = (total[:, -1:] - total).exp_().unsqueeze(-1)
    memory.mul_(faded[:, -1:]).add_(torch.matmul((keys * remaining).transpose(-1, -2), corrections))
    return read


def _run_channels(
    memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor
) -> Tensor:
    """Apply one chunk with decays per channel, ``[H, T, K]``.

    The factor between two rows is not split into one factor per row, which might overflow.
    """
    total = decays.cumsum(1)
    faded = total.exp()
    rated = keys * rates.unsqueeze(-1)
    # [H, T, T, K]: keys of earlier rows, decayed up to each later row.
    found = fade_between(total).mul_(keys.unsqueeze(1))
    both = torch.matmul(found, torch.stack((rated, queries), dim=-1))
    wanted = values * rates.unsqueeze(-1) - torch.matmul(rated * faded, memory)
    corrections = torch.linalg.solve_triangular(
        both[..., 0], wanted, upper=False, unitriangular=True
    )
    read = torch.matmul(queries * faded, memory) + torch.matmul(both[..., 1], corrections)
    remaining = (total[:, -1:] - total).exp_()
    memory.mul_(faded[:, -1].unsqueeze(-1))
    memory.add_(torch.matmul((keys * remaining).transpose(-1, -2), corrections))
    return read
