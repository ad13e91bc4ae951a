"""Measures how fast a link delivers, from sent and acknowledged messages, without I/O.

Like BBR (Cardwell et al., 2016) it takes the maximum of recent delivery rates and must not mistake
an application-limited sender for a slow link. Therefore it counts only time in which the bottleneck
was busy: a message sent before the previous one can have left the bottleneck. This holds for bursts
and for endless streams. Traffic that never queues says nothing about the rate.
"""

from collections import deque
from dataclasses import dataclass

import msgspec

from molink.wire.messages.data_plane import Channel

#: Seconds of busy time per delivery rate. Acknowledgements jitter by a few ms, a tenth of this.
WINDOW = 0.05
#: The rate over :data:`WINDOW` is at most this multiple of the rate over this longer window
#: (seconds): after a pause, held-up data arrives faster than the link's rate.
_LONG_WINDOW = 0.25
_MAX_CATCHING_UP = 1.1
#: Seconds for which a maximum counts, so that a slowdown of the link is detected within 2 s. This
#: clock stops without acknowledgements.
MEMORY_S = 1.0
#: Maximum step of that clock in seconds: a pause yields no rates that could replace older ones.
_MAX_STEP = 0.25
#: Evidence for a first guess: seconds of busy time (a chunk takes 5 ms), or bytes in one burst
#: (four times a TCP connection's initial window).
_FIRST_WINDOW = 0.004
_FIRST_BYTES = 64 * 1024
#: Acknowledgements within this many seconds of each other count as one, since a later one or the
#: event loop was held up; together they span at most a chunk's 5 ms.
_BATCH_GAP = 0.001
_MAX_BATCH_GAP = 0.005
#: Share of an interval for which the bottleneck may have been idle, to tolerate timer jitter.
_SLACK = 0.1
#: Minimum busy seconds of a burst; in a shorter one a single late acknowledgement would set the
#: rate.
_MIN_BURST = 0.02
#: An interval longer than this multiple of the median of the last ones, per byte, is a gap in
#: sending.
_HOLE = 3.0
_INTERVALS = 16
#: Tolerance of time comparisons in seconds, for floating-point sums.
_EPSILON = 1e-6
#: Upper bound of a rate in bytes/s; data that arrives at once has no rate.
MAX_RATE = 1e12


class _Flight(msgspec.Struct, frozen=True):
    nbytes: int
    sent_at: float


@dataclass(slots=True)
class _Delivered:
    """Cumulative sums at an acknowledgement, or at several that count as one."""

    began: float
    ended: float
    active: float
    busy: float
    sent: float
    nbytes: int


class RateMeter:
    """The rate of one link in bytes/s; ``None`` until known."""

    def __init__(self, start: float | None = None) -> None:
        """``start`` is used until the first measurement."""
        self.rate = start
        #: Whether the rate is only a first guess.
        self._is_guess = start is None
        self._flights: dict[Channel, deque[_Flight]] = {channel: deque() for channel in Channel}
        #: Whether a queue was seen recently. Without one, a lower rate says nothing about the link.
        self.is_queued = True
        #: Unacknowledged bytes of both channels.
        self.in_flight = 0
        #: Current burst: its start and the bytes that have arrived.
        self._burst_at = 0.0
        self._burst = 0
        #: The last acknowledgement on the bulk channel, the send time of its newest message, and
        #: bytes acknowledged on the other channel since.
        self._last_ack_at: float | None = None
        self._newest = 0.0
        self._other_bytes = 0
        #: Minimum seconds from sending a bulk message to its acknowledgement.
        self._minimum = float("inf")
        self._points: deque[_Delivered] = deque()
        #: Total bytes that have arrived, and that total at recent times.
        self._total = 0
        self._carried: deque[tuple[float, int]] = deque()
        #: Busy time before the current burst.
        self._burst_from = 0.0
        #: Seconds per byte of the last intervals.
        self._byte_times: deque[float] = deque(maxlen=_INTERVALS)
        #: Rates with their times on the active clock, in descending order: the first is the
        #: maximum.
        self._samples: deque[tuple[float, float]] = deque()

    # --- events ----------------------------------------------------------------------------------

    def on_sent(self, channel: Channel, nbytes: int, now: float) -> None:
        """Record a sent message."""
        if self.in_flight == 0:
            self._burst_at, self._burst = now, 0
        self._flights[channel].append(_Flight(nbytes, now))
        self.in_flight += nbytes

    def reset_channel(self, channel: Channel) -> None:
        """Handle a new connection, on which data in flight is sent again."""
        flights = self._flights[channel]
        self.in_flight -= sum(flight.nbytes for flight in flights)
        flights.clear()
        self._last_ack_at = None

    def on_acknowledged(
        self, channel: Channel, nbytes: int, elapsed: float, rtt: float | None, now: float
    ) -> None:
        """Record an acknowledgement of ``nbytes``, the newest sent ``elapsed`` seconds ago.

        ``rtt`` is the recent minimum round trip in seconds. Only bulk messages are acknowledged one
        by one at once, so only they measure time.
        """
        newest = self._pop_flights(channel, nbytes, now - elapsed)
        self._burst += nbytes
        self._total += nbytes
        if channel is not Channel.BULK:
            self._other_bytes += nbytes
            return
        self._minimum = min(self._minimum, elapsed)
        if self._last_ack_at is not None:
            gap = now - self._last_ack_at
            latest = self._last_ack_at - (self._minimum if rtt is None else rtt)
            busy = newest <= latest + _SLACK * gap
            # Bytes of the other channel are acknowledged too late for a first guess.
            beside = 0 if self._is_guess else self._other_bytes
            self._add_interval(gap, newest - self._newest, nbytes + beside, busy, now)
        self._last_ack_at, self._newest, self._other_bytes = now, newest, 0
        self._raise_to_carried(now)
        if self._is_guess and self._burst >= _FIRST_BYTES and now > self._burst_at:
            # A lower bound, since it includes the round trip.
            self._raise_rate(self._burst / (now - self._burst_at))

    def _pop_flights(self, channel: Channel, nbytes: int, sent_at: float) -> float:
        """Drop arrived messages; return the send time of the newest."""
        flights, freed, newest = self._flights[channel], 0, sent_at
        while flights and freed < nbytes:
            flight = flights.popleft()
            freed += flight.nbytes
            newest = flight.sent_at
        if newest < sent_at - _EPSILON:
            # It was sent twice.
            while flights and flights[0].sent_at <= sent_at + _EPSILON:
                freed += flights.popleft().nbytes
        self.in_flight -= freed
        return max(newest, sent_at)

    def _raise_to_carried(self, now: float) -> None:
        """Raise the rate to the average rate of arrived bytes, even if the link was not busy."""
        carried = self._carried
        if not carried or now - carried[-1][0] >= _MAX_BATCH_GAP:
            carried.append((now, self._total))
        while len(carried) > 1 and now - carried[1][0] >= _LONG_WINDOW:
            carried.popleft()
        span = now - carried[0][0]
        if self.rate is not None and span >= _LONG_WINDOW:
            rate = min((self._total - carried[0][1]) / span, MAX_RATE)
            if rate > self.rate:
                self._add_sample(rate, self._points[-1].active if self._points else 0.0)

    def queue_delay(self, now: float) -> float:
        """Return the seconds until the bottleneck has sent all data in flight.

        A queue left by earlier, acknowledged messages is not counted.
        """
        if self.rate is None or not self.in_flight:
            return 0.0
        flights = sorted((f for each in self._flights.values() for f in each), key=_sent_at)
        free_at = now
        for index, flight in enumerate(flights):
            begin = flight.sent_at if index == 0 else max(free_at, flight.sent_at)
            free_at = begin + flight.nbytes / self.rate
        return max(0.0, free_at - now)

    # --- rates -----------------------------------------------------------------------------------

    def _add_interval(self, gap: float, sent: float, nbytes: int, busy: bool, now: float) -> None:
        """Record that ``nbytes``, sent within ``sent`` seconds, were acknowledged within ``gap``
        seconds.

        ``busy`` says whether the bottleneck was busy throughout.
        """
        if not self._points:
            self._points.append(_Delivered(now - gap, now - gap, 0.0, 0.0, 0.0, 0))
        active = self._points[-1].active + min(gap, _MAX_STEP)
        if not busy or self._is_hole(gap, nbytes):
            self._end_burst(active, now)
            return
        last = self._points[-1]
        sums = (active, last.busy + gap, last.sent + sent, last.nbytes + nbytes)
        together = now - last.ended < _BATCH_GAP and now - last.began < _MAX_BATCH_GAP
        if together and len(self._points) > 1:
            last.ended, (last.active, last.busy, last.sent, last.nbytes) = now, sums
        else:
            self._points.append(_Delivered(now, now, *sums))
        self._take_sample(active)

    def _is_hole(self, gap: float, nbytes: int) -> bool:
        """Whether the bottleneck was idle although it looked busy."""
        self._byte_times.append(gap / nbytes)
        usual = sorted(self._byte_times)[len(self._byte_times) // 2]
        return gap > _MIN_BURST and gap > _HOLE * usual * nbytes

    def _end_burst(self, active: float, now: float) -> None:
        """End a burst; one that was too short is discarded."""
        if self._points[-1].busy - self._burst_from < _MIN_BURST:
            while len(self._points) > 1 and self._points[-1].busy > self._burst_from:
                self._points.pop()
        last = self._points[-1]
        last.active, last.began, last.ended = active, now, now
        self._burst_from = last.busy

    def _take_sample(self, active: float) -> None:
        last = self._points[-1]
        while len(self._points) > 2 and last.busy - self._points[1].busy >= _LONG_WINDOW:
            self._points.popleft()
        counts = last.busy - self._burst_from >= _MIN_BURST
        if counts and last.busy - self._points[0].busy >= WINDOW:
            first = next(p for p in reversed(self._points) if last.busy - p.busy >= WINDOW)
            usual = _rate(self._points[0], last)
            self._add_sample(min(_rate(first, last), _MAX_CATCHING_UP * usual), active)
        if self._is_guess:
            for point in self._points:
                if last.busy - point.busy >= _FIRST_WINDOW:
                    self._raise_rate(_rate(point, last))

    def _raise_rate(self, rate: float) -> None:
        self.rate = max(self.rate or 0.0, min(rate, MAX_RATE))

    def _add_sample(self, rate: float, active: float) -> None:
        """Add a rate to the maximum filter; the initial rate counts a little longer."""
        if not self._samples and self.rate is not None:
            self._samples.append((active - MEMORY_S + _LONG_WINDOW, self.rate))
        while self._samples and self._samples[-1][1] <= rate:
            self._samples.pop()
        self._samples.append((active, rate))
        while self.is_queued and self._samples[0][0] < active - MEMORY_S:
            self._samples.popleft()
        self.rate, self._is_guess = self._samples[0][1], False


def _rate(first: _Delivered, last: _Delivered) -> float:
    """Return the rate between two points; data that arrived faster than sent was held up."""
    span = max(last.busy - first.busy, last.sent - first.sent)
    return min((last.nbytes - first.nbytes) / span, MAX_RATE)


def _sent_at(flight: _Flight) -> float:
    return flight.sent_at
