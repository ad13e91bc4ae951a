"""The projection as torch has it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from molink.stage.linear.base import pad_rows, total_bytes


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The plain projection."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.Projection`."""
        if rows.dtype is torch.bfloat16 and rows.device.type == "cpu":
            return linear(pad_rows(rows), self.weight, self.bias)[: len(rows)]
        return linear(rows, self.weight, self.bias)

    def look_up(self, tokens: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.EmbeddingTable`."""
        return embedding(tokens, self.weight)

    @property
    def nbytes(self) -> int:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return total_bytes(self.weight, self.bias)
