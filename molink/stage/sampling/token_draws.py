"""Draws tokens from filtered logits, among the likeliest ones if these include all kept tokens.

A number in [0, 1) per row picks from the cumulative distribution over kept tokens in id order. The
method depends on the row alone, never on other rows of the step.
"""

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import pad

from molink.stage.device_copy import download_tensors, gather_rows, upload_integers
from molink.stage.sampling.filters import (
    SamplingFilters,
    effective_top_k,
    find_cutoff,
    is_filtered,
    needs_total,
    weigh_logits,
)
from molink.stage.sampling.greedy import BLOCK_TOKENS, block_maxima
from molink.wire.messages.data_plane import SamplingParams

#: Numbers of likeliest tokens tried in turn.
_CANDIDATE_COUNTS = (64, 4096, 32768)
#: Logits processed at once on a CPU, to stay in cache.
_MAX_CPU_LOGITS = 1 << 18
#: Factor that keeps a product with a sum below the sum, as 52-bit noise does.
_BELOW_ONE = 1.0 - 2.0**-52
_LOG2_E = math.log2(math.e)


class TokenDraws:
    """Draws a token per row of finite logits (float32 ``[n, V]``) with its ``noise``.

    Draws on the device without waiting first, and then for rows that remain open.
    """

    def __init__(
        self, logits: Tensor, params_of_rows: Sequence[SamplingParams], noise: Sequence[float]
    ) -> None:
        vocabulary = logits.shape[1]
        self._logits = logits
        self._filters = SamplingFilters.from_sampling(
            params_of_rows, noise, vocabulary, logits.device
        )
        self._filtered = [
            is_filtered(sampling_params, vocabulary) for sampling_params in params_of_rows
        ]
        self._top_k = [
            effective_top_k(sampling_params, vocabulary) for sampling_params in params_of_rows
        ]
        self._candidate_counts = [size for size in _CANDIDATE_COUNTS if size < vocabulary]
        self._totals = _total_weights(logits, params_of_rows, self._filters)

    def draw_candidates(self) -> tuple[Tensor, Tensor]:
        """Return tokens ``[n]``, and whether each is final (0 or 1)."""
        by_size: dict[int, list[int]] = {}
        for row, filtered in enumerate(self._filtered):
            size = self._num_candidates(row) if filtered else -1
            by_size.setdefault(size, []).append(row)
        (size, rows), *others = by_size.items()
        if size > 0 and not others:
            return self._draw_likeliest(rows, size)
        tokens = torch.zeros(len(self._top_k), dtype=torch.int64, device=self._logits.device)
        settled = torch.ones_like(tokens)
        for size, rows in by_size.items():
            if size > 0:
                drawn, enough = self._draw_likeliest(rows, size)
                settled = scatter_rows(settled, rows, enough)
            else:
                drawn = torch.cat(
                    [self._draw_all(g, size == 0) for g in _split_rows(rows, self._logits)]
                )
            tokens = scatter_rows(tokens, rows, drawn)
        return tokens, settled

    def draw_remaining(self, rows: list[int]) -> dict[int, int]:
        """Draw tokens of rows whose likeliest tokens didn't suffice."""
        found: dict[int, int] = {}
        for size in self._candidate_counts:
            tried = [row for row in rows if row not in found and self._num_candidates(row) < size]
            if tried:
                answers = torch.stack(self._draw_likeliest(tried, size), dim=1)
                drawn = zip(tried, download_tensors([answers])[0].tolist(), strict=True)
                found.update((row, token) for row, (token, is_enough) in drawn if is_enough)
        left = [row for row in rows if row not in found]
        for group in _split_rows(left, self._logits):
            tokens = download_tensors([self._draw_all(group, True)[:, None]])[0]
            found.update(zip(group, tokens[:, 0].tolist(), strict=True))
        return found

    def _num_candidates(self, row: int) -> int:
        """Choose the number of likeliest tokens to try first; 0 = all."""
        return next((size for size in self._candidate_counts if self._top_k[row] < size), 0)

    def _draw_likeliest(self, rows: list[int], size: int) -> tuple[Tensor, Tensor]:
        """Draw tokens ``[n]`` among the likeliest, and whether these include all kept ones."""
        few = self._filters.select_rows(rows)
        values, ids = _find_likeliest(gather_rows(self._logits, rows), size)
        threshold, enough = find_cutoff(values, gather_rows(self._totals, rows), few)
        tokens = _draw_among(values, ids, threshold, few)
        return tokens, enough.to(tokens.dtype)

    def _draw_all(self, rows: list[int], filtered: bool) -> Tensor:
        """Draw tokens ``[n]`` among all."""
        part, few = gather_rows(self._logits, rows), self._filters.select_rows(rows)
        edge: Tensor | None = None
        if filtered:
            ordered = part.sort(dim=-1, descending=True).values
            edge, _ = find_cutoff(ordered, gather_rows(self._totals, rows), few)
        return _draw_wide(part, edge, few)


def scatter_rows(target: Tensor, rows: list[int], values: Tensor) -> Tensor:
    """Write ``values`` at ``rows`` of ``target``."""
    if len(rows) == len(target):
        return values
    return target.index_copy_(0, upload_integers(rows, target.device), values)


def _split_rows(rows: list[int], logits: Tensor) -> list[list[int]]:
    on_cpu = logits.device.type == "cpu"
    size = max(1, _MAX_CPU_LOGITS // logits.shape[1]) if on_cpu else max(1, len(rows))
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _find_likeliest(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Find each row's largest logits in descending order, and their ids, ``[n, size]`` each."""
    maxima = block_maxima(logits)
    if maxima is None or 4 * size * BLOCK_TOKENS > logits.shape[1]:
        values, ids = logits.topk(size, dim=-1)
        return values, ids
    # They lie in the blocks with the largest maxima.
    blocks = maxima.topk(size, dim=-1).indices[:, :, None]
    chosen = logits.view(len(logits), -1, BLOCK_TOKENS).gather(
        1, blocks.expand(-1, -1, BLOCK_TOKENS)
    )
    values, places = chosen.flatten(1).topk(size, dim=-1)
    ids = blocks[:, :, 0].gather(1, places // BLOCK_TOKENS) * BLOCK_TOKENS + places % BLOCK_TOKENS
    return values, ids


def _total_weights(
    logits: Tensor, params_of_rows: Sequence[SamplingParams], filters: SamplingFilters
) -> Tensor:
    """Sum all weights, ``[n, 1]``, of rows that need the sum."""
    totals = filters.numbers.new_zeros(len(params_of_rows), 1)
    needed = [i for i, s in enumerate(params_of_rows) if needs_total(s, logits.shape[1])]
    for rows in _split_rows(needed, logits):
        weights = _weigh_all(gather_rows(logits, rows), filters.select_rows(rows))
        sums = _block_sums(weights).sum(dim=-1, keepdim=True)
        if len(rows) == len(totals):
            return sums
        totals.index_copy_(0, upload_integers(rows, logits.device), sums)
    return totals


def _draw_among(values: Tensor, ids: Tensor, threshold: Tensor, filters: SamplingFilters) -> Tensor:
    """Draw tokens ``[n]`` if all kept tokens are among ``values`` (with ``ids``, ``[n, c]``)."""
    ids, order = ids.sort(dim=-1)
    weights = weigh_logits(values, values[:, :1], filters) * (values >= threshold)
    cumulative = weights.gather(1, order).cumsum(dim=-1)
    places = torch.searchsorted(cumulative, cumulative[:, -1:] * filters.noise, right=True)
    return ids.gather(1, places).flatten()


def _draw_wide(logits: Tensor, threshold: Tensor | None, filters: SamplingFilters) -> Tensor:
    """Draw tokens ``[n]`` from whole rows: first the block, then the token."""
    weights = _weigh_all(logits, filters)
    if threshold is not None:
        # Multiplication is several times faster than masked_fill on a CPU.
        weights[:, : logits.shape[1]] *= logits >= threshold
    sums = _block_sums(weights)
    cumulative = sums.cumsum(dim=-1)
    aims = cumulative[:, -1:] * filters.noise
    blocks = torch.searchsorted(cumulative, aims, right=True)
    before = cumulative.gather(1, blocks) - sums.gather(1, blocks)
    index = blocks[:, :, None].expand(-1, -1, BLOCK_TOKENS)
    block = weights.view(len(weights), -1, BLOCK_TOKENS).gather(1, index)[:, 0].double()
    within = block.cumsum(dim=-1)
    # A block's float32 sum differs from the float64 sum of its tokens, so scale to a fraction.
    parts = ((aims - before) / sums.gather(1, blocks)).clamp(0.0, _BELOW_ONE)
    places = torch.searchsorted(within, within[:, -1:] * parts, right=True)
    return (blocks * BLOCK_TOKENS + places).flatten()


def _weigh_all(logits: Tensor, filters: SamplingFilters) -> Tensor:
    """Return float32 weights of all logits relative to the largest, padded to whole blocks."""
    scales = (_LOG2_E / filters.temperatures).to(logits.dtype)
    relative = logits - logits.amax(dim=-1, keepdim=True)
    ends = -logits.shape[1] % BLOCK_TOKENS
    if ends:
        relative = pad(relative, (0, ends), value=-math.inf)
    # exp2 is four times faster than exp on a CPU.
    return relative.mul_(scales).exp2_()


def _block_sums(weights: Tensor) -> Tensor:
    """Return float64 ``[n, blocks]`` sums of blocks, each summed in float32."""
    return weights.view(len(weights), -1, BLOCK_TOKENS).sum(dim=-1).double()


_KEY = struct.Struct("<QQ")
_BITS = 52


def uniform_noise(seed: int, position: int) -> float:
    """Return a random number in [0, 1) for the token at ``position`` of a request with ``seed``.

    A pure function, equal on all devices. It has 52 bits, so that its product with a sum stays
    below the sum.
    """
    digest = blake2b(_KEY.pack(seed, position), digest_size=8, person=b"molink-noise").digest()
    return (int.from_bytes(digest, "little") >> (64 - _BITS)) / float(1 << _BITS)
