"""The way of bytes from one stage to the next: a bottleneck, then a latency."""

from collections import deque
from collections.abc import Callable

from molink.wire.data import Lane


class Medium:
    """A bottleneck of ``rate`` bytes/s, first in first out, then ``latency`` seconds.

    Both lanes feed it, message by message: while both have messages waiting they get on in the
    order in which these were sent. (Two TCP connections would share it segment by segment, so a
    decode of the other lane would pass part of the backlog.) A lane that has ``queue`` bytes in
    front of the bottleneck is not ready for more. Slow start, loss and what TCP forgets when idle
    are not modelled; ``rate`` is what is left after headers.
    """

    def __init__(self, rate: float, latency: float, queue: int) -> None:
        self.rate = rate
        self.latency = latency
        self._queue = queue
        self.nbytes = 0
        self.busy_s = 0.0
        self._free_at = 0.0
        #: When the messages of a lane have passed the bottleneck, and their sizes.
        self._passing: dict[Lane, deque[tuple[float, int]]] = {lane: deque() for lane in Lane}
        self._backlog = dict.fromkeys(Lane, 0)

    def send(self, lane: Lane, nbytes: int, now: float) -> tuple[float, float, float]:
        """A message enters: when it begins and ends to pass the bottleneck, and when it arrives."""
        begin = max(now, self._free_at)
        end = self._free_at = begin + nbytes / self.rate
        self._passing[lane].append((end, nbytes))
        self._backlog[lane] += nbytes
        self.nbytes += nbytes
        self.busy_s += end - begin
        return begin, end, end + self.latency

    def backlog(self, lane: Lane, now: float) -> int:
        """Bytes of a lane that have not passed the bottleneck."""
        passing = self._passing[lane]
        while passing and passing[0][0] <= now:
            self._backlog[lane] -= passing.popleft()[1]
        return self._backlog[lane]

    def is_ready(self, lane: Lane, now: float) -> bool:
        """Whether a lane takes more."""
        return self.backlog(lane, now) < self._queue

    def ready_at(self, lane: Lane) -> float:
        """When a lane that is not ready will be, if nothing more is sent on it."""
        left = self._backlog[lane]
        for end, nbytes in self._passing[lane]:
            left -= nbytes
            if left < self._queue:
                return end
        return 0.0


#: Told of every message on a link: stage it comes from, whether it has prefill rows, begin and end
#: at the bottleneck.
OnTransfer = Callable[[int, bool, float, float], None]
