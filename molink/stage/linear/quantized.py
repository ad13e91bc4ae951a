"""Quantized weights that are filled part by part, and the fastest projection for them.

Only one part at a time exists in full precision.
"""

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from molink.checkpoint.quantized_size import NF4_BLOCK, can_hold
from molink.facts.kernels import INTEGER_KERNELS
from molink.facts.model import Quantize
from molink.gguf.block_formats import BlockFormat, find_group
from molink.stage.cpu_kernels.repack import BlockCodes, rows_per_repack
from molink.stage.linear.base import Projection, make_random_weight
from molink.stage.linear.create import ProjectionFactory
from molink.stage.linear.int8 import (
    MAX_INT8_WIDTH,
    CudaProduct,
    Int8Linear,
    OneDnnProduct,
    has_onednn_int8,
    quantize_int8,
)
from molink.stage.linear.nf4 import (
    NF4_FORMAT,
    NF4_VALUES,
    CudaNf4Linear,
    PackedNf4Linear,
    has_nf4_kernel,
    load_library,
    quantize_nf4,
    supports_shape,
)
from molink.stage.linear.timing import COLUMNS, DEPTH, TRIED, is_slower
from molink.stage.linear.unpacked import UnpackedLinear, rows_per_unpack

log = logging.getLogger(__name__)

#: Tolerance relative to the largest result, for bf16's rounding and the errors of sums.
TOLERANCE = 0.015
#: Number of output rows compared at each place, and approximate number of places.
_COMPARED, _PARTS = 64, 4


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight ``shape`` (``[out, in]``) in int8 or nf4.

    ``data`` is int8 ``[out, in]`` or uint8 ``[out * in / 2]``; ``scales`` are float32, per row or
    per block of 64. nf4 weights are whole blocks.
    """

    mode: Quantize
    shape: tuple[int, int]
    data: Tensor
    scales: Tensor

    @classmethod
    def create_empty(
        cls, mode: Quantize, shape: tuple[int, int], device: torch.device
    ) -> "QuantizedWeight":
        """Create an empty weight to fill."""
        elements = shape[0] * shape[1]
        if mode == "int8":
            data = torch.empty(shape, dtype=torch.int8, device=device)
            return cls(mode, shape, data, torch.empty(shape[0], device=device))
        load_library()
        data = torch.empty(elements // 2, dtype=torch.uint8, device=device)
        return cls(mode, shape, data, torch.empty(elements // NF4_BLOCK, device=device))

    def row_slices(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Views of data and scales of rows ``first:last``; in nf4 they begin at a block."""
        if self.mode == "int8":
            return self.data[first:last], self.scales[first:last]
        begin, end = first * self.shape[1], last * self.shape[1]
        scales = self.scales[begin // NF4_BLOCK : end // NF4_BLOCK]
        return self.data[begin // 2 : end // 2], scales

    def quantize_rows(self, first: int, rows: Tensor) -> None:
        """Quantize ``rows`` and store them from row ``first`` on."""
        quantize = quantize_int8 if self.mode == "int8" else quantize_nf4
        for target, made in zip(
            self.row_slices(first, first + len(rows)), quantize(rows), strict=True
        ):
            target.copy_(made)

    def read_blocks(self, group: int) -> Iterator[BlockCodes]:
        """Read the weight in the groups of :func:`quantized_format`, in slices of rows."""
        step = rows_per_repack(self.shape[1])
        for first in range(0, self.shape[0], step):
            data, scales = self.row_slices(first, min(first + step, self.shape[0]))
            if self.mode == "int8":
                codes, scales = data.view(torch.uint8), scales / 127
            else:
                codes = torch.stack((data >> 4, data & 15), -1)
            blocks = codes.view(-1, self.shape[1] // group, group)
            yield BlockCodes(blocks, (scales.view(len(blocks), -1).expand(blocks.shape[:2]),))


def quantized_format(mode: Quantize, width: int, *, on_gpu: bool) -> BlockFormat:
    """Return the format in which a device multiplies by weights ``[out, width]`` in place.

    On a CPU an int8 row consists of groups, which repeat its scale.
    """
    if mode == "int8":
        group = width if on_gpu else find_group(width) or width
        return BlockFormat(8, 0, group, group, number_dtype="f32")
    return NF4_FORMAT


@dataclass(frozen=True, slots=True)
class QuantizedProjectionFactory:
    """Creates projections of quantized weights for one device and row type.

    ``blocks`` multiplies in place. ``int8`` and ``nf4`` say whether fast products of libraries work
    on the device. Other weights are dequantized on each call.
    """

    int8: bool
    nf4: bool
    blocks: ProjectionFactory | None = None

    @classmethod
    def probe_device(
        cls,
        mode: Quantize,
        dtype: torch.dtype,
        device: torch.device,
        disabled_kernels: Collection[str] = (),
        blocks: ProjectionFactory | None = None,
    ) -> "QuantizedProjectionFactory":
        """Try the kernels of ``mode``; ``blocks`` are those of the device."""
        if device.type == "cpu" and "quantized-blocks" in disabled_kernels:
            blocks = None
        if mode == "none" or mode in disabled_kernels:
            return cls(False, False, blocks)
        if device.type == "cuda":
            load_library()
            right = _is_correct(mode, dtype, device)
            return cls(mode == "int8" and right, mode == "nf4" and right, blocks)
        return cls(
            int8=mode == "int8" and has_onednn_int8(),
            nf4=mode == "nf4" and dtype is torch.bfloat16 and has_nf4_kernel(),
            blocks=blocks,
        )

    def find_format(self, mode: Quantize, shape: tuple[int, int]) -> BlockFormat | None:
        """Return the format in which a weight ``[out, in]`` is multiplied in place, if it is."""
        if self.blocks is None:
            return None
        form = quantized_format(mode, shape[1], on_gpu=self.blocks.planes_device is not None)
        return form if self.blocks.keeps_format(form, shape) else None

    def create_projection(self, weight: QuantizedWeight, bias: Tensor | None) -> Projection:
        """Create the fastest projection, which takes ownership of ``weight``."""
        on_gpu = weight.data.device.type == "cuda"
        form = self.find_format(weight.mode, weight.shape)
        if form is not None and self.blocks is not None:
            return self.blocks.create_quantized(
                form, weight.shape, weight.read_blocks(form.group), bias
            )
        if weight.mode == "int8" and self.int8 and weight.shape[1] <= MAX_INT8_WIDTH:
            if not on_gpu:
                return Int8Linear(OneDnnProduct.from_weight(weight.data, weight.scales), bias)
            if CudaProduct.supports_shape(weight.shape):
                return Int8Linear(CudaProduct.from_weight(weight.data, weight.scales), bias)
        if weight.mode == "nf4" and self.nf4:
            if on_gpu and weight.shape[1] % NF4_BLOCK == 0:
                packed = weight.data.view(-1, 1)
                return CudaNf4Linear(packed, weight.scales, weight.shape, bias)
            if not on_gpu and supports_shape(weight.shape):
                return PackedNf4Linear.from_quantized(
                    weight.data, weight.scales, weight.shape, bias
                )
        return UnpackedLinear(weight.mode, weight.data, weight.scales, weight.shape, bias)


@cache
@torch.inference_mode()
def has_slow_blocks(dtype: torch.dtype, mode: Quantize) -> bool:
    """Time a CPU's in-place products of full-precision rows; return whether others are faster."""
    cpu = torch.device("cpu")
    usual = QuantizedProjectionFactory.probe_device(mode, dtype, cpu)
    in_place = replace(usual, blocks=ProjectionFactory.probe_device(dtype, cpu, INTEGER_KERNELS))
    if in_place.find_format(mode, (COLUMNS, DEPTH)) is None:
        return True
    weight = QuantizedWeight.create_empty(mode, (COLUMNS, DEPTH), cpu)
    weight.quantize_rows(0, torch.ones(COLUMNS, DEPTH))
    sides = [
        [
            maker.create_projection(replace(weight, data=weight.data.clone()), None)
            for _ in range(TRIED)
        ]
        for maker in (in_place, usual)
    ]
    return is_slower(sides, dtype)


def relative_error(
    factory: QuantizedProjectionFactory,
    mode: Quantize,
    dtype: torch.dtype,
    device: torch.device,
    shapes: Sequence[tuple[int, int]] = ((96, 256),),
) -> float:
    """Return the largest error with random weights, relative to the largest result.

    NaN if a product contains NaN. The reference is torch in float64 on the CPU, for some outputs of
    weights ``[out, in]``.
    """
    held = [shape for shape in shapes if can_hold(mode, [shape])]
    errors = [_shape_error(factory, mode, dtype, device, shape) for shape in held]
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)


def _shape_error(
    factory: QuantizedProjectionFactory,
    mode: Quantize,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int],
) -> float:
    generator = torch.Generator().manual_seed(0)
    weight = QuantizedWeight.create_empty(mode, shape, device)
    random = make_random_weight(*shape, generator)
    step = rows_per_unpack(shape[1])
    for first in range(0, shape[0], step):
        weight.quantize_rows(first, random[first : first + step].to(device))
    some, stored = _sample_rows(weight)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    rows = torch.randn(21, shape[1], generator=generator).to(dtype)
    projection = factory.create_projection(weight, bias.to(device))
    exact = rows.double() @ stored.t() + bias[some].double()
    found = torch.cat([projection(rows[:count].to(device)).cpu()[:, some] for count in (1, 5, 21)])
    whole = torch.cat([exact[:count] for count in (1, 5, 21)])
    return float((found.double() - whole).abs().max() / whole.abs().max())


def _sample_rows(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Choose some rows of a weight; return them and their float64 values."""
    indices, parts = [], []
    for first in range(0, weight.shape[0], _sample_stride(weight.shape[0])):
        last = min(weight.shape[0], first + _COMPARED)
        data, scales = (part.cpu() for part in weight.row_slices(first, last))
        if weight.mode == "int8":
            parts.append(data.double() * scales.double()[:, None] / 127)
        else:
            codes = torch.stack((data >> 4, data & 15), -1).view(-1, NF4_BLOCK).long()
            values = torch.tensor(NF4_VALUES, dtype=torch.float64)[codes]
            parts.append((values * scales.double()[:, None]).view(-1, weight.shape[1]))
        indices.append(torch.arange(first, last))
    return torch.cat(indices), torch.cat(parts)


def _sample_stride(out: int) -> int:
    """Return the distance between compared rows, aligned to nf4 blocks."""
    return -(-max(out // _PARTS, _COMPARED) // NF4_BLOCK) * NF4_BLOCK


@torch.inference_mode()
def _is_correct(mode: Quantize, dtype: torch.dtype, device: torch.device) -> bool:
    """Check a GPU's fast product."""
    try:
        error = relative_error(QuantizedProjectionFactory(True, True), mode, dtype, device)
    except Exception as error_of_kernel:  # kernels may raise anything
        log.warning("no fast %s products: %s", mode, error_of_kernel)
        return False
    # NaN also fails.
    if not error <= TOLERANCE:
        log.warning("no fast %s products: results are off by %g", mode, error)
        return False
    return True
