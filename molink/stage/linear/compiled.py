"""Projections by a product that was compiled for this CPU."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.stage.linear.base import total_bytes

if TYPE_CHECKING:
    from molink.stage.kernels.matmul import MatMul


@dataclass(frozen=True, slots=True)
class CompiledLinear:
    """A projection in blocks of columns; see :mod:`molink.stage.kernels.matmul`.

    ``weight`` is bf16 or float16, whatever the rows are; ``bias`` float32, zeros where there is
    none.
    """

    product: "MatMul"
    weight: Tensor
    bias: Tensor

    @classmethod
    def pack(cls, product: "MatMul", weight: Tensor, bias: Tensor | None) -> "CompiledLinear":
        """A projection of ``weight`` ``[out, in]``, which isn't needed afterwards."""
        added = torch.zeros(len(weight)) if bias is None else bias.float()
        return cls(product, product.pack(weight), added)

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return self.product(self.weight, rows, self.bias)

    def look_up(self, tokens: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.EmbeddingTable`."""
        return self.product.take(self.weight, tokens)

    @property
    def nbytes(self) -> int:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return total_bytes(self.weight, self.bias)
