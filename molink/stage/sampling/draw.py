"""Draws tokens from filtered logits: among a row's likeliest where these are all that is kept.

A number in [0, 1) per row picks from the cumulative distribution over the kept tokens in order of
their ids. How it is computed depends on the row alone, never on the others of the step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from molink.stage.sampling.filters import Filters, cut, is_filtered, limit, needs_total, weigh
from molink.stage.to_device import fetch, take_rows, upload, upload_integers
from molink.wire.messages.data import Sampling

#: How many of a row's likeliest tokens are looked at, until all that are kept are among them.
_CANDIDATES = (64, 4096, 32768)
#: Tokens are summed in blocks of so many.
BLOCK = 128
#: Logits handled at once at full width: a CPU is several times slower where they leave its cache.
_CPU_LOGITS = 1 << 18
#: The noise has 52 bits: its product with a sum stays below that sum. So has this one's.
_BELOW_ONE = 1.0 - 2.0**-52
_LOG2_E = math.log2(math.e)


class Draws:
    """Draws a token for every row of finite logits (float32 ``[n, V]``), by its ``noise``.

    First on the device, without waiting for it, then what that didn't settle.
    """

    __slots__ = ("_aims", "_filtered", "_filters", "_limits", "_logits", "_sizes", "_totals")

    def __init__(
        self, logits: Tensor, samplings: Sequence[Sampling], noise: Sequence[float]
    ) -> None:
        vocabulary = logits.shape[1]
        self._logits = logits
        self._filters = Filters.of(samplings, vocabulary, logits.device)
        self._aims = upload(torch.tensor(noise, dtype=torch.float64), logits.device)[:, None]
        self._filtered = [is_filtered(sampling, vocabulary) for sampling in samplings]
        self._limits = [limit(sampling, vocabulary) for sampling in samplings]
        self._sizes = [size for size in _CANDIDATES if size < vocabulary]
        self._totals = _totals(logits, samplings, self._filters)

    def first(self) -> tuple[Tensor, Tensor]:
        """Tokens ``[n]``, and whether each is settled, 0 or 1."""
        tokens = torch.zeros(len(self._limits), dtype=torch.int64, device=self._logits.device)
        settled = torch.ones_like(tokens)
        by_size: dict[int, list[int]] = {}
        for row, filtered in enumerate(self._filtered):
            size = self._size(row) if filtered else -1
            by_size.setdefault(size, []).append(row)
        for size, rows in by_size.items():
            if size > 0:
                drawn, enough = self._among(rows, size)
                settled = put(settled, rows, enough)
            else:
                drawn = torch.cat([self._wide(g, size == 0) for g in _grouped(rows, self._logits)])
            tokens = put(tokens, rows, drawn)
        return tokens, settled

    def rest(self, rows: list[int]) -> dict[int, int]:
        """Tokens of rows that aren't settled: their likeliest tokens weren't enough."""
        found: dict[int, int] = {}
        for size in self._sizes:
            tried = [row for row in rows if row not in found and self._size(row) < size]
            if tried:
                answers = torch.stack(self._among(tried, size), dim=1)
                drawn = zip(tried, fetch([answers])[0].tolist(), strict=True)
                found.update((row, token) for row, (token, is_enough) in drawn if is_enough)
        left = [row for row in rows if row not in found]
        for group in _grouped(left, self._logits):
            tokens = fetch([self._wide(group, True)[:, None]])[0]
            found.update(zip(group, tokens[:, 0].tolist(), strict=True))
        return found

    def _size(self, row: int) -> int:
        """How many of a row's likeliest tokens are looked at first; 0 if all are."""
        return next((size for size in self._sizes if self._limits[row] < size), 0)

    def _among(self, rows: list[int], size: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[n]`` among the likeliest, and whether all that are kept were there."""
        few, aims = self._filters.take(rows), take_rows(self._aims, rows)
        values, ids = _likeliest(take_rows(self._logits, rows), size)
        threshold, enough = cut(values, take_rows(self._totals, rows), few)
        tokens = _draw_among(values, ids, threshold, few, aims)
        return tokens, enough.to(tokens.dtype)

    def _wide(self, rows: list[int], filtered: bool) -> Tensor:
        """Tokens ``[n]`` among all."""
        part, few = take_rows(self._logits, rows), self._filters.take(rows)
        edge: Tensor | None = None
        if filtered:
            ordered = part.sort(dim=-1, descending=True).values
            edge, _ = cut(ordered, take_rows(self._totals, rows), few)
        return _draw_wide(part, edge, few, take_rows(self._aims, rows))


def put(target: Tensor, rows: list[int], values: Tensor) -> Tensor:
    """``target`` with ``values`` at ``rows``, which may be all of them."""
    if len(rows) == len(target):
        return values
    return target.index_copy_(0, upload_integers(rows, target.device), values)


def block_maxima(logits: Tensor) -> Tensor | None:
    """The greatest of each block ``[n, V / BLOCK]``; ``None`` if the vocabulary has odd ends."""
    if logits.shape[1] % BLOCK or not logits.is_contiguous():
        return None
    return logits.view(len(logits), -1, BLOCK).amax(dim=-1)


def _grouped(rows: list[int], logits: Tensor) -> list[list[int]]:
    on_cpu = logits.device.type == "cpu"
    size = max(1, _CPU_LOGITS // logits.shape[1]) if on_cpu else max(1, len(rows))
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _likeliest(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The greatest logits of each row in descending order, and their ids, ``[n, size]`` each."""
    maxima = block_maxima(logits)
    if maxima is None or 4 * size * BLOCK > logits.shape[1]:
        values, ids = logits.topk(size, dim=-1)
        return values, ids
    # They are all in the blocks with the greatest maxima.
    blocks = maxima.topk(size, dim=-1).indices[:, :, None]
    chosen = logits.view(len(logits), -1, BLOCK).gather(1, blocks.expand(-1, -1, BLOCK))
    values, places = chosen.flatten(1).topk(size, dim=-1)
    ids = blocks[:, :, 0].gather(1, places // BLOCK) * BLOCK + places % BLOCK
    return values, ids


def _totals(logits: Tensor, samplings: Sequence[Sampling], filters: Filters) -> Tensor:
    """Sums of all weights ``[n, 1]`` of the rows that need it."""
    totals = filters.numbers.new_zeros(len(samplings), 1)
    needed = [i for i, s in enumerate(samplings) if needs_total(s, logits.shape[1])]
    for rows in _grouped(needed, logits):
        weights = _weigh_all(take_rows(logits, rows), filters.take(rows))
        sums = _block_sums(weights).sum(dim=-1, keepdim=True)
        totals.index_copy_(0, upload_integers(rows, logits.device), sums)
    return totals


def _draw_among(
    values: Tensor, ids: Tensor, threshold: Tensor, filters: Filters, noise: Tensor
) -> Tensor:
    """Tokens ``[n]``, where all that are kept are among ``values`` (with ``ids``, ``[n, c]``)."""
    ids, order = ids.sort(dim=-1)
    weights = weigh(values, values[:, :1], filters) * (values >= threshold)
    cumulative = weights.gather(1, order).cumsum(dim=-1)
    places = torch.searchsorted(cumulative, cumulative[:, -1:] * noise, right=True)
    return ids.gather(1, places).flatten()


def _draw_wide(logits: Tensor, threshold: Tensor | None, filters: Filters, noise: Tensor) -> Tensor:
    """Tokens ``[n]`` among whole rows: first the block, then the token in it."""
    weights = _weigh_all(logits, filters)
    if threshold is not None:
        # A product, since masked_fill is several times slower on a CPU.
        weights[:, : logits.shape[1]] *= logits >= threshold
    sums = _block_sums(weights)
    cumulative = sums.cumsum(dim=-1)
    aims = cumulative[:, -1:] * noise
    blocks = torch.searchsorted(cumulative, aims, right=True)
    before = cumulative.gather(1, blocks) - sums.gather(1, blocks)
    index = blocks[:, :, None].expand(-1, -1, BLOCK)
    block = weights.view(len(weights), -1, BLOCK).gather(1, index)[:, 0].double()
    within = block.cumsum(dim=-1)
    # A block's sum in float32 isn't quite that of its tokens in float64: so a part of it.
    parts = ((aims - before) / sums.gather(1, blocks)).clamp(0.0, _BELOW_ONE)
    places = torch.searchsorted(within, within[:, -1:] * parts, right=True)
    return (blocks * BLOCK + places).flatten()


def _weigh_all(logits: Tensor, filters: Filters) -> Tensor:
    """Weights (float32) of all logits, relative to the greatest; zeros up to a whole block."""
    scales = (_LOG2_E / filters.temperatures).to(logits.dtype)
    relative = logits - logits.amax(dim=-1, keepdim=True)
    ends = -logits.shape[1] % BLOCK
    if ends:
        relative = pad(relative, (0, ends), value=-math.inf)
    # As a power of two: on a CPU exp is four times slower, and once more so for what can't come.
    return relative.mul_(scales).exp2_()


def _block_sums(weights: Tensor) -> Tensor:
    """Sums (float64) of the blocks of each row, ``[n, blocks]``; each in float32, at its pace."""
    return weights.view(len(weights), -1, BLOCK).sum(dim=-1).double()
