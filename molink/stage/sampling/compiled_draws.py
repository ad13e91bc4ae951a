"""Draws the tokens of all rows on a GPU in one launch."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from molink.stage.device_copy import upload_tensor
from molink.stage.sampling.filters import filter_numbers
from molink.stage.sampling.logits_processors import (
    SampleRow,
    collect_biases,
    collect_penalties,
    upload_masks,
)
from molink.stage.sampling.token_draws import uniform_noise

#: Draws from logits ``[n, V]`` of rows; returns each token, and whether its row is usable: int64
#: ``[n, 2]``.
DrawRows = Callable[[Tensor, Sequence[SampleRow]], Tensor]

#: Added to the logarithm of a weight that top_p surely excludes, for rounding.
_MARGIN = -0.01


def draw_rows(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Draw from raw logits (float32 ``[n, V]``, not modified). See :data:`DrawRows`."""
    from molink.stage.gpu_kernels.sampling_kernels import draw_tokens

    logits = _apply_penalties(logits, rows)
    limited = [row.allowed for row in rows if row.allowed is not None]
    settings = _pack_settings(rows, logits.shape[1], len(limited))
    if limited and len(limited) < len(rows):
        limited.append(b"\xff" * (-(-logits.shape[1] // 8)))
    masks = upload_masks(limited, logits) if limited else None
    return draw_tokens(logits, upload_tensor(settings, logits.device), masks)


def _apply_penalties(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Apply penalties, then biases, to a copy; the same tensor if there are none."""
    from molink.stage.gpu_kernels.sampling_kernels import change_logits

    changes, vocabulary = list[tuple[Tensor, ...]](), logits.shape[1]
    if (penalties := collect_penalties(rows, vocabulary)) is not None:
        changes.append(penalties)
    if (biases := collect_biases(rows, vocabulary)) is not None:
        where, amounts = biases
        changes.append((where, torch.ones_like(amounts), -amounts))
    if not changes:
        return logits
    changed = logits.clone(memory_format=torch.contiguous_format)
    for parts in changes:
        packed = torch.stack([part.double() for part in parts])
        change_logits(changed, upload_tensor(packed, logits.device))
    return changed


def _pack_settings(rows: Sequence[SampleRow], vocabulary: int, unlimited: int) -> Tensor:
    """Pack the settings of rows; those without a mask get the mask ``unlimited``."""
    packed, masks = [], 0
    for row in rows:
        params, mask = row.sampling_params, unlimited
        if row.allowed is not None:
            mask, masks = masks, masks + 1
        if params.temperature > 0:
            noise = uniform_noise(params.seed, row.position)
            numbers = filter_numbers(params, noise, vocabulary)
        else:
            numbers = (0.0, 0.0, 1.0, -math.inf, 0.0)
        tail = 1.0 - params.top_p
        log_tail = math.log(tail / vocabulary) + _MARGIN if tail > 0 else -math.inf
        packed.append((*numbers, log_tail, mask))
    return torch.tensor(packed, dtype=torch.float64)
