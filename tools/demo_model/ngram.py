"""A token-level n-gram model with modified Kneser-Ney smoothing (Chen and Goodman, 1999, §3).

It is what the neural model is measured against, so it gets every advantage it can have: the
same tokenizer, all training conversations and three discounts per order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: A token takes this many bits of a packed n-gram; five fit into 64.
BITS = 11
ORDER = 5


@dataclass(frozen=True, slots=True)
class _Level:
    """All n-grams of one order: sorted keys, their counts, and each context's share to back off."""

    keys: Ints
    counts: Floats
    discounts: Floats  # by min(count, 3)
    contexts: Ints
    totals: Floats
    backoff: Floats


class NGram:
    """An interpolated 5-gram over token ids below 2048."""

    def __init__(self, texts: Sequence[Ints], vocabulary: int, pad: int) -> None:
        if vocabulary > 1 << BITS:
            raise ValueError(f"vocabulary {vocabulary} does not fit into {BITS} bits")
        self._uniform = 1.0 / vocabulary
        self._pad = pad
        keys, counts = np.unique(_pack_ngrams(texts, pad), return_counts=True)
        levels = [_make_level(keys, counts)]
        for order in range(ORDER - 1, 0, -1):
            # Lower orders count in how many contexts an n-gram occurs, not how often.
            keys, counts = np.unique(keys & _make_mask(order), return_counts=True)
            levels.append(_make_level(keys, counts))
        self._levels = levels[::-1]

    def log_probabilities(self, text: Ints) -> Floats:
        """Natural log probability of every token but the first, given those before it."""
        grams = _pack_ngrams([text], self._pad)
        found = np.full(len(grams), self._uniform)
        for order, level in enumerate(self._levels, start=1):
            found = _interpolate_order(level, grams & _make_mask(order), found)
        logs: Floats = np.log(found)
        return logs


def _make_mask(order: int) -> int:
    return (1 << (BITS * order)) - 1


def _pack_ngrams(texts: Sequence[Ints], pad: int) -> Ints:
    """The n-gram that ends at each token but the first of each text, in one integer."""
    packed = []
    for text in texts:
        padded = np.concatenate([np.full(ORDER - 2, pad, dtype=np.int64), text])
        gram = np.zeros(len(text) - 1, dtype=np.int64)
        for back in range(ORDER):
            gram = (gram << BITS) | padded[back : back + len(gram)]
        packed.append(gram)
    return np.concatenate(packed)


def _compute_discounts(counts: Ints) -> Floats:
    """Discounts of n-grams counted once, twice, and more often (equation 17 of the paper)."""
    n1, n2, n3, n4 = (max(1, int(np.count_nonzero(counts == k))) for k in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    raw = (0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    return np.array([min(max(value, 0.0), k) for k, value in enumerate(raw)])


def _make_level(keys: Ints, counts: Ints) -> _Level:
    discounts = _compute_discounts(counts)
    contexts, starts = np.unique(keys >> BITS, return_index=True)
    totals = np.add.reduceat(counts.astype(np.float64), starts)
    left = np.add.reduceat(discounts[np.minimum(counts, 3)], starts)
    return _Level(keys, counts.astype(np.float64), discounts, contexts, totals, left / totals)


def _find_keys(sorted_keys: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    at = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return at, sorted_keys[at] == wanted


def _interpolate_order(level: _Level, grams: Ints, lower: Floats) -> Floats:
    """Interpolate one order with the estimate of the order below."""
    at, seen = _find_keys(level.keys, grams)
    counts = np.where(seen, level.counts[at], 0.0)
    kept = counts - level.discounts[np.minimum(counts, 3).astype(np.int64)]
    context, known = _find_keys(level.contexts, grams >> BITS)
    mixed = kept / level.totals[context] + level.backoff[context] * lower
    return np.where(known, mixed, lower)
