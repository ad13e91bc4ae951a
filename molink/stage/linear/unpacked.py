"""Projections that dequantize weights on every call, a few rows at a time.

Slow, but supported everywhere: for CPUs and shapes that the fast kernels don't support.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from molink.checkpoint.quantized_size import NF4_BLOCK
from molink.facts.model import Quantize
from molink.stage.linear.base import pad_rows, total_bytes
from molink.stage.linear.nf4 import dequantize_nf4

#: Weights dequantized at once: 1 MiB in bf16, which stays in cache.
_MAX_WEIGHTS = 2**19
#: Parts begin at nf4 blocks at any width.
_ROW_MULTIPLE = NF4_BLOCK


@dataclass(frozen=True, slots=True)
class UnpackedLinear:
    """A projection that dequantizes on every call.

    ``weight`` is int8 ``[out, in]``, or nf4 as uint8 ``[out * in / 2]``; ``scales`` (float32) are
    per row or per block.
    """

    mode: Quantize
    weight: Tensor
    scales: Tensor
    shape: tuple[int, int]
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        given = pad_rows(rows) if rows.device.type == "cpu" else rows
        result = given.new_empty(len(given), self.shape[0])
        step = rows_per_unpack(self.shape[1])
        for first in range(0, self.shape[0], step):
            last = min(first + step, self.shape[0])
            bias = None if self.bias is None else self.bias[first:last]
            result[:, first:last] = linear(given, self.unpack_rows(first, last, rows.dtype), bias)
        return result[: len(rows)]

    def unpack_rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Dequantize rows ``first:last``; ``first`` is a multiple of :func:`rows_per_unpack`."""
        if self.mode == "int8":
            steps = self.scales[first:last, None] / 127
            return (self.weight[first:last] * steps).to(dtype)
        width = self.shape[1]
        begin, end = first * width, last * width
        packed = self.weight[begin // 2 : end // 2]
        scales = self.scales[begin // NF4_BLOCK : end // NF4_BLOCK]
        return dequantize_nf4(packed, scales, (last - first, width), dtype)

    @property
    def nbytes(self) -> int:
        return total_bytes(self.weight, self.scales, self.bias)


def rows_per_unpack(width: int) -> int:
    """Return how many rows ``[…, width]`` to quantize or dequantize at once."""
    return max(1, _MAX_WEIGHTS // (width * _ROW_MULTIPLE)) * _ROW_MULTIPLE
