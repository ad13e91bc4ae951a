"""Weights to try products with."""

import torch
from torch import Tensor

#: By how many numbers each row begins later than the one before it.
_ROW_SHIFT = 7


def make_random_weight(out: int, width: int, generator: torch.Generator) -> Tensor:
    """Float32 ``[out, width]``; rows share numbers, at other places: few have to be drawn."""
    drawn = torch.randn(out * _ROW_SHIFT + width, generator=generator)
    return drawn.as_strided((out, width), (_ROW_SHIFT, 1)).contiguous()
