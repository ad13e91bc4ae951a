"""Projections by a product that was compiled for this CPU."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.stage.linear.base import total_bytes

if TYPE_CHECKING:
    from molink.stage.kernels.matmul import MatMul

#: Rows of a weight are packed by multiples of so many, which whole blocks have.
PART_ROWS = 128


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
    def create_empty(
        cls,
        product: "MatMul",
        shape: tuple[int, int],
        weight_dtype: torch.dtype,
        bias: Tensor | None,
    ) -> "CompiledLinear | None":
        """One of a weight ``[out, in]`` that is yet to come; ``None`` if parts don't fit."""
        some = torch.zeros(PART_ROWS, shape[1], dtype=weight_dtype)
        if not product.supports_weight(some) or shape[0] % PART_ROWS:
            return None
        packed = product.pack_weight(some)
        weight = packed.new_empty(shape[0] // PART_ROWS * len(packed), *packed.shape[1:])
        return cls(product, weight, torch.zeros(shape[0]) if bias is None else bias.float())

    def put_rows(self, first: int, part: Tensor) -> None:
        """Take rows from ``first`` on, both multiples of :data:`PART_ROWS`."""
        packed = self.product.pack_weight(part)
        place = first * len(packed) // len(part)
        self.weight[place : place + len(packed)] = packed

    @classmethod
    def pack_weight(
        cls, product: "MatMul", weight: Tensor, bias: Tensor | None
    ) -> "CompiledLinear":
        """A projection of ``weight`` ``[out, in]``, which isn't needed afterwards."""
        added = torch.zeros(len(weight)) if bias is None else bias.float()
        return cls(product, product.pack_weight(weight), added)

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return self.product(self.weight, rows, self.bias)

    def look_up(self, tokens: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.EmbeddingTable`."""
        return self.product.gather_columns(self.weight, tokens)

    @property
    def nbytes(self) -> int:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return total_bytes(self.weight, self.bias)
