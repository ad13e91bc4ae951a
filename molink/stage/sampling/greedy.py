"""Finds the likeliest token of each row."""

import math

import torch
from torch import Tensor

#: Tokens per block of maxima and of sums.
BLOCK_TOKENS = 128


def find_greedy(final: Tensor, logits: Tensor) -> Tensor:
    """Return each row's likeliest token, and whether the row is usable: int64 ``[n, 2]``.

    ``final`` are ``logits`` ``[n, V]`` after penalties and masks. Ties go to the lowest id. A row
    is usable if ``logits`` are finite and ``final`` allows a token. Never waits for a GPU.
    """
    greatest, tokens = _find_maxima(final)
    # Infinite or NaN if either of both is.
    usable = (greatest - logits.amin(dim=-1)).abs() < math.inf
    return torch.stack((tokens, usable.to(tokens.dtype)), dim=1)


def find_likeliest(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return each row's likeliest token in ``logits`` ``[n, V]``, and its probability or NaN.

    NaN marks an unusable row.
    """
    values, tokens = _find_maxima(logits)
    probabilities = (values - logits.logsumexp(dim=-1)).exp()
    return tokens.tolist(), probabilities.tolist()


def block_maxima(logits: Tensor) -> Tensor | None:
    """Return maxima per block ``[n, V / BLOCK_TOKENS]``; ``None`` if blocks don't divide ``V``."""
    if logits.shape[1] % BLOCK_TOKENS or not logits.is_contiguous():
        return None
    return logits.view(len(logits), -1, BLOCK_TOKENS).amax(dim=-1)


def _find_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit, and the lowest id that has it, ``[n]`` each."""
    maxima = block_maxima(logits) if logits.device.type == "cpu" else None
    if maxima is None:
        values, ids = logits.max(dim=-1)
        return values, ids
    # On a CPU argmax is ten times slower than max, so search only the best block.
    values, blocks = maxima.max(dim=-1)
    index = blocks[:, None, None].expand(-1, -1, BLOCK_TOKENS)
    chosen = logits.view(len(logits), -1, BLOCK_TOKENS).gather(1, index)[:, 0]
    return values, blocks * BLOCK_TOKENS + chosen.argmax(dim=-1)
