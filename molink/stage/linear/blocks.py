"""Projections by weights that stay in the blocks of a GGUF file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molink.gguf.formats import FORMATS
from molink.stage.kernels.repack import arrange, parse, scales, take
from molink.stage.linear.base import Projection, total_bytes

if TYPE_CHECKING:
    from molink.stage.kernels.block_matmul import BlockMatMul

#: Weights that are put into another order at once.
_PART = 2**20


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """A projection in blocks; see :mod:`molink.stage.kernels.block_matmul`.

    ``weight`` is uint8 ``[out / C, bytes]``; ``bias`` float32, zeros where there is none.
    """

    product: "BlockMatMul"
    weight: Tensor
    bias: Tensor
    #: Of rows and results; the product may have another one.
    dtype: torch.dtype

    @classmethod
    def pack(
        cls,
        product: "BlockMatMul",
        name: str,
        stored: Sequence[Tensor],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> "BlockLinear":
        """Of bytes ``[rows, bytes of a row]`` of kind ``name``, one below the other.

        Each has a multiple of :data:`~molink.gguf.formats.ROWS` as rows. What is ``stored`` isn't
        needed afterwards.
        """
        rows, columns = sum(len(each) for each in stored), product.columns
        width = stored[0].shape[1]
        form = FORMATS[name]
        weight = torch.empty(0, dtype=torch.uint8)
        first = 0
        for part in _parts(stored, columns, _PART // width):
            made = arrange(form, parse(name, part), columns)
            if not first:
                weight = made.new_empty(rows // columns, *made.shape[1:])
            weight[first : first + len(made)] = made
            first += len(made)
        return cls(product, weight, torch.zeros(rows) if bias is None else bias.float(), dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.Projection`."""
        found = self.product(self.weight, rows.to(self.product.dtype), self.bias)
        return found.to(self.dtype)

    def look_up(self, tokens: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.EmbeddingTable`."""
        found = take(self.product.form, self.weight, self.product.columns, tokens)
        return found.to(self.dtype)

    def is_finite(self, first: int, last: int) -> bool:
        """Whether all scales of rows ``first … last - 1`` are finite, so that all weights are."""
        columns = self.product.columns
        part = self.weight[first // columns : last // columns]
        return bool(scales(self.product.form, part, columns).isfinite().all())

    @property
    def nbytes(self) -> int:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return total_bytes(self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Projections of the same rows whose outputs lie side by side: weights of several kinds."""

    parts: tuple[Projection, ...]

    def __call__(self, rows: Tensor) -> Tensor:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return torch.cat([part(rows) for part in self.parts], 1)

    @property
    def nbytes(self) -> int:
        """See :class:`~molink.stage.linear.base.Projection`."""
        return sum(part.nbytes for part in self.parts)


def _parts(stored: Sequence[Tensor], columns: int, rows: int) -> Iterator[Tensor]:
    """Rows, about so many at a time; each part is a multiple of ``columns``."""
    step = max(1, rows // columns) * columns
    for each in stored:
        for begin in range(0, len(each), step):
            yield each[begin : begin + step]
