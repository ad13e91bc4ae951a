"""Launches the kernels of :mod:`.expert_kernels` without waiting for the device.

Shapes depend only on the number of rows, so a CUDA graph can capture them. Each sum has a fixed
order, and a row's result doesn't depend on other rows, up to rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from molink.checkpoint.experts import Routing
from molink.stage.gpu_kernels.block_planes import BlockPlanes
from molink.stage.gpu_kernels.block_product import (
    PRODUCT_STAGES,
    choose_chunks,
    choose_tile,
    scales_sums,
)

#: Number of (expert, pair) comparisons at once of a single program, its minimum pairs, and pairs at
#: once of one of many programs.
_COMPARED, _MIN_COMPARED_PAIRS = 1 << 12, 16
_COMPARED_PAIRS = 1 << 10
#: Columns per program of the sum.
_ADDED = 1024


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs of rows and experts, sorted by expert.

    ``order`` (int32 ``[pairs]``) lists the pairs. ``tiles`` (int32 ``[3, bound]``) has for each
    tile its expert (-1: no tile) and the begin and end of its pairs in ``order``. ``shape`` is a
    tile's maximum pairs, its outputs, its warps and the columns of a step.
    """

    order: Tensor
    tiles: Tensor
    shape: tuple[int, int, int, int]


def choose_experts(
    logits: Tensor, routing: Routing, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose experts of rows by ``logits [T, experts]``; a ``correction`` is float32 ``[experts]``.

    Returns weights (float32) and experts (int32), both ``[T, top_k]``, best first. A row's weights
    are NaN if its logits are (with ``softmax``, if any of them is); its experts are valid even
    then.
    """
    import triton

    from molink.stage.gpu_kernels.expert_kernels import choose_kernel

    count, num_experts = logits.shape
    weights = logits.new_empty(count, routing.top_k, dtype=torch.float32)
    experts = logits.new_empty(count, routing.top_k, dtype=torch.int32)
    if count:
        choose_kernel[(count,)](
            logits,
            weights if correction is None else correction,
            weights,
            experts,
            num_experts,
            routing.top_k,
            routing.top_groups,
            int(routing.renormalize),
            routing.min_sum,
            routing.scale,
            logits.stride(0),
            EXPERTS=triton.next_power_of_2(num_experts),
            GROUPS=routing.groups,
            SLOTS=triton.next_power_of_2(routing.groups),
            VOTERS=routing.group_voters,
            IS_SIGMOID=routing.scoring == "sigmoid",
            IS_CORRECTED=correction is not None,
            num_warps=1,
        )
    return weights, experts


def sort_by_expert(experts: Tensor, num_experts: int, rows: Tensor) -> ExpertTiles:
    """Sort the pairs of ``experts [T, top_k]`` into tiles for ``rows [T, …]``."""
    import triton

    from molink.stage.gpu_kernels.expert_kernels import sort_kernel, sort_many_kernel

    pairs = experts.numel()
    # Twice an expert's average number of rows, but at most all rows.
    shape = choose_tile(rows, min(len(experts), 2 * pairs // num_experts))
    # Each expert with pairs may have one partly filled tile.
    is_few = pairs < num_experts
    bound = pairs if is_few else pairs // shape[0] + num_experts
    order = experts.new_empty(pairs)
    tiles = experts.new_empty(3, bound)
    if not is_few:
        sort_many_kernel[(num_experts,)](
            experts, order, tiles, pairs, shape[0], bound, PAIRS=_COMPARED_PAIRS
        )
    elif pairs:
        size = triton.next_power_of_2(num_experts)
        sort_kernel[(1,)](
            experts,
            order,
            tiles,
            pairs,
            shape[0],
            bound,
            EXPERTS=size,
            PAIRS=max(_MIN_COMPARED_PAIRS, _COMPARED // size),
            num_warps=8,
        )
    return ExpertTiles(order, tiles, shape)


def multiply_experts(
    weight: Tensor | BlockPlanes,
    rows: Tensor,
    bias: Tensor | None,
    tiles: ExpertTiles,
    num_experts: int,
    shared: int,
) -> Tensor:
    """Return products of each pair's row with its expert's weight, ``[pairs, out]``.

    ``weight`` is ``[experts * out, in]``, in the type of ``rows`` or in bit planes; ``bias`` is
    ``[experts * out]``. ``shared`` pairs share a row of ``rows [pairs / shared, in]``.
    """
    from molink.stage.gpu_kernels.expert_kernels import (
        multiply_experts_kernel,
        multiply_packed_experts_kernel,
    )

    stacked = weight.layout.shape[0] if isinstance(weight, BlockPlanes) else len(weight)
    depth, size, bound = rows.shape[1], stacked // num_experts, tiles.tiles.shape[1]
    results = rows.new_empty(len(tiles.order), size)
    if not len(results):
        return results
    count, outputs, warps, columns = tiles.shape
    grid = -(-size // outputs), bound
    added = bias if bias is not None else results
    given, has_bias = rows.contiguous(), int(bias is not None)
    common = added, results, tiles.order, tiles.tiles, bound, depth, size, shared, has_bias
    if isinstance(weight, BlockPlanes):
        chunks = choose_chunks(weight.layout, columns)
        multiply_packed_experts_kernel[grid](
            given,
            weight.tensors,
            *common,
            stacked,
            weight.layout.chunks // chunks,
            FORM=weight.layout.kernel_form,
            ROWS=count,
            OUTPUTS=outputs,
            CHUNKS=chunks,
            SCALE_SUMS=scales_sums(weight.layout, count, rows.dtype),
            num_warps=warps,
            num_stages=PRODUCT_STAGES,
        )
        return results
    multiply_experts_kernel[grid](
        given,
        weight,
        *common,
        ROWS=count,
        OUTPUTS=outputs,
        COLUMNS=columns * 2 // rows.element_size(),
        num_warps=warps,
        num_stages=PRODUCT_STAGES,
    )
    return results


def add_experts(products: Tensor, weights: Tensor, factors: Tensor | None) -> Tensor:
    """Sum ``products [T * top_k, n]`` of each row times ``weights [T, top_k]``, in order.

    ``factors`` (float32 ``[T * top_k, 1]``) also multiply products, and make sums float32.
    """
    from molink.stage.gpu_kernels.expert_kernels import add_experts_kernel

    (count, top_k), width = weights.shape, products.shape[1]
    dtype = products.dtype if factors is None else torch.float32
    results = products.new_empty(count, width, dtype=dtype)
    if count:
        add_experts_kernel[count, -(-width // _ADDED)](
            products,
            weights,
            weights if factors is None else factors,
            results,
            top_k,
            width,
            HAS_FACTORS=factors is not None,
            BLOCK=_ADDED,
        )
    return results
