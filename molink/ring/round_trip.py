"""When a stage's next decode step comes: case 3 of the MoLink paper's interval (§4)."""

from dataclasses import dataclass

from molink.facts.ring_times import RingTimes
from molink.wire.messages.data_plane import Volume

#: Weight of the last turn in the running mean of how much longer than the floor turns take.
SMOOTHING = 0.2
#: A turn counts as at most so many floors: a request may have waited for other things.
MAX_SLOWDOWN = 4.0
#: Rows that are later than this share of their turn are not expected any more.
OVERDUE = 0.5


@dataclass(slots=True, eq=False)
class _Expected:
    """Decode rows that will come again together."""

    finished_at: float
    floor: float
    due_at: float
    requests: set[int]

    @property
    def overdue_at(self) -> float:
        """When nobody waits for them any more."""
        return self.due_at + OVERDUE * (self.due_at - self.finished_at)

    @property
    def expires_at(self) -> float:
        """When they are forgotten: until then, their return still tells how long a turn takes."""
        return self.finished_at + (1 + OVERDUE) * MAX_SLOWDOWN * self.floor


class RoundTripClock:
    """Remembers when each decode volume was finished here; its requests are back a turn later.

    The paper's ``t_p + T_o + T_m`` is when the first batch of the latest iteration will have
    finished here again. Its terms are those of a ring that waits for nothing; ours are multiplied
    by how much longer turns have taken of late. The next volume is the one that is due first.
    """

    def __init__(self, times: RingTimes) -> None:
        #: What a turn takes by profiles and links; may be replaced as they are measured anew.
        self.times = times
        self._by_request: dict[int, _Expected] = {}
        #: Volumes with requests left, in the order in which they were finished.
        self._expected: dict[int, _Expected] = {}
        self._slowdown = 1.0

    def on_decode_finished(self, volume: Volume, now: float) -> float | None:
        """A decode step of ``volume`` is finished.

        Returns:
            In how many seconds the next decode rows should be finished, for
            ``DecodeFinishedEvent``; 0 if they are late, ``None`` if unknown.
        """
        # Rows that go ahead come when they like: no turn after those before them.
        requests = {group.request for group in volume.slices if not group.is_lookahead}
        self._update_slowdown(requests, now)
        for request in requests:
            self.on_request_finished(request)
        floor = self.times.round_trip_s(volume.count, volume.context)
        if floor > 0 and requests:
            entry = _Expected(now, floor, now + self._slowdown * floor, requests)
            self._expected[id(entry)] = entry
            self._by_request.update(dict.fromkeys(requests, entry))
        return self._next(now)

    def on_request_finished(self, request: int) -> None:
        """A request is over, or is expected with others from now on."""
        entry = self._by_request.pop(request, None)
        if entry is not None:
            entry.requests.discard(request)
            if not entry.requests:
                del self._expected[id(entry)]

    def _update_slowdown(self, requests: set[int], now: float) -> None:
        """How long the turn took of those that came back together and in time."""
        entries = {
            id(self._by_request[each]): self._by_request[each]
            for each in requests
            if each in self._by_request
        }
        for entry in entries.values():
            seen = min(MAX_SLOWDOWN, (now - entry.finished_at) / entry.floor)
            self._slowdown += SMOOTHING * (seen - self._slowdown) / len(entries)

    def _next(self, now: float) -> float | None:
        for entry in [each for each in self._expected.values() if each.expires_at < now]:
            for request in list(entry.requests):
                self.on_request_finished(request)
        awaited = [each.due_at for each in self._expected.values() if now <= each.overdue_at]
        return max(0.0, min(awaited) - now) if awaited else None
