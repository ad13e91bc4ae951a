"""Launches of products with low-bit weights, in shapes of real models' projections."""

from functools import partial

import torch

from molink.gguf.block_formats import BLOCK_FORMATS, BlockFormat
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout
from molink.stage.gpu_kernels.block_product import dequantize_rows, multiply_fused

_CPU = torch.device("cpu")
#: Formats with rows of one way of the kernel, and a type. They cover all code sizes and numbers
#: together with the dequantized ones, which compile faster.
_CASES = (
    (BLOCK_FORMATS["q5_k"], 1, torch.float16),
    (BLOCK_FORMATS["q6_k"], 16, torch.bfloat16),
)


def _multiply(form: BlockFormat, rows: int, dtype: torch.dtype) -> None:
    planes = BlockPlanes.create_empty(PlaneLayout(form, (1024, 4096)), _CPU)
    multiply_fused(planes, torch.empty(rows, 4096, dtype=dtype), None, splits=2)


def _dequantize(form: BlockFormat, tokens: torch.Tensor | None = None) -> None:
    planes = BlockPlanes.create_empty(PlaneLayout(form, (1024, 4096)), _CPU)
    dequantize_rows(planes, 0, 3, torch.float16, tokens)


LAUNCHES = [
    *(partial(_multiply, *case) for case in _CASES),
    partial(_dequantize, BlockFormat(8, 0, 64, 64, number_dtype="bf16")),
    partial(_dequantize, BlockFormat(4, 8, 128, 128, has_shifts=True), torch.arange(3)),
]
