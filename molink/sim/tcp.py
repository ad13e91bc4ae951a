"""What TCP does to a connection that was idle: it starts slowly again."""

from collections import deque

#: Bytes of a segment, and segments of the first window (RFC 6928).
SEGMENT = 1448
FIRST_WINDOW = 10 * SEGMENT
#: A retransmission timeout is the round trip and this, at least.
_LEAST_TIMEOUT = 0.2


class SlowStart:
    """The congestion window of one connection under Reno and CUBIC before any loss.

    It grows by what is acknowledged, which doubles it in a round trip, up to ``most`` bytes: what
    the link and the queue before it hold. For each timeout in which nothing was sent it is halved,
    down to the first window (RFC 2861); BBR does not do that. Losses are not modelled.
    """

    def __init__(self, round_trip: float, most: int) -> None:
        """``round_trip`` is that of the idle link, in seconds."""
        self._most = max(most, FIRST_WINDOW)
        self._timeout = round_trip + _LEAST_TIMEOUT
        self.window = FIRST_WINDOW
        self._in_flight = 0
        self._acks: deque[tuple[float, int]] = deque()
        self._sent_at = 0.0
        #: When the last bytes left this end, or will, and when they have passed the bottleneck:
        #: those of the next message come after them.
        self.last_at = 0.0
        self.passed_at = 0.0

    def room(self, now: float) -> int:
        """Bytes that may leave now."""
        while self._acks and self._acks[0][0] <= now:
            nbytes = self._acks.popleft()[1]
            self._in_flight -= nbytes
            self.window = min(self._most, self.window + nbytes)
        while self._in_flight == 0 and now - self._sent_at > self._timeout:
            self._sent_at += self._timeout
            self.window = max(FIRST_WINDOW, self.window // 2)
        return max(0, self.window - self._in_flight)

    def sent(self, nbytes: int, now: float, passed_at: float, acknowledged_at: float) -> None:
        """``nbytes`` leave now, pass the bottleneck and are acknowledged later."""
        self._sent_at = self.last_at = now
        self.passed_at = passed_at
        self._in_flight += nbytes
        self._acks.append((acknowledged_at, nbytes))

    def next_room(self) -> float:
        """When the next acknowledgement comes, if something is in flight."""
        return self._acks[0][0]
