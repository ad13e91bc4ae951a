"""Predicts a stage's next decode step: case 3 of the MoLink paper's interval (§4)."""

from dataclasses import dataclass

from molink.facts.ring_times import RingTimes
from molink.util.ewma import Ewma
from molink.wire.messages.data_plane import Volume

#: Weight of a round trip in the running mean of the slowdown.
SMOOTHING = 0.2
#: Upper bound of a counted round trip as a multiple of the floor; beyond it a request has waited
#: elsewhere.
MAX_SLOWDOWN = 4.0
#: Share of their round trip by which rows may be late before they are no longer expected.
OVERDUE = 0.5


@dataclass(slots=True, eq=False)
class _Expected:
    """Decode rows that should return together."""

    finished_at: float
    floor: float
    due_at: float
    requests: set[int]

    @property
    def overdue_at(self) -> float:
        """The time after which the rows are no longer awaited."""
        return self.due_at + OVERDUE * (self.due_at - self.finished_at)

    @property
    def expires_at(self) -> float:
        """The time at which the rows are dropped; their return before measures a round trip."""
        return self.finished_at + (1 + OVERDUE) * MAX_SLOWDOWN * self.floor


class RoundTripClock:
    """Remembers when each decode volume finished; its requests return one round trip later.

    The paper's ``t_p + T_o + T_m`` predicts when the first batch of the latest iteration finishes
    here again, in a ring without waiting. This clock multiplies the round trip by its recent
    slowdown, and predicts the volume that is due first.
    """

    def __init__(self, times: RingTimes) -> None:
        #: Minimum round trip by profiles and links; replaced when these are measured.
        self.times = times
        self._by_request: dict[int, _Expected] = {}
        #: Volumes with outstanding requests, in order of completion.
        self._expected: dict[int, _Expected] = {}
        self._slowdown = Ewma(SMOOTHING, 1.0)

    def on_decode_finished(self, volume: Volume, now: float) -> float | None:
        """Record a finished decode step of ``volume``.

        Returns:
            Seconds until the next decode rows should finish; 0 if they are late, ``None`` if
            unknown.
        """
        # Lookahead rows follow the rows before them in less than a round trip.
        requests = {
            request_slice.request
            for request_slice in volume.slices
            if not request_slice.is_lookahead
        }
        self._update_slowdown(requests, now)
        for request in requests:
            self.on_request_finished(request)
        floor = self.times.round_trip_s(volume.count, volume.context)
        if floor > 0 and requests:
            entry = _Expected(now, floor, now + self._slowdown.get_or(1.0) * floor, requests)
            self._expected[id(entry)] = entry
            self._by_request.update(dict.fromkeys(requests, entry))
        return self._next(now)

    def on_request_finished(self, request: int) -> None:
        """Stop expecting a request."""
        entry = self._by_request.pop(request, None)
        if entry is not None:
            entry.requests.discard(request)
            if not entry.requests:
                del self._expected[id(entry)]

    def _update_slowdown(self, requests: set[int], now: float) -> None:
        """Measure the round trip of requests that returned in time."""
        entries = {
            id(self._by_request[each]): self._by_request[each]
            for each in requests
            if each in self._by_request
        }
        for entry in entries.values():
            seen = min(MAX_SLOWDOWN, (now - entry.finished_at) / entry.floor)
            self._slowdown.add_sample(seen, SMOOTHING / len(entries))

    def _next(self, now: float) -> float | None:
        for entry in [each for each in self._expected.values() if each.expires_at < now]:
            for request in list(entry.requests):
                self.on_request_finished(request)
        awaited = [each.due_at for each in self._expected.values() if now <= each.overdue_at]
        return max(0.0, min(awaited) - now) if awaited else None
