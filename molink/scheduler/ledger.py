"""Ticks: who got which, and which have not come back."""

from dataclasses import dataclass

from molink.errors import InvariantError
from molink.wire.messages.data import Rows, Volume

#: Ticks that may be issued beyond the oldest one in flight; stages' memory of ticks is bounded.
MAX_SPAN = 1 << 15


@dataclass(slots=True, eq=False)
class TurnCount:
    """Counts iterations of the ring from a moment on: volumes issued one after another's return."""

    mark: int
    iterations: int = 1


class Ledger:
    """Issues ticks, from 1 on, and keeps those of volumes and releases until they return."""

    def __init__(self) -> None:
        self.last = 0
        #: In order of tick.
        self._volumes: dict[int, Volume] = {}
        #: When each of them was issued, and those of them that sample tokens.
        self._issued_at: dict[int, float] = {}
        self._awaited: dict[int, float] = {}
        self._releases: dict[int, TurnCount | None] = {}
        self._trips: list[TurnCount] = []
        self._counts = {True: 0, False: 0}
        #: Volumes in flight whose rows all go ahead; ``volumes`` doesn't count them.
        self.ahead = 0
        #: Rows of the prefill volumes in flight.
        self.prefill_rows = 0
        self.cancel_iterations_last = 0
        self.cancel_iterations_max = 0

    def issue(self) -> int:
        """The next tick."""
        self.last += 1
        return self.last

    def volumes(self, *, prefill: bool) -> int:
        """Volumes of that kind in flight."""
        return self._counts[prefill]

    def flies(self, tick: int) -> bool:
        """Whether that volume is in flight."""
        return tick in self._volumes

    @property
    def decode_rows(self) -> list[int]:
        """Rows of each decode volume in flight, those that go ahead included."""
        return [volume.count for volume in self._volumes.values() if not volume.prefill]

    @property
    def wide(self) -> bool:
        """Whether the oldest tick in flight is so old that nothing new may be issued."""
        oldest = min(next(iter(self._volumes), self.last), next(iter(self._releases), self.last))
        return self.last - oldest >= MAX_SPAN

    @property
    def awaited_since(self) -> float | None:
        """When the oldest volume in flight was issued that streams wait for a token of."""
        return next(iter(self._awaited.values()), None)

    def sent(self, volume: Volume, now: float) -> None:
        """A volume goes out under a tick of this ledger."""
        self._volumes[volume.tick] = volume
        self._issued_at[volume.tick] = now
        if _is_ahead(volume):
            self.ahead += 1
        else:
            if any(rows.sample for rows in volume.rows):
                self._awaited[volume.tick] = now
            self._counts[volume.prefill] += 1
        self.prefill_rows += _prefill_rows(volume)

    def returned(self, tick: int) -> tuple[tuple[Rows, ...], float] | None:
        """A volume is back; its rows and when it was issued, or ``None`` if none such flies."""
        volume = self._volumes.pop(tick, None)
        if volume is None:
            return None
        if _is_ahead(volume):
            self.ahead -= 1
        else:
            self._counts[volume.prefill] -= 1
        self.prefill_rows -= _prefill_rows(volume)
        for trip in self._trips:
            if tick > trip.mark:
                trip.iterations += 1
                trip.mark = self.last
        self._awaited.pop(tick, None)
        return volume.rows, self._issued_at.pop(tick)

    def cancelled(self) -> TurnCount:
        """Begin to count the iterations that a cancel takes."""
        trip = TurnCount(self.last)
        self._trips.append(trip)
        return trip

    def released(self, tick: int, trip: TurnCount | None) -> None:
        """A release goes out; ``trip`` if it is that of a cancel."""
        self._releases[tick] = trip

    def went_round(self, tick: int) -> bool:
        """A release is back; ``False`` if no such release is on its way."""
        if tick not in self._releases:
            return False
        trip = self._releases.pop(tick)
        if trip is not None:
            self._trips.remove(trip)
            self.cancel_iterations_last = trip.iterations
            self.cancel_iterations_max = max(self.cancel_iterations_max, trip.iterations)
        return True

    def flying(self, request: int) -> set[int]:
        """Ticks in flight with rows of ``request``."""
        return {
            tick
            for tick, volume in self._volumes.items()
            if any(rows.request == request for rows in volume.rows)
        }

    def validate(self) -> None:
        """Counts agree with what is in flight, and nothing is from the future.

        Raises:
            InvariantError: they don't.
        """
        ahead = [volume for volume in self._volumes.values() if _is_ahead(volume)]
        if len(ahead) != self.ahead:
            raise InvariantError(f"{len(ahead)} volumes go ahead, not {self.ahead}")
        for prefill, count in self._counts.items():
            volumes = [each for each in self._volumes.values() if each not in ahead]
            there = sum(1 for volume in volumes if volume.prefill is prefill)
            if there != count:
                raise InvariantError(f"{there} volumes (prefill: {prefill}) in flight, not {count}")
        if self.prefill_rows != sum(map(_prefill_rows, self._volumes.values())):
            raise InvariantError(f"{self.prefill_rows} prefill rows are not those in flight")
        if max([*self._volumes, *self._releases], default=0) > self.last:
            raise InvariantError(f"a tick beyond the last one issued, {self.last}, is in flight")


def _prefill_rows(volume: Volume) -> int:
    return sum(rows.count for rows in volume.rows) if volume.prefill else 0


def _is_ahead(volume: Volume) -> bool:
    return all(rows.is_ahead for rows in volume.rows)
