"""Compares a GPU's products of low-bit weights with dequantized ones in float64 on the CPU."""

import logging
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, unflatten

from molink.gguf.block_formats import BlockFormat
from molink.stage.cpu_kernels.repack import BlockCodes
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout
from molink.stage.gpu_kernels.block_product import (
    dequantize_rows,
    find_planes_problem,
    multiply_dequantized,
    multiply_fused,
)
from molink.stage.linear.base import PRODUCT_TOLERANCES
from molink.stage.torch_dtypes import DTYPE_NAMES, TORCH_DTYPES

log = logging.getLogger(__name__)

#: Number of outputs, which don't fill their last tile.
_OUTPUTS = 80
#: Numbers of rows, for each variant of the kernel and with partly filled tiles, and splits of the
#: columns.
_ROWS, _SPLITS = (1, 5, 33), (1, 2)


def check_all_planes(
    planes: Iterable[tuple[BlockFormat, int]], dtype: torch.dtype, device: torch.device
) -> bool:
    """Check that weights of these formats and columns can stay low-bit on a GPU."""
    return not find_planes_problem(device) and all(
        check_planes(form, columns, dtype, device) for form, columns in planes
    )


@cache
@torch.inference_mode()
def check_planes(form: BlockFormat, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Check products of rows of ``dtype`` with weights of ``columns`` columns on a device."""
    try:
        error = planes_error(form, columns, dtype, device)
    except Exception as failure:  # compilers and kernels may raise anything
        log.warning("no packed weights of %d bits on %s: %s", form.bits, device, failure)
        return False
    if error <= PRODUCT_TOLERANCES[DTYPE_NAMES[dtype]]:
        return True
    log.warning("no packed weights of %d bits on %s: off by %.2g", form.bits, device, error)
    return False


def planes_error(
    form: BlockFormat, columns: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the largest error of a weight in bit planes, relative to the largest result.

    Compares products by both variants of the kernel, and looked-up rows. NaN if any result is NaN.
    The weight has ``columns`` columns.
    """
    generator = torch.Generator().manual_seed(0)
    outputs = -(-_OUTPUTS // form.shared_rows) * form.shared_rows
    part = draw_codes(form, (outputs, columns), generator)
    planes = BlockPlanes.pack_blocks(PlaneLayout(form, (outputs, columns)), [part], device)
    weight, errors = dequantize_codes(form, part), []

    def compare(found: Tensor, exact: Tensor) -> None:
        errors.append((found.double().cpu() - exact).abs().max() / exact.abs().max())

    # Scale rows so that results are about as large as weights at any width, and fit float16.
    size, shrink = float(weight.std()), columns**-0.5
    bias = torch.randn(outputs, generator=generator).mul(size).to(dtype)
    for count in _ROWS:
        rows = torch.randn(count, columns, generator=generator).mul(shrink).to(dtype)
        exact, given = rows.double() @ weight.t() + bias.double(), rows.to(device)
        for splits in _SPLITS:
            compare(multiply_fused(planes, given, bias.to(device), splits), exact)
        compare(multiply_dequantized(planes, given, bias.to(device)), exact)
    tokens = torch.arange(outputs).flip(0)
    found = dequantize_rows(planes, 0, outputs, dtype, tokens.to(device))
    compare(found, weight[tokens])
    return float(torch.stack(errors).max())


def draw_codes(form: BlockFormat, shape: tuple[int, int], generator: torch.Generator) -> BlockCodes:
    """Draw random codes and numbers of a weight of ``shape`` ``[out, in]``."""
    rows, blocks = shape[0], shape[1] // form.block

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (rows, blocks, size), generator=generator)

    number = TORCH_DTYPES[form.number_dtype]
    halves = [
        torch.rand(rows // form.shared_rows, blocks, generator=generator)
        .add(0.5)
        .mul(sign)
        .to(number)
        .repeat_interleave(form.shared_rows, 0)
        for sign in (1, -4)[: 1 + form.has_minimum]
    ]
    if form.has_shifts:
        halves.append(integers(-7, 8, 1).squeeze(2).to(number))
    # Integers, positive floats, or powers of two from 2**-7 on.
    least, most = (120, 128) if form.step_kind == "e8m0" else (0, 64)
    steps = integers(least, most, form.groups_per_block).to(torch.uint8)
    whole = [steps] * form.has_nested_scales
    codes = integers(0, 1 << form.bits, form.block).to(torch.uint8)
    if form.is_float:
        codes[(codes & 127) == 127] = 0  # NaN
    return BlockCodes(codes, tuple(halves), tuple(whole * (1 + form.has_minimum)))


def dequantize_codes(form: BlockFormat, part: BlockCodes) -> Tensor:
    """Dequantize to a float64 weight ``[out, in]``."""
    eight = torch.float8_e4m3fn if form.is_float else torch.int8
    codes = (part.codes.view(eight) if form.bits == 8 else part.codes).double() - form.offset
    if form.codebook:
        codes = torch.tensor(form.codebook, dtype=torch.float64)[codes.long()]
    values = unflatten(codes, 2, (form.groups_per_block, form.group))
    numbers = [each.double()[:, :, None, None] for each in part.halves]
    if form.has_nested_scales:
        steps = [_decode_steps(form, each).unsqueeze(3) for each in part.whole]
        numbers = [one * each for one, each in zip(numbers, steps, strict=True)]
    if form.has_shifts:
        values += numbers[1]
    values *= numbers[0]
    return (values + numbers[1] if form.has_minimum else values).flatten(1)


def _decode_steps(form: BlockFormat, steps: Tensor) -> Tensor:
    if form.step_kind == "e8m0":
        return (steps.double() - 127).exp2()
    if form.step_kind == "e4m3":
        return steps.view(torch.float8_e4m3fn).double()
    return steps.view(torch.uint8 if form.has_minimum else torch.int8).double()
