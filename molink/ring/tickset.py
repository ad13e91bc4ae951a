"""Which ticks a stage has completed."""

from collections.abc import Iterable


class TickSet:
    """Ticks from 1 on: a watermark below which all are in, and the few that are in above it.

    Ticks are dense (each number is used once), so the watermark follows and memory stays bounded by
    how far ticks overtake each other. Tick 0 stands for "before anything" and is always in.
    """

    def __init__(self) -> None:
        #: Every tick up to and including this one is in.
        self.watermark = 0
        self._above: set[int] = set()

    def __contains__(self, tick: int) -> bool:
        return tick <= self.watermark or tick in self._above

    def __len__(self) -> int:
        """Ticks that are kept one by one."""
        return len(self._above)

    def add(self, tick: int) -> None:
        """Put ``tick`` in."""
        if tick <= self.watermark:
            return
        self._above.add(tick)
        while self.watermark + 1 in self._above:
            self.watermark += 1
            self._above.remove(self.watermark)

    def missing(self, ticks: Iterable[int]) -> set[int]:
        """Those of ``ticks`` that are not in."""
        return {tick for tick in ticks if tick not in self}
