"""Weights to try products with."""

import torch
from torch import Tensor

#: By how many numbers each row begins later than the one before it.
_STEP = 7


def random_weight(out: int, width: int, generator: torch.Generator) -> Tensor:
    """Float32 ``[out, width]``; rows share numbers, at other places: few have to be drawn."""
    drawn = torch.randn(out * _STEP + width, generator=generator)
    return drawn.as_strided((out, width), (_STEP, 1)).contiguous()
