"""Softmax attention over dense keys and values, with a softcap or sinks where a model has any."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

#: Scores that are computed at once where SDPA can't help: 64 MiB in float32.
_MAX_SCORES = 1 << 24


def attend_dot_product(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of ``queries [a, b, m, d]`` to ``keys`` and ``values [a, b, n, d]``.

    ``mask`` is additive and broadcasts to ``[a, b, m, n]``; ``causal`` stands for that of a square
    and is taken only without a softcap or sinks. ``sinks`` broadcast to ``[a, b, m, 1]``.
    """
    if softcap or sinks is not None:
        return _attend_float32(queries, keys, values, mask, scale, softcap, sinks)
    return scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )


def _attend_float32(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """In float32, since a cap leaves only its relative precision; in slabs of query rows."""
    transposed, wide = keys.float().transpose(2, 3), values.float()
    a, b, m, _ = queries.shape
    slab = max(1, _MAX_SCORES // (a * b * transposed.shape[3]))
    parts = []
    for first in range(0, m, slab):
        part = queries[:, :, first : first + slab].float() * (scale / (softcap or 1.0))
        scores = torch.matmul(part, transposed)
        if softcap:
            scores = scores.tanh_().mul_(softcap)
        if mask is not None:
            scores += mask if mask.shape[-2] == 1 else mask[..., first : first + slab, :]
        result = torch.matmul(scores.softmax(dim=-1), wide)
        if sinks is not None:
            total = scores.logsumexp(dim=-1, keepdim=True)
            own = sinks if sinks.shape[2] == 1 else sinks[:, :, first : first + slab]
            result *= torch.sigmoid(total - own)
        parts.append(result.to(queries.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
