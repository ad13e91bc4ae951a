"""Projections that low-rank adapters change for some rows (LoRA, arXiv 2106.09685, §4.1)."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.stage.batch import SequenceRows
from molink.stage.device_copy import upload_integers
from molink.stage.linear.base import Projection
from molink.stage.linear.dense import PlainLinear

#: A batch's adapters with their rows (int64 ``[n]``, on the device); ``None`` means all rows.
AdapterRows = Sequence[tuple[int, Tensor | None]]


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """An adapter's update of a projection's outputs, which may have several parts (q, k and v).

    ``down`` stacks the parts' ``A``, so that one product computes all latents. Each of ``ups`` is a
    part's scaled ``B`` with the index of the first output that it changes.
    """

    down: PlainLinear
    ups: tuple[tuple[int, PlainLinear], ...]

    def compute_parts(self, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Compute the updates for ``rows``, each ``[T, n]`` with the index of its first output."""
        ranks = [up.weight.shape[1] for _, up in self.ups]
        latents = torch.split(self.down(rows), ranks, dim=1)
        for (first, up), part in zip(self.ups, latents, strict=True):
            yield first, up(part)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.down.nbytes + sum(up.nbytes for _, up in self.ups)


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A projection with the ``updates`` of each adapter that changes it, by adapter number.

    A plain call computes only the outputs of ``base``; see :func:`apply_projection`.
    """

    base: Projection
    updates: Mapping[int, LowRankUpdate]

    def __call__(self, rows: Tensor) -> Tensor:
        return self.base(rows)

    def apply_adapters(self, rows: Tensor, adapters: AdapterRows) -> Tensor:
        """Return outputs ``[T, out]`` with each adapter's updates in its rows."""
        result = self.base(rows)
        for number, chosen in adapters:
            update = self.updates.get(number)
            if update is None:
                continue
            given = rows if chosen is None else rows.index_select(0, chosen)
            for first, added in update.compute_parts(given):
                changed = result[:, first : first + added.shape[1]]
                if chosen is None:
                    changed.add_(added)
                else:
                    changed.index_add_(0, chosen, added)
        return result

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + sum(update.nbytes for update in self.updates.values())


def apply_projection(projection: Projection, rows: Tensor, adapters: AdapterRows | None) -> Tensor:
    """Return a projection's outputs ``[T, out]``; some rows may have adapters."""
    if adapters is None or not isinstance(projection, AdaptedLinear):
        return projection(rows)
    return projection.apply_adapters(rows, adapters)


def group_by_adapter(sequences: Sequence[SequenceRows], device: torch.device) -> AdapterRows | None:
    """Group a batch's rows by adapter; ``None`` if no sequence has one."""
    numbers = {sequence.adapter for sequence in sequences}
    if numbers == {0}:
        return None
    if len(numbers) == 1:
        return [(number, None) for number in numbers]
    rows: dict[int, array[int]] = {number: array("q") for number in sorted(numbers - {0})}
    first = 0
    for sequence in sequences:
        if sequence.adapter:
            rows[sequence.adapter].extend(range(first, first + sequence.count))
        first += sequence.count
    return [(number, upload_integers(chosen, device)) for number, chosen in rows.items()]
