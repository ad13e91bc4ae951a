"""Weights on their way to a quantized projection: filled part by part, then made fit to multiply.

Nothing but one part is ever in full precision.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from molink.checkpoint.quantization import NF4_BLOCK
from molink.facts.model import Quantize
from molink.stage.linear.base import Projection
from molink.stage.linear.bnb import load_library, quantize_nf4
from molink.stage.linear.int8 import (
    MAX_WIDTH,
    CudaProduct,
    Int8Linear,
    OneDnnProduct,
    has_onednn_int8,
    quantize_int8,
)
from molink.stage.linear.nf4 import (
    CudaNf4Linear,
    PackedNf4Linear,
    fits_kernel,
    has_nf4_kernel,
)
from molink.stage.linear.unpacked import UnpackedLinear


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight ``shape`` (``[out, in]``) in int8 or nf4.

    ``data`` is int8 ``[out, in]`` or uint8 ``[out * in / 2]``; ``scales`` are float32, one per row
    or one per block of 64. An nf4 weight consists of whole blocks.
    """

    mode: Quantize
    shape: tuple[int, int]
    data: Tensor
    scales: Tensor

    @classmethod
    def empty(
        cls, mode: Quantize, shape: tuple[int, int], device: torch.device
    ) -> "QuantizedWeight":
        """One that is to be filled."""
        elements = shape[0] * shape[1]
        if mode == "int8":
            data = torch.empty(shape, dtype=torch.int8, device=device)
            return cls(mode, shape, data, torch.empty(shape[0], device=device))
        load_library()
        data = torch.empty(elements // 2, dtype=torch.uint8, device=device)
        return cls(mode, shape, data, torch.empty(elements // NF4_BLOCK, device=device))

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Where data and scales of rows ``first:last`` are; for nf4 they begin with a block."""
        if self.mode == "int8":
            return self.data[first:last], self.scales[first:last]
        begin, end = first * self.shape[1], last * self.shape[1]
        scales = self.scales[begin // NF4_BLOCK : end // NF4_BLOCK]
        return self.data[begin // 2 : end // 2], scales

    def put(self, first: int, rows: Tensor) -> None:
        """Quantize ``rows`` and keep them from row ``first`` on."""
        quantize = quantize_int8 if self.mode == "int8" else quantize_nf4
        for place, made in zip(self.rows(first, first + len(rows)), quantize(rows), strict=True):
            place.copy_(made)


@dataclass(frozen=True, slots=True)
class QuantizedKernels:
    """Which fast products of quantized weights work on a device, for one type of rows."""

    int8: bool
    nf4: bool

    @classmethod
    def probe(cls, mode: Quantize, dtype: torch.dtype, device: torch.device) -> "QuantizedKernels":
        """Try those that ``mode`` would use."""
        if mode == "none":
            return cls(False, False)
        if device.type == "cuda":
            load_library()
            return cls(True, True)
        return cls(
            int8=mode == "int8" and has_onednn_int8(),
            nf4=mode == "nf4" and dtype is torch.bfloat16 and has_nf4_kernel(),
        )

    def create(self, weight: QuantizedWeight, bias: Tensor | None) -> Projection:
        """The fastest projection of ``weight``, which isn't to be used otherwise afterwards."""
        on_gpu = weight.data.device.type == "cuda"
        if weight.mode == "int8" and self.int8 and weight.shape[1] <= MAX_WIDTH:
            if not on_gpu:
                return Int8Linear(OneDnnProduct.of(weight.data, weight.scales), bias)
            if CudaProduct.fits(weight.shape):
                return Int8Linear(CudaProduct.of(weight.data, weight.scales), bias)
        if weight.mode == "nf4" and self.nf4:
            if on_gpu and weight.shape[1] % NF4_BLOCK == 0:
                packed = weight.data.view(-1, 1)
                return CudaNf4Linear(packed, weight.scales, weight.shape, bias)
            if not on_gpu and fits_kernel(weight.shape):
                return PackedNf4Linear.of(weight.data, weight.scales, weight.shape, bias)
        return UnpackedLinear(weight.mode, weight.data, weight.scales, weight.shape, bias)
