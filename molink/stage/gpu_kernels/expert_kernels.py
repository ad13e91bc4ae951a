"""Triton kernels of mixture-of-experts layers; :mod:`.expert_product` describes their arguments.

A *pair* is a row and one of its ``top_k`` experts: pair ``row * top_k + k``. Pairs are sorted by
expert, and cut into *tiles* of one expert each.
"""

import triton
import triton.language as tl

from molink.stage.gpu_kernels.block_kernels import _sum_products

#: Scores that rank below all real scores: of NaN, of experts already chosen, and of excluded groups
#: and padding.
_NAN, _CHOSEN, _NONE = (tl.constexpr(rating) for rating in (-1e30, -2e30, -3e30))


@triton.jit(do_not_specialize=["num_experts", "top_k", "top_groups", "renormalize"])
def choose_kernel(
    logits,
    correction,
    weights,
    experts,
    num_experts,
    top_k,
    top_groups,
    renormalize,
    min_sum,
    scale,
    row_stride,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    VOTERS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_CORRECTED: tl.constexpr,
):
    """Choose the experts of one row per program, best first; ties go to the lower index.

    A row of NaN gets arbitrary valid experts with NaN weights.
    """
    row = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    given = tl.load(
        logits + row.to(tl.int64) * row_stride + expert, mask=inside, other=-float("inf")
    )
    given = given.to(tl.float32)
    if IS_SIGMOID:
        odds = 1.0 / (1.0 + tl.exp(-given))
    else:
        powers = tl.exp(given - tl.max(given, 0))
        odds = powers / tl.sum(powers, 0)
    rated = odds
    if IS_CORRECTED:
        rated += tl.load(correction + expert, mask=inside, other=0.0)
    left = tl.where(inside, tl.where(rated == rated, rated, _NAN), _NONE)
    if GROUPS > 1:
        left = _keep_best_groups(
            left, expert, num_experts // GROUPS, top_groups, EXPERTS, GROUPS, SLOTS, VOTERS
        )
    place = tl.full((EXPERTS,), -1, tl.int32)
    for index in range(top_k):
        best = tl.argmax(left, 0)
        place = tl.where(expert == best, index, place)
        left = tl.where(expert == best, _CHOSEN, left)
    chosen = place >= 0
    if renormalize > 0:
        odds /= tl.maximum(tl.sum(tl.where(chosen, odds, 0.0), 0), min_sum)
    tl.store(weights + row * top_k + place, odds * scale, mask=chosen)
    tl.store(experts + row * top_k + place, expert, mask=chosen)


@triton.jit
def _keep_best_groups(
    rated,
    expert,
    group_size,
    top_groups,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    VOTERS: tl.constexpr,
):
    """Set scores outside the best groups to ``_NONE``.

    A group ranks by the sum of its best ``VOTERS`` scores.
    """
    group = expert // group_size
    slot = tl.arange(0, SLOTS)
    sums = tl.full((SLOTS,), -float("inf"), tl.float32)
    for index in range(GROUPS):
        members = tl.where(group == index, rated, _NONE)
        best = tl.max(members, 0)
        if VOTERS > 1:
            best += tl.max(tl.where(expert == tl.argmax(members, 0), _NONE, members), 0)
        sums = tl.where(slot == index, best, sums)
    kept = tl.zeros((EXPERTS,), tl.int32)
    for _ in range(top_groups):
        best = tl.argmax(sums, 0)
        sums = tl.where(slot == best, -float("inf"), sums)
        kept = tl.where(group == best, 1, kept)
    return tl.where(kept > 0, rated, _NONE)


@triton.jit(do_not_specialize=["count", "tile_rows", "tile_bound"])
def sort_kernel(
    experts,
    order,
    tiles,
    count,
    tile_rows,
    tile_bound,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Sort a few pairs by expert and cut them into tiles of ``tile_rows``, in one program."""
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, count, PAIRS):
        at = first + tl.arange(0, PAIRS)
        chosen = tl.load(experts + at, mask=at < count, other=-1)
        counts += tl.sum((chosen[None] == expert[:, None]).to(tl.int32), 1)
    ends = tl.cumsum(counts, 0)
    needed = (counts + tile_rows - 1) // tile_rows
    tile_ends = tl.cumsum(needed, 0)
    places = ends - counts
    tile_places = tile_ends - needed
    total = tl.sum(needed, 0)
    for first in range(0, tile_bound, PAIRS):
        tile = first + tl.arange(0, PAIRS)
        owner = tl.sum((tile_ends[:, None] <= tile[None]).to(tl.int32), 0)
        of_owner = owner[None] == expert[:, None]
        begins = places[:, None] + (tile[None] - tile_places[:, None]) * tile_rows
        begin = tl.sum(tl.where(of_owner, begins, 0), 0)
        end = tl.sum(tl.where(of_owner, ends[:, None], 0), 0)
        end = tl.minimum(end, begin + tile_rows)
        inside = tile < tile_bound
        tl.store(tiles + tile, tl.where(tile < total, owner, -1), mask=inside)
        tl.store(tiles + tile_bound + tile, begin, mask=inside)
        tl.store(tiles + 2 * tile_bound + tile, end, mask=inside)
    for first in range(0, count, PAIRS):
        at = first + tl.arange(0, PAIRS)
        chosen = tl.load(experts + at, mask=at < count, other=-1)
        hit = (chosen[None] == expert[:, None]).to(tl.int32)
        found = tl.sum(hit * (places[:, None] + tl.cumsum(hit, 1) - 1), 0)
        tl.store(order + found, at, mask=at < count)
        places += tl.sum(hit, 1)


@triton.jit(do_not_specialize=["count", "tile_rows", "tile_bound"])
def sort_many_kernel(experts, order, tiles, count, tile_rows, tile_bound, PAIRS: tl.constexpr):
    """Sort many pairs, with one program per expert.

    If an expert's pairs begin at ``begin``, its tiles begin at ``begin // tile_rows + expert``: the
    experts before it never need more tiles.
    """
    expert = tl.program_id(0)
    before = tl.zeros((PAIRS,), tl.int32)
    own = tl.zeros((PAIRS,), tl.int32)
    for first in range(0, count, PAIRS):
        at = first + tl.arange(0, PAIRS)
        chosen = tl.load(experts + at, mask=at < count, other=0x7FFFFFFF)
        before += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    begin = tl.sum(before, 0)
    end = begin + tl.sum(own, 0)
    tile = begin // tile_rows + expert
    for slot in range(tile, end // tile_rows + expert + 1):
        place = begin + (slot - tile) * tile_rows
        tl.store(tiles + slot, tl.where(place < end, expert, -1))
        tl.store(tiles + tile_bound + slot, place)
        tl.store(tiles + 2 * tile_bound + slot, tl.minimum(place + tile_rows, end))
    for first in range(0, count, PAIRS):
        at = first + tl.arange(0, PAIRS)
        chosen = tl.load(experts + at, mask=at < count, other=0x7FFFFFFF)
        hit = (chosen == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(hit, 0) - 1, at, mask=hit > 0)
        begin += tl.sum(hit, 0)


@triton.jit
def _find_tile(order, tiles, tile_bound, depth, shared, ROWS: tl.constexpr):
    """Return a tile's expert, its pairs, which of them are real, and where their rows begin."""
    tile = tl.program_id(1)
    place = tl.load(tiles + tile_bound + tile) + tl.arange(0, ROWS)
    real = place < tl.load(tiles + 2 * tile_bound + tile)
    pair = tl.load(order + place, mask=real, other=0)
    return pair, real, (pair // shared).to(tl.int64) * depth


@triton.jit
def _store_products(total, results, bias, pair, real, outputs, inside, begin, size, has_bias):
    """Add an expert's bias to the pairs' sums ``[outputs, rows]``, and store them."""
    added = tl.load(bias + begin + outputs, mask=inside & (has_bias > 0), other=0).to(tl.float32)
    total += added[:, None]
    line = pair.to(tl.int64)[None] * size + outputs[:, None]
    stored = real[None] & inside[:, None]
    tl.store(results + line, total.to(results.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["tile_bound", "shared", "has_bias"])
def multiply_experts_kernel(
    rows,
    weight,
    bias,
    results,
    order,
    tiles,
    tile_bound,
    depth,
    size,
    shared,
    has_bias,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply pairs' rows by weights ``[experts * size, depth]``; store ``[pairs, size]``.

    The grid is (tiles of outputs, tiles of pairs).
    """
    expert = tl.load(tiles + tl.program_id(1))
    if expert < 0:
        return
    pair, real, sources = _find_tile(order, tiles, tile_bound, depth, shared, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < size
    begin = expert.to(tl.int64) * size
    lines = weight + (begin + outputs)[:, None] * depth
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, depth, COLUMNS):
        at = first + column
        filled = at < depth
        held = tl.load(lines + at[None], mask=inside[:, None] & filled[None], other=0)
        given = tl.load(
            rows + sources[None] + at[:, None], mask=real[None] & filled[:, None], other=0
        )
        total = tl.dot(held, given, total, input_precision="ieee")
    _store_products(total, results, bias, pair, real, outputs, inside, begin, size, has_bias)


@triton.jit(do_not_specialize=["tile_bound", "shared", "steps", "has_bias"])
def multiply_packed_experts_kernel(
    rows,
    planes,
    bias,
    results,
    order,
    tiles,
    tile_bound,
    depth,
    size,
    shared,
    has_bias,
    stacked_size,
    steps,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
):
    """Multiply pairs' rows by bit planes of ``stacked_size = experts * size`` outputs.

    See :mod:`.block_kernels`.
    """
    expert = tl.load(tiles + tl.program_id(1))
    if expert < 0:
        return
    pair, real, sources = _find_tile(order, tiles, tile_bound, depth, shared, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < size
    begin = expert * size
    total = _sum_products(
        rows,
        planes,
        sources,
        real,
        begin + outputs,
        inside,
        stacked_size,
        0,
        steps,
        FORM,
        CHUNKS,
        SCALE_SUMS,
    )
    _store_products(total, results, bias, pair, real, outputs, inside, begin, size, has_bias)


@triton.jit(do_not_specialize=["top_k"])
def add_experts_kernel(
    products,
    weights,
    factors,
    results,
    top_k,
    width,
    HAS_FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a row's products times their weights, in order, for ``BLOCK`` columns per program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(top_k):
        pair = row * top_k + index
        weight = tl.load(weights + pair)
        if HAS_FACTORS:
            weight *= tl.load(factors + pair)
        total += weight * tl.load(products + pair * width + at, mask=inside, other=0).to(tl.float32)
    tl.store(results + row * width + at, total.to(results.dtype.element_ty), mask=inside)
