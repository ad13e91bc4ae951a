"""Compares experts on a GPU with float64 on the CPU."""

import logging
import math
from functools import cache

import torch
from torch import Tensor

from molink.checkpoint.experts import Routing
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

#: Experts, experts per row, and outputs, which don't fill their last tile.
_EXPERTS, _TOP_K, _OUTPUTS = 5, 2, 80
_USUAL_ROUTING = Routing(num_experts=_EXPERTS, top_k=_TOP_K, renormalize=True)
#: Numbers of rows, one for each tile size.
_ROWS = (1, 12, 40, 100)
_ROUTED_ROWS = 33
#: Steps per integer between logits, few enough for bf16.
_LOGIT_STEPS = 16
_ROUTING_TOLERANCE = 1e-5


@cache
@torch.inference_mode()
def check_experts(
    form: BlockFormat | None,
    columns: int,
    routing: Routing,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Check that experts with weights of ``columns`` columns are correct on a device.

    ``form`` is the format of bit planes, ``None`` for weights of ``dtype``.
    """
    try:
        right = routing_error(routing, dtype, device) <= _ROUTING_TOLERANCE
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
    """Return the largest error relative to the largest product or sum; NaN if any is NaN."""
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
    # Scale rows so that results are about as large as weights at any width, and fit float16.
    bias = torch.randn(stacked[0], generator=generator).mul(float(values.std())).to(dtype)
    errors = []
    for count in _ROWS:
        rows = torch.randn(count, columns, generator=generator).mul(columns**-0.5).to(dtype)
        # The last expert gets no row.
        logits = torch.randn(count, _EXPERTS, generator=generator)
        logits[:, -1] = -torch.inf
        weights, experts = choose_experts(logits.to(device, dtype), _USUAL_ROUTING, None)
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


def routing_error(routing: Routing, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest error of a weight; infinite if experts are chosen or sorted wrongly."""
    generator, num_experts = torch.Generator().manual_seed(0), routing.num_experts
    # Scores are either equal, and chosen in order, or too far apart for rounding to change the
    # choice.
    drawn = torch.randn(_ROUTED_ROWS, num_experts, generator=generator)
    logits = drawn.mul_(_LOGIT_STEPS).round_().div_(_LOGIT_STEPS).to(dtype)
    correction = None
    if routing.is_corrected:
        correction = torch.randint(3, (num_experts,), generator=generator).mul_(2).float()
    exact, wanted = _choose_exactly(logits.double(), routing, correction)
    moved = None if correction is None else correction.to(device)
    weights, experts = choose_experts(logits.to(device), routing, moved)
    if not torch.equal(experts.long().cpu(), wanted):
        return math.inf
    # Few and many pairs are sorted by different code.
    for count in (1, _ROUTED_ROWS):
        if not _is_sorted(experts[:count], num_experts, logits[:count].to(device)):
            return math.inf
    return float((weights.double().cpu() - exact).abs().max())


def _choose_exactly(
    logits: Tensor, routing: Routing, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose as :func:`.choose_experts`, in float64; equal scores keep the order of experts."""

    def rank(values: Tensor) -> Tensor:
        return values.sort(dim=-1, descending=True, stable=True).indices

    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
    rated = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = rated.view(len(rated), routing.groups, -1)
        sums = grouped.sort(dim=-1, descending=True).values[..., : routing.group_voters].sum(-1)
        left_out = rank(sums)[:, routing.top_groups :]
        group = torch.arange(len(rated[0])) // grouped.shape[-1]
        rated = rated.masked_fill((group == left_out.unsqueeze(-1)).any(1), -math.inf)
    experts = rank(rated)[:, : routing.top_k]
    weights = scores.gather(-1, experts)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routing.scale, experts


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
