"""Compares a GPU's mixtures of experts with float64 on the CPU."""

import logging
import math
from functools import cache

import torch
from torch import Tensor

from molink.gguf.block_formats import BlockFormat
from molink.stage.gpu_kernels.block_planes import BlockPlanes, PlaneLayout
from molink.stage.gpu_kernels.expert_product import (
    add_experts,
    choose_experts,
    multiply_experts,
    sort_by_expert,
)
from molink.stage.linear.base import PRODUCT_TOLERANCES
from molink.stage.linear.planes_check import dequantize_codes, draw_codes
from molink.stage.torch_dtypes import DTYPE_NAMES

log = logging.getLogger(__name__)

#: Experts of products, those of a row, and their outputs, which end within a tile.
_EXPERTS, _TOP_K, _OUTPUTS = 5, 2, 80
#: Rows, for each size of a tile.
_ROWS = (1, 12, 40, 100)
_ROUTED_ROWS = 33
#: Steps from one logit to the next integer, so that bf16 holds them.
_LOGIT_STEPS = 16
_ROUTING_TOLERANCE = 1e-5


@cache
@torch.inference_mode()
def check_experts(
    form: BlockFormat | None,
    columns: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether experts with weights of ``columns`` are right on a device.

    ``form`` is that of planes, ``None`` for weights of ``dtype``.
    """
    try:
        right = routing_error(num_experts, top_k, dtype, device) <= _ROUTING_TOLERANCE
        error = experts_error(form, columns, dtype, device) if right else math.inf
    except Exception as failure:  # compilers and kernels may raise anything
        log.warning("experts are multiplied one by one on %s: %s", device, failure)
        return False
    if error <= PRODUCT_TOLERANCES[DTYPE_NAMES[dtype]]:
        return True
    log.warning("experts are multiplied one by one on %s: off by %.2g", device, error)
    return False


def experts_error(
    form: BlockFormat | None, columns: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Largest error of experts' products and sums, relative to the largest; NaN if any is."""
    generator = torch.Generator().manual_seed(0)
    every = 1 if form is None else form.shared_rows
    outputs = -(-_OUTPUTS // every) * every
    stacked = _EXPERTS * outputs, columns
    weight: Tensor | BlockPlanes
    if form is None:
        plain = torch.randn(stacked, generator=generator).to(dtype)
        weight, values = plain.to(device), plain.double()
    else:
        part = draw_codes(form, stacked, generator)
        weight = BlockPlanes.pack_blocks(PlaneLayout(form, stacked), [part], device)
        values = dequantize_codes(form, part)
    # Results are about as large as weights, at any width: they must fit float16.
    bias = torch.randn(stacked[0], generator=generator).mul(float(values.std())).to(dtype)
    errors = []
    for count in _ROWS:
        rows = torch.randn(count, columns, generator=generator).mul(columns**-0.5).to(dtype)
        # The last expert has no row.
        logits = torch.randn(count, _EXPERTS, generator=generator)
        logits[:, -1] = -torch.inf
        weights, experts = choose_experts(logits.to(device, dtype), _TOP_K, True)
        tiles = sort_by_expert(experts, _EXPERTS, rows.to(device))
        found = multiply_experts(weight, rows.to(device), bias.to(device), tiles, _EXPERTS, _TOP_K)
        summed = add_experts(found, weights, None)
        of_pair = experts.flatten().long().cpu()
        exact = torch.stack(
            [
                values.view(_EXPERTS, outputs, columns)[expert] @ row
                + bias.double().view(_EXPERTS, outputs)[expert]
                for expert, row in zip(
                    of_pair.tolist(), rows.double().repeat_interleave(_TOP_K, 0), strict=True
                )
            ]
        )
        weighted = exact.view(count, _TOP_K, outputs) * weights.double().cpu()[:, :, None]
        for one, other in ((found, exact), (summed, weighted.sum(1))):
            errors.append((one.double().cpu() - other).abs().max() / other.abs().max())
    return float(torch.stack(errors).max())


def routing_error(num_experts: int, top_k: int, dtype: torch.dtype, device: torch.device) -> float:
    """Largest error of a weight; infinite if other experts are chosen, or are sorted wrongly."""
    generator = torch.Generator().manual_seed(0)
    # Logits are equal, and chosen in order, or so far apart that no rounding changes the choice.
    drawn = torch.randn(_ROUTED_ROWS, num_experts, generator=generator)
    logits = drawn.mul_(_LOGIT_STEPS).round_().div_(_LOGIT_STEPS).to(dtype)
    odds, order = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    exact, wanted = odds[:, :top_k], order[:, :top_k]
    worst = 0.0
    for renormalize in (False, True):
        weights, experts = choose_experts(logits.to(device), top_k, renormalize)
        if not torch.equal(experts.long().cpu(), wanted):
            return math.inf
        sums = exact.sum(-1, keepdim=True) if renormalize else 1
        worst = max(worst, float((weights.double().cpu() - exact / sums).abs().max()))
        # Few and many pairs are sorted in different ways.
        for count in (1, _ROUTED_ROWS):
            if not _is_sorted(experts[:count], num_experts, logits[:count].to(device)):
                return math.inf
    return worst


def _is_sorted(experts: Tensor, num_experts: int, rows: Tensor) -> bool:
    tiles, flat = sort_by_expert(experts, num_experts, rows), experts.flatten().cpu()
    counts = flat.bincount(minlength=num_experts)
    cut = [
        (expert, begin, min(begin + tiles.shape[0], last))
        for expert, (count, last) in enumerate(
            zip(counts.tolist(), counts.cumsum(0).tolist(), strict=True)
        )
        for begin in range(last - count, last, tiles.shape[0])
    ]
    found = [(one[0], one[1], one[2]) for one in tiles.tiles.T.tolist() if one[0] >= 0]
    return found == cut and torch.equal(tiles.order.long().cpu(), flat.argsort(stable=True))
