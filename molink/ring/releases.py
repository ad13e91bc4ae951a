"""Releases that a stage can't complete yet."""

from collections.abc import Iterator

from molink.ring.tickset import TickSet
from molink.wire.messages.data import Release


class Releases:
    """Those that wait, each with the ticks it waits for."""

    def __init__(self, complete: TickSet) -> None:
        """``complete`` are the stage's ticks, which somebody else adds to."""
        self._complete = complete
        self._waiting: dict[int, tuple[Release, set[int]]] = {}

    def __contains__(self, tick: int) -> bool:
        return tick in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, release: Release, ticks: set[int]) -> None:
        """One that is complete once all of ``ticks`` are."""
        self._waiting[release.tick] = release, self._complete.missing(ticks)

    def ripe(self) -> Iterator[Release]:
        """Remove those that wait for nothing any more.

        Each is to be completed before the next is asked for: others may wait for it.
        """
        found = True
        while found:
            found = False
            for tick, (release, missing) in list(self._waiting.items()):
                missing.intersection_update(self._complete.missing(missing))
                if not missing:
                    del self._waiting[tick]
                    yield release
                    found = True

    def problems(self) -> Iterator[str]:
        """What must not be."""
        for tick, (_, missing) in self._waiting.items():
            if tick in self._complete:
                yield f"release {tick} is complete but still waited for"
            if not self._complete.missing(missing):
                yield f"release {tick} waits for nothing"
