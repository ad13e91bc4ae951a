"""Launches of products with low-bit weights, in shapes of real models' projections."""

from functools import partial
from unittest import mock

import torch

from molink.gguf.block_formats import BLOCK_FORMATS, E2M1_VALUES, BlockFormat
from molink.stage.gpu_kernels import block_product
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout
from molink.stage.gpu_kernels.block_product import dequantize_rows, multiply_fused
from molink.stage.linear.quantized import quantized_format

_CPU = torch.device("cpu")
#: Formats with rows of one way of the kernel, and a type. They cover all code sizes and numbers
#: together with the dequantized ones, which compile faster.
_CASES = (
    (BLOCK_FORMATS["q4_k"], 1, torch.bfloat16),
    (BLOCK_FORMATS["q5_k"], 1, torch.float16),
    (BLOCK_FORMATS["q5_k"], 64, torch.bfloat16),
    (BLOCK_FORMATS["q6_k"], 16, torch.bfloat16),
    (BLOCK_FORMATS["q8_0"], 64, torch.float16),
    (BLOCK_FORMATS["q8_0"], 16, torch.float32),
    (quantized_format("nf4", 4096, on_gpu=True), 16, torch.float16),
)
#: NVFP4 and MXFP4.
_FLOATS4 = [
    BlockFormat(
        4, 0, group, 4096,
        has_nested_scales=True, number_dtype="f32", codebook=E2M1_VALUES, step_kind=kind,
    )
    for group, kind in ((16, "e4m3"), (32, "e8m0"))
]  # fmt: skip


def _multiply(form: BlockFormat, rows: int, dtype: torch.dtype) -> None:
    planes = BlockPlanes.create_empty(PlaneLayout(form, (1024, 4096)), _CPU)
    multiply_fused(planes, torch.empty(rows, 4096, dtype=dtype), None, splits=2)


def _multiply_plainly(form: BlockFormat, rows: int, dtype: torch.dtype) -> None:
    """As on cards without tensor cores that Triton uses."""
    with mock.patch.object(block_product, "has_tensor_products", return_value=False):
        _multiply(form, rows, dtype)


def _dequantize(form: BlockFormat, tokens: torch.Tensor | None = None) -> None:
    planes = BlockPlanes.create_empty(PlaneLayout(form, (1024, 4096)), _CPU)
    dequantize_rows(planes, 0, 3, torch.float16, tokens)


LAUNCHES = [
    *(partial(_multiply, *case) for case in _CASES),
    *(partial(_multiply_plainly, BLOCK_FORMATS["q4_k"], rows, torch.float16) for rows in (1, 16)),
    partial(_dequantize, BlockFormat(8, 0, 64, 64, number_dtype="bf16")),
    partial(_dequantize, quantized_format("int8", 4096, on_gpu=True)),
    *(partial(_dequantize, form) for form in _FLOATS4),
    partial(
        _dequantize,
        BlockFormat(8, 0, 128, 128, number_dtype="f32", is_float=True, shared_rows=128),
    ),
    partial(_dequantize, BlockFormat(4, 8, 128, 128, has_shifts=True), torch.arange(3)),
]
