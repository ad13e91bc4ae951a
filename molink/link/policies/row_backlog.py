"""Volumes of one kind that wait to be sent, oldest first."""

import heapq
from dataclasses import dataclass

from molink.link.policies.base import RowsProducedEvent


@dataclass(slots=True)
class PendingRows:
    """Rows of a volume that are finished and have not been sent."""

    volume: int
    rows: int
    row_bytes: int


class RowBacklog:
    """A queue of volumes by age, which is that of their names.

    A volume of which all finished rows were sent leaves; when more are finished it comes back to
    the place of its age: before every younger one. Each operation takes O(log n) of n volumes.
    """

    def __init__(self) -> None:
        self._pending: dict[int, PendingRows] = {}
        #: Names of what is pending, each once.
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add_rows(self, produced: RowsProducedEvent) -> None:
        """A volume, or more rows of one."""
        if produced.rows <= 0:
            return
        there = self._pending.get(produced.volume)
        if there is not None:
            there.rows += produced.rows
            return
        self._pending[produced.volume] = PendingRows(
            produced.volume, produced.rows, produced.row_bytes
        )
        heapq.heappush(self._order, produced.volume)

    @property
    def first(self) -> PendingRows | None:
        """The oldest volume."""
        return self._pending[self._order[0]] if self._order else None

    def take_rows(self, rows: int) -> None:
        """``rows`` rows of the oldest volume are being sent: at least 1 and no more than it has."""
        first = self._pending[self._order[0]]
        assert 0 < rows <= first.rows
        first.rows -= rows
        if first.rows == 0:
            del self._pending[heapq.heappop(self._order)]
