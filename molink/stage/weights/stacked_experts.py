"""Experts out of a stack, as numbers; see :mod:`molink.checkpoint.stacked_experts`."""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from molink.checkpoint.stacked_experts import MXFP4_BLOCK, StackedExpert
from molink.stage.linear.unpacked import rows_per_unpack

#: The values of 4-bit floats with two bits of exponent and one of mantissa (E2M1).
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def read_expert_rows(
    place: StackedExpert, mapped: Callable[[str], Tensor], step: int
) -> Iterator[tuple[int, Tensor]]:
    """Rows of an expert's tensor, about ``step`` at a time, each with where it begins."""
    parts = [mapped(name)[place.index] for name in place.names]
    if place.is_mxfp4:
        width = parts[1].shape[1] * MXFP4_BLOCK
        step = min(step, rows_per_unpack(width))
        for begin in range(0, len(parts[0]), step):
            yield begin, unpack_mxfp4(*(part[begin : begin + step] for part in parts))
        return
    rows = parts[0].t() if parts[0].dim() == 2 else parts[0]
    for begin in range(0, len(rows), step):
        yield begin, rows[begin : begin + step]


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Float32 ``[out, in]`` of uint8 ``blocks [out, in / 32, 16]`` and ``scales [out, in / 32]``.

    A scale of 255 is none: what it belongs to becomes NaN.
    """
    # One look-up for both values of a byte takes a sixth of the time of one for each.
    both = _byte_pairs().index_select(0, blocks.reshape(-1).int()).view(blocks.shape)
    powers = torch.ldexp(torch.ones(scales.shape), scales.int() - _SCALE_BIAS)
    powers = powers.masked_fill(scales == 255, torch.nan)
    return both.view(torch.float32).mul_(powers.unsqueeze(-1)).flatten(1)


@cache
def _byte_pairs() -> Tensor:
    """The two float32 values of each byte, as one int64: ``[256]``."""
    values = torch.tensor([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)])
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    return pairs.view(torch.int64).view(-1)
