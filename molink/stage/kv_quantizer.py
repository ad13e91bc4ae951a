"""Quantizes keys and values to 8 bits, with one scale per head and position.

A row's stored form depends on that row alone, not on how prompts are split or repeated.
"""

import torch
from torch import Tensor

#: Codes range from -127 to 127.
MAX_CODE = 127
#: Scales need float32's range: scales of small values would be 0 in float16.
SCALE_DTYPE = torch.bfloat16


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows ``[…, head_dim]``; return int8 codes and their scales ``[…]``.

    ``codes * scales`` is within half a scale of ``rows``, since codes are chosen for the rounded
    scale.
    """
    wide = rows.float()
    scales = (wide.abs().amax(-1) * (1 / MAX_CODE)).to(SCALE_DTYPE)
    divisors = scales.float().clamp_min_(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return (wide / divisors).round_().to(torch.int8), scales


def dequantize_rows(
    codes: Tensor, scales: Tensor, dtype: torch.dtype, scratch: Tensor | None = None
) -> Tensor:
    """Return contiguous rows ``[…, head_dim]`` in ``dtype``, in ``scratch`` (flat) if given."""
    if scratch is None:
        rows = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    else:
        rows = scratch.view(codes.shape)
    factors = scales if dtype == SCALE_DTYPE else scales.float()
    return rows.copy_(codes).mul_(factors.unsqueeze(-1))
