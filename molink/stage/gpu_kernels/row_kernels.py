"""Row-wise operators between two products, fused into one launch each.

Rows are float32, float16 or bf16; computation is in float32. Results are new tensors: in place, a
thread could read values that another thread of its program has already overwritten.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from molink.checkpoint.traits import SWIGLU_ALPHA, Activation
from molink.stage.kv_quantizer import MAX_CODE

_GATE_BLOCK, _BOUNDED_BLOCK = 1024, 2048
#: Heads per program.
_TILE = 4
_ALPHA = tl.constexpr(SWIGLU_ALPHA)
#: gelu by tanh is ``x · sigmoid(2 √(2/π) (x + 0.044715 x³))`` (Hendrycks and Gimpel 2016).
_GELU = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBE = tl.constexpr(0.044715)
#: For 8-bit KV: the factor from the largest number to the scale, the minimum divisor, and the
#: number that rounds small float32 to integers when added and subtracted.
_CODE_SHARE, _TINY = tl.constexpr(1 / MAX_CODE), tl.constexpr(2.0**-126)
_ROUNDS = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def _scale_row(value, weight, at, inside, width, eps):
    root = tl.rsqrt(tl.sum(value * value) / width + eps)
    return value * root * tl.load(weight + at, mask=inside, other=0.0)


@triton.jit
def add_norm_kernel(
    rows,
    result,
    post_weight,
    weight,
    total,
    normed,
    rows_stride,
    result_stride,
    width,
    scale,
    eps,
    BLOCK: tl.constexpr,
):
    """Compute one row per program; see :func:`add_and_norm`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(rows + row * rows_stride + at, mask=inside, other=0.0).to(tl.float32)
    if result is not None:
        added = tl.load(result + row * result_stride + at, mask=inside, other=0.0).to(tl.float32)
        if post_weight is not None:
            added = _scale_row(added, post_weight, at, inside, width, eps)
        # The norm reads the rounded sum, as without fusion.
        rounded = (value + scale * added).to(total.dtype.element_ty)
        tl.store(total + row * width + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if normed is not None:
        if weight is not None:
            value = _scale_row(value, weight, at, inside, width, eps)
        tl.store(normed + row * width + at, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _gate_columns(source, at, width, limit, ACTIVATION: tl.constexpr):
    """Compute ``act(gate) * up`` of a row's columns in float32; 0 beyond its ``width``."""
    inside = at < width
    if ACTIVATION == "clamped_swiglu":
        active = tl.load(source + 2 * at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
        active = tl.minimum(active, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL) + 1
        argument = _ALPHA * active
    else:
        active = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + width + at, mask=inside, other=0.0).to(tl.float32)
        argument = active
        if ACTIVATION == "gelu_tanh":
            argument = _GELU * active * (1 + _CUBE * active * active)
    # The exponent is never positive, so that no power overflows.
    power = tl.exp(-tl.abs(argument))
    return active * (tl.where(argument < 0, power, 1.0) / (1 + power)) * up


@triton.jit
def gate_kernel(
    rows, gated, row_stride, width, limit, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute ``BLOCK`` columns of a row per program; see :func:`apply_gate`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    result = _gate_columns(rows + row * row_stride, at, width, limit, ACTIVATION)
    tl.store(gated + row * width + at, result.to(gated.dtype.element_ty), mask=at < width)


@triton.jit
def bounded_gate_kernel(
    rows,
    gated,
    factors,
    row_stride,
    width,
    limit,
    bound,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row per program, twice: first for its maximum. See :func:`apply_bounded_gate`."""
    row = tl.program_id(0).to(tl.int64)
    source = rows + row * row_stride
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(_gate_columns(source, at, width, limit, ACTIVATION)))
    factor = tl.maximum(tl.max(largest, axis=0) / bound, 1.0)
    tl.store(factors + row, factor)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        result = _gate_columns(source, at, width, limit, ACTIVATION) / factor
        tl.store(gated + row * width + at, result.to(gated.dtype.element_ty), mask=at < width)


@triton.jit
def _round_to_bf16(value):
    """Round non-negative float32 to bf16's values.

    A conversion might truncate, and codes would exceed 127.
    """
    bits = value.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -0x10000).to(tl.float32, bitcast=True)


# Slots are part of a larger tensor; specialization would compile a kernel per alignment.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def append_heads_kernel(
    heads,
    weight,
    angles,
    slots,
    turned,
    keys,
    values,
    key_scales,
    value_scales,
    row_stride,
    head_stride,
    angle_stride,
    page_stride,
    position_stride,
    page_head_stride,
    scale_page_stride,
    scale_position_stride,
    scale_head_stride,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``TILE`` heads of a row per program; see :func:`append_heads`."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    turns = head < QUERIES + KEYS
    inside = (head < QUERIES + 2 * KEYS)[:, None] & (column < SIZE)[None, :]
    source = heads + row * row_stride + head[:, None] * head_stride
    own = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        root = tl.rsqrt(tl.sum(own * own, axis=1) / SIZE + eps)[:, None]
        factors = weight + head[:, None] * SIZE
        given = inside & turns[:, None]
        scaled = own * root * tl.load(factors + column[None, :], mask=given, other=0.0)
        own = tl.where(turns[:, None], scaled, own)
    if ROTARY > 0:
        if INTERLEAVED:
            partner = column ^ 1
        else:
            partner = tl.where(column < ROTARY // 2, column + ROTARY // 2, column - ROTARY // 2)
        rotates = turns[:, None] & (column < ROTARY)[None, :]
        other = tl.load(source + partner[None, :], mask=rotates, other=0.0).to(tl.float32)
        if weight is not None:
            other *= root * tl.load(factors + partner[None, :], mask=rotates, other=0.0)
        angle = angles + row * angle_stride + column
        cosine = tl.load(angle, mask=column < ROTARY, other=0.0).to(tl.float32)
        sine = tl.load(angle + ROTARY, mask=column < ROTARY, other=0.0).to(tl.float32)
        own = tl.where(rotates, own * cosine[None, :] + other * sine[None, :], own)
    rounded = own.to(turned.dtype.element_ty)
    target = turned + (row * (QUERIES + 2 * KEYS) + head[:, None]) * SIZE
    tl.store(target + column[None, :], rounded, mask=inside)
    slot = tl.load(slots + row)
    place = slot // PAGE * page_stride + slot % PAGE * position_stride + column[None, :]
    key, value = head - QUERIES, head - QUERIES - KEYS
    is_key = (key >= 0) & turns
    is_value = (value >= 0) & (value < KEYS)
    if key_scales is not None:
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        scale = _round_to_bf16(tl.max(tl.abs(wide), axis=1) * _CODE_SHARE)
        divisor = tl.maximum(scale, _TINY)[:, None]
        # The addition rounds to the nearest integer, halves to even.
        rounded = (tl.div_rn(wide, divisor) + _ROUNDS) - _ROUNDS
        at = slot // PAGE * scale_page_stride + slot % PAGE * scale_position_stride
        scale = scale.to(key_scales.dtype.element_ty)
        tl.store(key_scales + at + key * scale_head_stride, scale, mask=is_key)
        if values is not None:
            tl.store(value_scales + at + value * scale_head_stride, scale, mask=is_value)
    kept = rounded.to(keys.dtype.element_ty)
    target = keys + place + key[:, None] * page_head_stride
    tl.store(target, kept, mask=inside & is_key[:, None])
    if values is not None:
        target = values + place + value[:, None] * page_head_stride
        tl.store(target, kept, mask=inside & is_value[:, None])


def add_and_norm(
    rows: Tensor,
    result: Tensor | None,
    post_weight: Tensor | None,
    scale: float,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Add ``scale * result`` to rows ``[T, n]``, and norm the sum.

    The weights (float32 ``[n]``) belong to the norm of ``result`` and to that of the sum. Parts
    that are ``None`` are skipped. Returns the sum in the rows' type and its norm in ``dtype``.
    """
    rows, result = _lay_out(rows), None if result is None else _lay_out(result)
    count, width = rows.shape
    total = rows if result is None else rows.new_empty(count, width)
    changes = weight is not None or dtype != rows.dtype
    normed = rows.new_empty(count, width, dtype=dtype) if changes else total
    if total is rows and not changes:
        return rows, rows
    add_norm_kernel[(count,)](
        rows,
        result,
        post_weight,
        weight,
        None if result is None else total,
        normed if changes else None,
        rows.stride(0),
        width if result is None else result.stride(0),
        width,
        scale,
        eps,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
    )
    return total, normed


def apply_gate(rows: Tensor, activation: Activation, limit: float) -> Tensor:
    """Compute ``act(gate) * up`` of rows ``[T, 2n]``.

    The gate comes before ``up``; for some activations, both are interleaved.
    """
    rows = _lay_out(rows)
    count, width = rows.shape[0], rows.shape[1] // 2
    gated = rows.new_empty(count, width)
    gate_kernel[(count, triton.cdiv(width, _GATE_BLOCK))](
        rows,
        gated,
        rows.stride(0),
        width,
        limit,
        ACTIVATION=activation,
        BLOCK=_GATE_BLOCK,
    )
    return gated


def apply_bounded_gate(
    rows: Tensor, activation: Activation, limit: float, bound: float
) -> tuple[Tensor, Tensor]:
    """Apply a gate, and divide each row by a factor so that no magnitude exceeds ``bound``.

    Arguments are as in :func:`apply_gate`. Returns the rows and the factors, float32 ``[T, 1]``,
    which are at least 1.
    """
    rows = _lay_out(rows)
    count, width = rows.shape[0], rows.shape[1] // 2
    gated = rows.new_empty(count, width)
    factors = rows.new_empty(count, 1, dtype=torch.float32)
    bounded_gate_kernel[(count,)](
        rows,
        gated,
        factors,
        rows.stride(0),
        width,
        limit,
        bound,
        ACTIVATION=activation,
        BLOCK=_BOUNDED_BLOCK,
        num_warps=8,
    )
    return gated, factors


def append_heads(
    heads: Tensor,
    weight: Tensor | None,
    eps: float,
    angles: Tensor | None,
    slots: Tensor,
    pages: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None,
    interleaved: bool,
) -> Tensor:
    """Norm and rotate queries and keys of ``heads``, and store keys and values in ``pages``.

    ``heads`` are ``[T, n, head_dim]``: queries, keys, values. ``weight`` (float32) has the norm
    weights of each query and key. ``angles`` and ``slots`` are as in
    :class:`~molink.stage.decoder.mixer.ForwardContext`, ``pages`` and ``scales`` belong to the
    layer of a :class:`~molink.stage.kv_pool.KVPool`; with scales, rows are quantized as by
    :func:`~molink.stage.kv_quantizer.quantize_rows`. Without a weight or angles, that step is
    skipped. Returns all heads.
    """
    heads = _lay_out(heads)
    count, members, size = heads.shape
    keys, values = pages
    kv_heads = keys.shape[2]
    key_scales, value_scales = scales or (None, None)
    turned = torch.empty((count, members, size), dtype=heads.dtype, device=heads.device)
    append_heads_kernel[(count, triton.cdiv(members, _TILE))](
        heads,
        weight,
        angles,
        slots,
        turned,
        keys,
        # Keys that serve as values are stored once.
        None if values.data_ptr() == keys.data_ptr() else values,
        key_scales,
        value_scales,
        heads.stride(0),
        heads.stride(1),
        0 if angles is None else angles.stride(0),
        *keys.stride()[:3],
        *((0, 0, 0) if key_scales is None else key_scales.stride()),
        eps,
        QUERIES=members - 2 * kv_heads,
        KEYS=kv_heads,
        SIZE=size,
        ROTARY=0 if angles is None else angles.shape[-1],
        INTERLEAVED=interleaved,
        PAGE=keys.shape[1],
        TILE=_TILE,
        BLOCK=triton.next_power_of_2(size),
    )
    return turned


def _lay_out(rows: Tensor) -> Tensor:
    """Return rows whose elements are contiguous."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()
