"""Compares fused row-wise operators with torch's in float64. Imports Triton, so it is imported
late."""

import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from molink.stage.decoder.append_heads import AppendHeads, SeparateAppend
from molink.stage.decoder.fused import FusedOperators
from molink.stage.decoder.mlp import create_gate
from molink.stage.decoder.norm import IdentityNorm, Norm, QueryKeyNorm, RmsNorm, add_residual
from molink.stage.decoder.rotary import rotate_half, rotate_pairs
from molink.stage.diagnostics.trial_shapes import TrialShapes
from molink.stage.kv_pool import KVPool
from molink.stage.linear.base import PRODUCT_TOLERANCES
from molink.stage.torch_dtypes import DTYPE_NAMES, residual_dtype

log = logging.getLogger(__name__)

_ROWS = (1, 7, 33)
_LIMIT = 7.0
_CPU = torch.device("cpu")

#: Creates a random tensor of a given type and size.
_Noise = Callable[..., Tensor]


@cache
@torch.inference_mode()
def check_fused_rows(shapes: TrialShapes, dtype: torch.dtype, device: torch.device) -> bool:
    """Check that the operators compute rows of ``dtype`` correctly on a GPU."""
    try:
        error = fused_rows_error(shapes, dtype, device)
    except Exception as failure:  # compilers and kernels may raise anything
        log.warning("no fused operators on %s: %s", device, failure)
        return False
    if error <= PRODUCT_TOLERANCES[DTYPE_NAMES[dtype]]:
        return True
    log.warning("no fused operators on %s: off by %.2g", device, error)
    return False


def fused_rows_error(shapes: TrialShapes, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest error relative to the operator's largest result; NaN if any is NaN."""
    with torch.cuda.device(device):  # where Triton launches kernels
        errors = [
            (found.double().cpu() - exact).abs().max() / exact.abs().max()
            for found, exact in _compare_operators(shapes, dtype, device)
        ]
    return float(torch.stack(errors).max())


def _compare_operators(
    shapes: TrialShapes, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of the operators on ``device``, and exact ones in float64 on the CPU."""
    noise = partial(_create_noise, torch.Generator().manual_seed(0))
    for activation in shapes.activations:
        fused = FusedOperators(shapes.eps, 0.0, activation, _LIMIT, False, dtype)
        for count, inner in product(_ROWS, shapes.inner):
            rows = noise(dtype, count, 2 * inner)
            found = fused.apply_gate(rows.to(device))
            exact = create_gate(activation, _LIMIT)(rows.double())
            yield found, exact
            if dtype == torch.float16:
                bounded, factors = fused.apply_bounded(rows.to(device))
                yield bounded.double() * factors, exact
    for count in _ROWS:
        yield from _compare_norms(shapes, noise, count, dtype, device)
    # None: heads without rotation.
    rotations = ((None, False), *product(shapes.rotary, (False, True)))
    for count, (rotary, interleaved), normed in product(_ROWS, rotations, (False, True)):
        fused = FusedOperators(shapes.eps, 0.0, "silu", _LIMIT, interleaved, dtype)
        yield from _compare_heads(shapes, noise, count, rotary, normed, fused, device)
    fused = FusedOperators(shapes.eps, 0.0, "silu", _LIMIT, False, dtype)
    yield from _compare_codes(shapes, noise, max(_ROWS), fused, device)


def _compare_norms(
    shapes: TrialShapes, noise: _Noise, count: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compare a norm alone, and additions with each combination of norms."""
    fused = FusedOperators(shapes.eps, 0.0, "silu", _LIMIT, False, dtype)
    kept, exact = residual_dtype(dtype), IdentityNorm(torch.float64)
    rows, result = noise(kept, count, shapes.hidden), noise(dtype, count, shapes.hidden)
    weights = [noise(torch.float32, shapes.hidden) for _ in range(2)]
    pairs: list[tuple[Norm, Norm]] = [
        (fused.create_norm(weight.to(device)), RmsNorm(weight.double(), shapes.eps))
        for weight in weights
    ]
    yield pairs[1][0](rows.to(device)), pairs[1][1](rows.double())
    for has_post, has_norm in product((False, True), repeat=2):
        post, norm = (
            pair if has else (IdentityNorm(kind), exact)
            for pair, has, kind in zip(pairs, (has_post, has_norm), (kept, dtype), strict=True)
        )
        found = fused.add_residual(rows.to(device), result.to(device), 0.5, post[0], norm[0])
        wide = add_residual(rows.double(), result.double(), 0.5, post[1], norm[1])
        yield from zip(found, wide, strict=True)


def _compare_heads(
    shapes: TrialShapes,
    noise: _Noise,
    count: int,
    rotary: int | None,
    normed: bool,
    fused: FusedOperators,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compare all heads, and the whole KV pool: other slots must not change."""
    shape = shapes.attention
    queries, size = shape.groups * shape.kv_heads, shape.head_dim
    heads = noise(fused.dtype, count, queries + 2 * shape.kv_heads, size)
    weight = noise(torch.float32, queries + shape.kv_heads, size)
    angles = None if rotary is None else noise(fused.dtype, count, 1, 2, rotary).div_(3)
    blocks = 1 + count // shapes.block_size
    slots = torch.arange(blocks * shapes.block_size).flip(0)[:count]

    def append(
        append_heads: AppendHeads, place: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        pool = KVPool(shape, 2, blocks, shapes.block_size, dtype, place)
        pool.zero_blocks(range(blocks))
        norm = QueryKeyNorm(weight.to(place), queries, False, shapes.eps) if normed else None
        turns = None if angles is None else angles.to(place, dtype)
        found = append_heads(heads.to(place, dtype), norm, turns, pool, 1, slots.to(place))
        return found, torch.stack([torch.stack(pool.layer_pages(layer)) for layer in range(2)])

    exact = SeparateAppend(rotate_pairs if fused.interleaved else rotate_half)
    yield from zip(
        append(fused.append_heads, device, fused.dtype),
        append(exact, _CPU, torch.float64),
        strict=True,
    )


def _compare_codes(
    shapes: TrialShapes, noise: _Noise, count: int, fused: FusedOperators, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Compare an 8-bit KV pool with one that has torch's codes of the same rows."""
    shape, size = shapes.attention, shapes.block_size
    heads = noise(fused.dtype, count, (shape.groups + 2) * shape.kv_heads, shape.head_dim)
    slots, blocks = torch.arange(count).flip(0), 1 + count // size

    def append(append_heads: AppendHeads, place: torch.device) -> Tensor:
        pool = KVPool(shape, 1, blocks, size, fused.dtype, place, kv_cache_dtype="int8")
        pool.zero_blocks(range(blocks))
        append_heads(heads.to(place), None, None, pool, 0, slots.to(place))
        return torch.stack(pool.read_blocks(0, slice(0, blocks), 1))

    yield append(fused.append_heads, device), append(SeparateAppend(rotate_half), _CPU).double()


def _create_noise(generator: torch.Generator, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(size, generator=generator).mul_(3).to(dtype)
