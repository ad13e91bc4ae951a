"""Draws one token from each row of logits in one launch, without sorting; changes single logits.

The tokens that filters keep are those with a logit of at least a threshold. Float32 in the order of
integers are searched for it: an integer is above the threshold if too little lies beyond it. The
rows' most likely tokens, which include all kept ones, are copied first; the search and the draw
read only these. (FlashInfer's "Sorting-Free GPU Kernels for LLM Sampling" searches likewise, but
draws again where it rejects; here one random number per row decides, as on a CPU.)
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Logits of a row read at once, and thresholds tried at once.
BLOCK_LOGITS, _THRESHOLDS = 2048, 8
_WARPS = 16
#: Logits changed by a program.
_CHANGES = 256
#: Numbers per row in ``settings``; see :func:`draw_tokens`.
SETTINGS = 7

_INFINITY = tl.constexpr(math.inf)
_LOG2_E = tl.constexpr(math.log2(math.e))
#: The key of minus infinity.
_LOWEST = tl.constexpr(-0x7F800001)
#: Keeps a product with a sum below the sum.
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-52)


@triton.jit
def _to_key(value):
    """Map float32 to integers (int64) of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _to_value(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load_logits(logits, mask, at, vocabulary):
    """Load logits, and these after the mask: minus infinity for tokens that are not allowed."""
    inside = at < vocabulary
    raw = tl.load(logits + at, mask=inside, other=0.0)
    if mask is not None:
        byte = tl.load(mask + at // 8, mask=inside, other=0).to(tl.int32)
        inside = inside & (((byte >> (at % 8)) & 1) > 0)
    return raw, tl.where(inside, raw, -_INFINITY)


@triton.jit
def _load_weights(values, first, count, edge, greatest, scale, BLOCK: tl.constexpr):
    """Load the weights of candidates above ``edge``; 0 for others."""
    at = first + tl.arange(0, BLOCK)
    value = tl.load(values + at, mask=at < count, other=-_INFINITY)
    return tl.where(value > edge, tl.exp2((value - greatest) * scale), 0.0)


@triton.jit
def _sum_weights(values, count, edge, greatest, scale, BLOCK: tl.constexpr):
    """Sum the weights of candidates above ``edge``."""
    total = tl.zeros([], tl.float64)
    for first in range(0, count, BLOCK):
        weights = _load_weights(values, first, count, edge, greatest, scale, BLOCK)
        total += tl.sum(weights).to(tl.float64)
    return total


@triton.jit
def _find_edge(
    values,
    count,
    low,
    high,
    greatest,
    scale,
    target,
    WEIGHS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the key below the smallest one, in ``low`` (excluded) to ``high``, that has less than
    ``target`` above it: filters keep what is above the result.

    Counts the values above, or ``WEIGHS`` them. Less is above ``high``.
    """
    part = 1 + tl.arange(0, THRESHOLDS)
    while high - low > 1:
        keys = tl.minimum(low + tl.cdiv(high - low, THRESHOLDS + 1) * part, high)
        edges = _to_value(keys)
        above = tl.zeros([THRESHOLDS], tl.float64)
        for first in range(0, count, BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < count, other=-_INFINITY)
            weight = (
                tl.exp2((value - greatest) * scale) if WEIGHS else tl.full([BLOCK], 1.0, tl.float32)
            )
            chosen = tl.where(value[None, :] > edges[:, None], weight[None, :], 0.0)
            above += tl.sum(chosen, axis=1).to(tl.float64)
        enough = (above < target) | (keys == high)
        low = tl.max(tl.where(enough, low, keys))
        high = tl.min(tl.where(enough, keys, high))
    return high - 1


@triton.jit
def _draw_candidate(values, ids, count, edge, greatest, scale, noise, default, BLOCK: tl.constexpr):
    """Draw from the candidates above ``edge``: first the block, then the token."""
    total = _sum_weights(values, count, edge, greatest, scale, BLOCK)
    aim, before = noise * total, tl.zeros([], tl.float64)
    start, share = tl.zeros([], tl.int32), tl.zeros([], tl.float64)
    for first in range(0, count, BLOCK):
        weights = _load_weights(values, first, count, edge, greatest, scale, BLOCK)
        own = tl.sum(weights).to(tl.float64)
        is_hit = (before <= aim) & (aim < before + own)
        start = tl.where(is_hit, first, start)
        share = tl.where(is_hit, (aim - before) / tl.where(own > 0, own, 1.0), share)
        before += own
    weights = _load_weights(values, start, count, edge, greatest, scale, BLOCK).to(tl.float64)
    cumulative = tl.cumsum(weights, 0)
    # The sum of the block in float32 is another one, so aim at a share of it.
    aim = tl.max(cumulative) * tl.minimum(share, _BELOW_ONE)
    place = tl.arange(0, BLOCK)
    place = tl.min(tl.where((cumulative > aim) & (weights > 0), place, BLOCK))
    return tl.load(ids + start + place, mask=place < BLOCK, other=default)


@triton.jit
def _scan_row(logits, mask, vocabulary, BLOCK: tl.constexpr):
    """Return the largest of every ``BLOCK``-th logit, of all, its lowest token, and whether all are
    finite and one is allowed.
    """
    lane = tl.arange(0, BLOCK)
    best, best_at = tl.full([BLOCK], -_INFINITY, tl.float32), tl.zeros([BLOCK], tl.int32)
    finite = tl.full([BLOCK], 1, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        raw, value = _load_logits(logits, mask, first + lane, vocabulary)
        finite = tl.where(tl.abs(raw) < _INFINITY, finite, 0)
        best_at = tl.where(value > best, first + lane, best_at)
        best = tl.maximum(value, best)
    greatest = tl.max(best)
    token = tl.min(tl.where(best == greatest, best_at, vocabulary))
    usable = (tl.min(finite) > 0) & (greatest > -_INFINITY)
    return best, greatest, token, usable


@triton.jit
def _copy_candidates(
    logits, mask, values, ids, vocabulary, edge, greatest, scale, BLOCK: tl.constexpr
):
    """Copy logits above ``edge`` and their tokens; return the weight of all, and their number."""
    lane = tl.arange(0, BLOCK)
    total, count = tl.zeros([], tl.float64), tl.zeros([], tl.int32)
    for first in range(0, vocabulary, BLOCK):
        _, value = _load_logits(logits, mask, first + lane, vocabulary)
        total += tl.sum(tl.exp2((value - greatest) * scale)).to(tl.float64)
        is_kept = value > edge
        place = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(values + place, value, mask=is_kept)
        tl.store(ids + place, first + lane, mask=is_kept)
        count += tl.sum(is_kept.to(tl.int32))
    return total, count


@triton.jit
def draw_tokens_kernel(
    logits,
    settings,
    masks,
    values,
    ids,
    drawn,
    row_stride,
    vocabulary,
    mask_width,
    capacity,
    SETTINGS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw from one row per program; see :func:`draw_tokens`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    values += row * capacity
    ids += row * capacity
    settings += row * SETTINGS
    temperature, top_k = tl.load(settings), tl.load(settings + 1).to(tl.int32)
    top_p, log_min_p = tl.load(settings + 2), tl.load(settings + 3)
    noise, log_tail = tl.load(settings + 4), tl.load(settings + 5)
    mask = masks
    if masks is not None:
        mask += tl.load(settings + 6).to(tl.int64) * mask_width
    best, greatest, token, usable = _scan_row(logits, mask, vocabulary, BLOCK)
    if usable & (temperature > 0):
        scale = (1 / temperature * _LOG2_E).to(tl.float32)
        low, high = tl.full([], _LOWEST, tl.int64), _to_key(greatest)
        floor = _to_key((greatest + temperature * log_min_p).to(tl.float32)) - 1
        if top_k > 0:
            if top_k < BLOCK:
                # The largest value of each lane bounds the row's largest ones.
                tl.store(values + tl.arange(0, BLOCK), best)
                tl.debug_barrier()
                low = _find_edge(
                    values, BLOCK, low, high, greatest, scale, top_k, False, THRESHOLDS, BLOCK
                )
                tl.debug_barrier()
        else:
            # All tokens below weigh so little together that top_p keeps none.
            tail = _to_key((greatest + temperature * log_tail).to(tl.float32)) - 1
            low = tl.maximum(low, tl.maximum(floor, tail))
        total, count = _copy_candidates(
            logits, mask, values, ids, vocabulary, _to_value(low), greatest, scale, BLOCK
        )
        tl.debug_barrier()
        if top_k > 0:
            low = _find_edge(
                values, count, low, high, greatest, scale, top_k, False, THRESHOLDS, BLOCK
            )
            total = _sum_weights(values, count, _to_value(low), greatest, scale, BLOCK)
        if top_p < 1:
            low = _find_edge(
                values, count, low, high, greatest, scale, top_p * total, True, THRESHOLDS, BLOCK
            )
        edge = _to_value(tl.maximum(low, floor))
        token = _draw_candidate(values, ids, count, edge, greatest, scale, noise, token, BLOCK)
    tl.store(drawn + 2 * row, token)
    tl.store(drawn + 2 * row + 1, usable)


@triton.jit
def change_logits_kernel(logits, changes, count, BLOCK: tl.constexpr):
    """Change ``BLOCK`` logits per program; see :func:`change_logits`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = logits + tl.load(changes + at, mask=inside, other=0.0).to(tl.int64)
    factor = tl.load(changes + count + at, mask=inside, other=1.0).to(tl.float32)
    amount = tl.load(changes + 2 * count + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(place, mask=inside, other=0.0)
    value = tl.where(value < 0, value * factor, tl.div_rn(value, factor)) - amount
    tl.store(place, value, mask=inside)


def change_logits(logits: Tensor, changes: Tensor) -> None:
    """Change some of contiguous logits (float32 ``[n, V]``).

    ``changes`` (float64 ``[3, m]``) have distinct indices into all logits, factors by which these
    are divided (multiplied if they are negative), and amounts that are subtracted then.
    """
    count = changes.shape[1]
    change_logits_kernel[(triton.cdiv(count, _CHANGES),)](logits, changes, count, BLOCK=_CHANGES)


def draw_tokens(logits: Tensor, settings: Tensor, masks: Tensor | None) -> Tensor:
    """Draw a token per row of logits (float32 ``[n, V]``, or one row for all).

    ``settings`` (float64 ``[n, SETTINGS]``) have a row's temperature (0: its likeliest token, with
    ties to the lowest id), top_k (0: off), top_p, logarithm of min_p, random number in [0, 1),
    logarithm of a weight below which top_p keeps no token, and row of ``masks`` (uint8
    ``[m, V / 8]``, lowest bit first; ``None``: all tokens are allowed). Returns int64 ``[n, 2]``:
    the token, and whether all logits are finite and any token is allowed.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    count, vocabulary = logits.shape
    capacity = max(vocabulary, BLOCK_LOGITS)
    values = logits.new_empty(count, capacity)
    ids = logits.new_empty(count, capacity, dtype=torch.int32)
    drawn = logits.new_empty(count, 2, dtype=torch.int64)
    draw_tokens_kernel[(count,)](
        logits,
        settings,
        masks,
        values,
        ids,
        drawn,
        logits.stride(0),
        vocabulary,
        0 if masks is None else masks.shape[1],
        capacity,
        SETTINGS=SETTINGS,
        THRESHOLDS=_THRESHOLDS,
        BLOCK=BLOCK_LOGITS,
        num_warps=_WARPS,
    )
    return drawn
