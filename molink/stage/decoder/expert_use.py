"""Counts how often experts are chosen, and decides which ones should swap places."""

import torch
from torch import Tensor

#: Average choices per expert after which all counts are halved.
_WINDOW = 256
#: An expert in host memory replaces one on the device if it was chosen at least 1.5 times as often,
#: and at least 16 times more.
_MIN_RATIO, _MIN_EXCESS = 1.5, 16


class ExpertUse:
    """Recent choices of a layer's experts, by place; older choices count less and less."""

    def __init__(self, num_experts: int, resident: int) -> None:
        """The first ``resident`` places are on the device."""
        self._counts = torch.zeros(num_experts, dtype=torch.float64)
        self._resident, self._total = resident, 0

    def record_choices(self, counts: Tensor) -> None:
        """Add choices (int64 ``[experts]``) by place."""
        self._counts += counts
        self._total += int(counts.sum())
        if self._total > _WINDOW * len(self._counts):
            self._counts /= 2
            self._total //= 2

    def find_swap(self) -> tuple[int, int] | None:
        """Return the least used place on the device and the most used one in host memory.

        ``None`` if no swap pays off.
        """
        near, far = self._counts[: self._resident], self._counts[self._resident :]
        if not len(near) or not len(far):
            return None
        (cold, least), (hot, most) = (
            (int(index), float(near_or_far[index]))
            for near_or_far, index in ((near, near.argmin()), (far, far.argmax()))
        )
        if most < max(_MIN_RATIO * least, least + _MIN_EXCESS):
            return None
        return cold, self._resident + hot

    def swap_places(self, one: int, other: int) -> None:
        """Record that the experts of two places were swapped."""
        self._counts[[one, other]] = self._counts[[other, one]]

    @property
    def resident_share(self) -> float:
        """Share of recent choices that were on the device; 0 if there were none."""
        every = float(self._counts.sum())
        return float(self._counts[: self._resident].sum()) / every if every else 0.0
