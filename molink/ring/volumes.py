"""The volumes that a stage has and has not completed."""

from collections.abc import Iterator

from molink.ring.pieces import Cutting
from molink.ring.ticks import TickSet
from molink.ring.waiting import WaitingVolume
from molink.ring.work import Segment


class Volumes:
    """By tick, from a volume's first rows on until it has run or is buried."""

    def __init__(self, complete: TickSet, cutting: Cutting) -> None:
        """``complete`` are the stage's ticks, which somebody else adds to."""
        self._complete = complete
        self._cutting = cutting
        self._volumes: dict[int, WaitingVolume] = {}
        #: Bytes of rows of those that were not taken whole.
        self.nbytes = 0

    def __contains__(self, tick: int) -> bool:
        return tick in self._volumes

    def __iter__(self) -> Iterator[WaitingVolume]:
        """Lowest ticks first; they may be removed meanwhile."""
        if len(self._volumes) < 2:
            return iter(tuple(self._volumes.values()))
        return (self._volumes[tick] for tick in sorted(self._volumes))

    def __len__(self) -> int:
        return len(self._volumes)

    def get(self, tick: int) -> WaitingVolume | None:
        """That of a tick."""
        return self._volumes.get(tick)

    def add(self, waiting: WaitingVolume) -> None:
        """One has come."""
        self._volumes[waiting.volume.tick] = waiting
        self.nbytes += waiting.nbytes

    def bury(self, waiting: WaitingVolume) -> None:
        """None of its rows will run, and none has."""
        del self._volumes[waiting.volume.tick]
        self.nbytes -= waiting.nbytes

    def take(self, waiting: WaitingVolume, count: int) -> Segment:
        """Hand out its next ``count`` rows."""
        segment = waiting.take(count)
        if waiting.is_over:
            self.nbytes -= waiting.nbytes
        return segment

    def ran(self, waiting: WaitingVolume) -> bool:
        """What was taken of it has run; whether that was its last piece. If so, it is gone."""
        waiting.running = False
        if waiting.is_over:
            del self._volumes[waiting.volume.tick]
        return waiting.is_over

    # --- questions -----------------------------------------------------------------------------

    def piece(self, waiting: WaitingVolume, riding: int = 0) -> int:
        """Rows of its next piece beside ``riding`` decode rows; 0 if it can't run now."""
        if waiting.running or not self.is_ready(waiting):
            return 0
        here = waiting.here
        if not here:
            return 0
        coming = waiting.remaining - waiting.taken - here
        if waiting.volume.prefill:
            return self._cutting.rows(here, coming, riding, waiting.pace)
        return 0 if coming else here

    def is_ready(self, waiting: WaitingVolume) -> bool:
        """Whether all is complete that its remaining rows come after."""
        if not waiting.ready:
            waiting.ready = all(rows.after in self._complete for rows in waiting.groups)
        return waiting.ready

    def begun_for(self, request: int) -> set[int]:
        """Ticks of those that have begun and have rows of ``request``."""
        return {
            tick
            for tick, waiting in self._volumes.items()
            if waiting.is_begun and any(rows.request == request for rows in waiting.groups)
        }

    @property
    def queued(self) -> int:
        """Those that run, or could."""
        if not self._volumes:
            return 0
        return sum(1 for each in self._volumes.values() if each.running or self.piece(each))

    @property
    def only_rests(self) -> bool:
        """Whether all that could run have begun."""
        return all(each.is_begun for each in self._volumes.values() if self.piece(each))

    @property
    def waiting(self) -> int:
        """Those that were not taken whole."""
        return sum(1 for each in self._volumes.values() if not each.is_over)

    def problems(self) -> Iterator[str]:
        """What must not be."""
        left = [waiting for waiting in self._volumes.values() if not waiting.is_over]
        if self.nbytes != sum(waiting.nbytes for waiting in left):
            yield f"{self.nbytes} bytes wait, say the counters"
        for tick, waiting in self._volumes.items():
            if tick in self._complete:
                yield f"volume {tick} is complete but still waited for"
            if waiting.here < 0 or not 1 <= waiting.arrived <= waiting.total:
                yield f"{waiting.taken} rows of volume {tick} were taken, of {waiting.arrived}"
            if not waiting.kept:
                yield f"volume {tick} has no rows left"
            ready = all(rows.after in self._complete for rows in waiting.groups)
            if (waiting.is_begun or waiting.ready) and not ready:
                yield f"volume {tick} has begun too early"
            if waiting.running != waiting.is_begun and (waiting.running or waiting.is_over):
                yield f"volume {tick} has run but is not complete, or runs without rows"
