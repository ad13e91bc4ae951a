"""Launches of mixtures of experts, in shapes of real models."""

from functools import partial
from unittest import mock

import torch

from molink.checkpoint.experts import Routing
from molink.gguf.block_formats import BLOCK_FORMATS, E2M1_VALUES, BlockFormat
from molink.stage.gpu_kernels import block_product
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout
from molink.stage.gpu_kernels.expert_product import (
    add_experts,
    choose_experts,
    multiply_experts,
    sort_by_expert,
)

_CPU = torch.device("cpu")
#: gpt-oss's experts, whose rows are 45 chunks.
_MXFP4 = BlockFormat(
    4, 0, 32, 2880,
    has_nested_scales=True, number_dtype="f32", codebook=E2M1_VALUES, step_kind="e8m0",
)  # fmt: skip
#: Experts, those of a row, rows and their type.
_SHAPES = (
    (128, 8, 1, torch.bfloat16),
    (32, 4, 64, torch.bfloat16),
    (8, 2, 64, torch.float16),
    (8, 2, 512, torch.bfloat16),
    (8, 2, 512, torch.float32),
)
#: Of Qwen 3, gpt-oss and DeepSeek V3.
_ROUTINGS = (
    Routing(num_experts=128, top_k=8, renormalize=True),
    Routing(num_experts=32, top_k=4, renormalize=True),
    Routing(
        num_experts=256,
        top_k=8,
        renormalize=True,
        scoring="sigmoid",
        is_corrected=True,
        groups=8,
        top_groups=4,
        scale=2.5,
    ),
)


def _multiply(
    form: BlockFormat | None, width: int, experts: int, top_k: int, rows: int, dtype: torch.dtype
) -> None:
    shape = experts * 1536, width
    weight = (
        torch.empty(shape, dtype=dtype)
        if form is None
        else BlockPlanes.create_empty(PlaneLayout(form, shape), _CPU)
    )
    given = torch.empty(rows, width, dtype=dtype)
    tiles = sort_by_expert(torch.empty(rows, top_k, dtype=torch.int32), experts, given)
    multiply_experts(weight, given, None, tiles, experts, top_k)


def _multiply_plainly(form: BlockFormat | None, rows: int) -> None:
    """As on cards without tensor cores that Triton uses."""
    with mock.patch.object(block_product, "has_tensor_products", return_value=False):
        _multiply(form, 2048, 8, 2, rows, torch.float16)


def _route(routing: Routing, dtype: torch.dtype, bounded: bool) -> None:
    correction = torch.empty(routing.num_experts) if routing.is_corrected else None
    kind = torch.float32 if routing.is_corrected else dtype
    logits = torch.empty(3, routing.num_experts, dtype=kind)
    weights, _ = choose_experts(logits, routing, correction)
    products = torch.empty(3 * routing.top_k, 2048, dtype=dtype)
    add_experts(products, weights, torch.empty(len(products), 1) if bounded else None)


LAUNCHES = [
    *(partial(_multiply, None, 2048, *shape) for shape in _SHAPES),
    *(partial(_multiply_plainly, None, rows) for rows in (1, 16, 64)),
    partial(_multiply_plainly, BLOCK_FORMATS["q4_k"], 1),
    *(partial(_multiply, _MXFP4, 2880, *shape) for shape in _SHAPES[:2]),
    partial(_multiply, BLOCK_FORMATS["q4_k"], 2048, *_SHAPES[0]),
    partial(_multiply, BLOCK_FORMATS["q6_k"], 2048, *_SHAPES[2]),
    partial(_multiply, BLOCK_FORMATS["q8_0"], 2048, *_SHAPES[3]),
    partial(_route, _ROUTINGS[0], torch.bfloat16, False),
    partial(_route, _ROUTINGS[1], torch.float16, True),
    partial(_route, _ROUTINGS[2], torch.bfloat16, False),
]
