"""A projection whose outputs are multiplied by constant factors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.linear.base import Projection
from molink.stage.weights.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """A projection and the ``factors`` of its outputs, ``[out]`` in the compute type."""

    base: Projection
    factors: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows ``[T, out]``."""
        return self.base(rows).mul_(self.factors)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.base.nbytes + self.factors.nbytes


def scale_outputs(
    base: Projection, sizes: Sequence[int], factors: Sequence[float], reader: WeightReader
) -> Projection:
    """Multiply consecutive groups of ``sizes`` outputs by one factor each.

    The factors get the dtype and device of ``reader``.
    """
    if all(factor == 1.0 for factor in factors):
        return base
    repeated = torch.tensor(factors).repeat_interleave(torch.tensor(sizes))
    return ScaledLinear(base, repeated.to(reader.device, reader.dtype))
