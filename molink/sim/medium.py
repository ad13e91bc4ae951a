"""The way of bytes from one stage to the next: a bottleneck, then a latency."""

from collections import deque
from collections.abc import Callable

from molink.sim.tcp import SEGMENT, SlowStart
from molink.wire.data import Lane


class Medium:
    """A bottleneck of ``rate`` bytes/s, first in first out, then ``latency`` seconds.

    Both lanes feed it, message by message: while both have messages waiting they get on in the
    order in which these were sent. (Two TCP connections would share it segment by segment, so a
    decode of the other lane would pass part of the backlog.) A lane that has ``queue`` bytes in
    front of the bottleneck is not ready for more. With ``slow_start`` each lane's connection has a
    congestion window that shrinks while it is idle (:class:`~molink.sim.tcp.SlowStart`). Loss is
    not modelled; ``rate`` is what is left after headers.
    """

    def __init__(
        self, rate: float, latency: float, queue: int, *, slow_start: bool = False
    ) -> None:
        self.rate = rate
        self.latency = latency
        self._queue = queue
        self.nbytes = 0
        self.busy_s = 0.0
        self._free_at = 0.0
        most = int(2 * latency * rate) + queue
        self._windows = {lane: SlowStart(2 * latency, most) for lane in Lane if slow_start}
        #: When the messages of a lane have passed the bottleneck, and their sizes.
        self._passing: dict[Lane, deque[tuple[float, int]]] = {lane: deque() for lane in Lane}
        self._backlog = dict.fromkeys(Lane, 0)

    def send(self, lane: Lane, nbytes: int, now: float) -> tuple[float, float, float]:
        """A message enters: when it begins and ends to pass the bottleneck, and when it arrives."""
        window = self._windows.get(lane)
        begin = max(now, self._free_at)
        if window is None:
            end = self._free_at = begin + nbytes / self.rate
        else:
            end = self._windowed(window, nbytes, now)
        self._passing[lane].append((end, nbytes))
        self._backlog[lane] += nbytes
        self.nbytes += nbytes
        self.busy_s += nbytes / self.rate
        return begin, end, end + self.latency

    def _windowed(self, window: SlowStart, nbytes: int, now: float) -> float:
        """When the last of a message has passed that leaves as its connection's window lets it.

        What has to wait for acknowledgements does not hold up the other lane, which would pass it.
        """
        at = max(now, window.last_at)
        end = max(at, window.passed_at)
        while nbytes:
            room = min(nbytes, window.room(at))
            if room < min(nbytes, SEGMENT):
                at = window.next_room()
                continue
            begin = max(at, end, self._free_at if at == now else 0.0)
            end = begin + room / self.rate
            if at == now:
                self._free_at = end
            window.sent(room, at, end, end + 2 * self.latency)
            nbytes -= room
        return end

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
