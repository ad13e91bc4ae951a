"""Projections with int8 weights and a scale per output row.

Weights are as in LLM.int8(): ``w = q * scale / 127``. Rows are quantized, too, since only integer
products are fast. But 8 bits would not do: one large activation would erase the others of its row,
which is why that paper separates outliers, at the price of data-dependent shapes. Each row is the
sum of two int8 planes, ``x = (high + low / 254) * peak / 127``, which go through one product as
twice as many rows. This is precise to 1/65000 of the row's peak, free in memory-bound decode, and
as expensive as bf16 in prefill.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from molink.stage.linear.base import pad_rows, total_bytes

#: Steps of the high plane on either side of zero, and of the low plane within one high step.
_COARSE_STEPS = 127
_FINE_STEPS = 254
#: Rows multiplied at once, which bounds float32 temporaries. A GPU multiplies all rows of a step,
#: since launches dominate.
_CPU_ROWS, _GPU_ROWS = 128, 1024
#: Scale of an all-zero row.
_MIN_SCALE = 1e-30
#: cuBLASLt needs dimensions that are multiples of this.
_CUBLAS_MULTIPLE = 4
#: Beyond this width 32-bit sums could overflow.
MAX_INT8_WIDTH = 2**16


class IntegerProduct(Protocol):
    """Multiplies planes by a projection's weights."""

    def __call__(self, planes: Tensor) -> Tensor:
        """Multiply integers (float32 ``[R, in]``, at most 127 each) to float32 ``[R, out]``."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""


@dataclass(frozen=True, slots=True)
class OneDnnProduct:
    """CPU product with weights in oneDNN's blocked layout (``packed`` is opaque).

    ``steps`` ``[out]`` are scale / 127.
    """

    packed: Tensor
    steps: Tensor
    zeros: Tensor

    @classmethod
    def from_weight(cls, weight: Tensor, scales: Tensor) -> "OneDnnProduct":
        """Pack ``weight`` ``[out, in]`` (int8) with row ``scales``."""
        zeros = torch.zeros(1, dtype=torch.int64).expand(len(weight))
        return cls(torch.ops.onednn.qlinear_prepack(weight, None), scales / _COARSE_STEPS, zeros)

    def __call__(self, planes: Tensor) -> Tensor:
        shifted = planes.add_(128).to(torch.uint8)  # oneDNN is slow for signed rows
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            shifted, 1.0, 128, self.packed, self.steps, self.zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return product

    @property
    def nbytes(self) -> int:
        return total_bytes(self.packed, self.steps)


@dataclass(frozen=True, slots=True)
class CudaProduct:
    """GPU product through bitsandbytes' cuBLASLt call.

    ``weight`` is ``[out, in]``; ``steps`` ``[out]`` are scale / 127.
    """

    weight: Tensor
    steps: Tensor

    @classmethod
    def from_weight(cls, weight: Tensor, scales: Tensor) -> "CudaProduct":
        """Use ``weight`` (int8) with row ``scales``."""
        return cls(weight, scales / _COARSE_STEPS)

    @staticmethod
    def supports_shape(shape: tuple[int, int]) -> bool:
        """Whether cuBLASLt supports a weight ``[out, in]`` of this shape."""
        return all(size % _CUBLAS_MULTIPLE == 0 for size in shape)

    def __call__(self, planes: Tensor) -> Tensor:
        whole = torch.ops.bitsandbytes.int8_linear_matmul.default(
            planes.to(torch.int8), self.weight
        )
        # bitsandbytes' own scaling returns fp16, where large values overflow.
        scaled: Tensor = whole * self.steps
        return scaled

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.steps)


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """A projection with int8 weights."""

    product: IntegerProduct
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        most = _CPU_ROWS if rows.device.type == "cpu" else _GPU_ROWS
        if len(rows) > most:
            parts = (rows[first : first + most] for first in range(0, len(rows), most))
            return torch.cat([self._multiply_planes(part) for part in parts])
        return self._multiply_planes(rows)

    def _multiply_planes(self, rows: Tensor) -> Tensor:
        count = len(rows)
        given = pad_rows(rows) if rows.device.type == "cpu" else rows
        peaks = given.abs().amax(1, keepdim=True).float().clamp_min_(_MIN_SCALE)
        fine = (given * (_COARSE_STEPS * _FINE_STEPS / peaks)).round_()
        high = (fine / _FINE_STEPS).round_()
        low = fine.sub_(high, alpha=_FINE_STEPS)
        sums = self.product(torch.cat((high, low)))
        result = sums[: len(given)].add_(sums[len(given) :], alpha=1 / _FINE_STEPS)
        result = result.mul_(peaks.div_(_COARSE_STEPS))[:count]
        return (result if self.bias is None else result.add_(self.bias)).to(rows.dtype)

    @property
    def nbytes(self) -> int:
        return self.product.nbytes + total_bytes(self.bias)


def quantize_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to int8 ``[R, in]`` with float32 row scales ``[R]`` (the largest magnitude)."""
    given = rows.float()
    scales = given.abs().amax(1)
    factors = _COARSE_STEPS / scales.clamp_min(_MIN_SCALE)
    return (given * factors.unsqueeze(1)).round_().to(torch.int8), scales


@torch.inference_mode()
def has_onednn_int8() -> bool:
    """Try whether the CPU multiplies integers exactly, including extremes.

    The operators are not public API, and without VNNI, pairs of products saturate at 16 bits.
    """
    weight = torch.tensor([[127] * 64, [-127] * 64, [*range(64)]], dtype=torch.int8)
    planes = torch.tensor([[127.0] * 64, [-127.0] * 64, [float(x) for x in range(64)]])
    exact = planes @ weight.float().t()
    try:
        product = OneDnnProduct.from_weight(weight, torch.full((3,), float(_COARSE_STEPS)))
        return torch.equal(product(planes.clone()), exact)
    except (AttributeError, RuntimeError):
        return False
