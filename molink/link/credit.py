"""How many bytes the bulk lane may have in flight: a window that follows delay."""

from collections import deque

from molink.link.policy import Acknowledged, Event, LinkEstimate, Reconnected, Sent
from molink.wire.data import Lane

#: Queueing delay that the window aims at, in seconds above the least round trip of a chunk.
TARGET = 0.012
#: A delay that passes for none.
QUIET = 0.003
#: A window that was empty is filled so many times as fast as the link should empty it, after the
#: first :data:`TARGET` seconds' worth.
PACE = 1.25
#: A chunk takes this long at the link's rate, in seconds, within these bytes.
CHUNK_S = 0.005
LEAST_CHUNK = 16 * 1024
MOST_CHUNK = 256 * 1024
#: Before anything is known of the link.
FIRST_CHUNK = 32 * 1024
#: More than a link of 1 Gbps and 50 ms needs.
MOST_WINDOW = 8 << 20
#: The least round trip is the least of the last span and the one before; each of as many seconds,
#: and at least of so many round trips.
SPAN = 0.5
SPAN_TRIPS = 8
#: To look for the least round trip, the link is left idle for so long, in seconds, but for no more
#: than this share of a round trip.
PAUSE = 0.0075
PAUSE_SHARE = 0.25


class LeastRoundTrip:
    """The least of the present span and the one before, in seconds."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._current: float | None = None
        self._since = 0.0
        #: ``None`` before the first.
        self.value: float | None = None

    def add(self, elapsed: float, now: float) -> bool:
        """Take note of one; whether a new span begins."""
        span = max(SPAN, SPAN_TRIPS * (self.value or 0.0))
        turned = self._current is None or now - self._since >= span
        if self._current is None or turned:
            self._before, self._current, self._since = self._current, elapsed, now
        self._current = min(self._current, elapsed)
        self.value = self._current if self._before is None else min(self._current, self._before)
        return turned


class CreditWindow:
    """A window on bytes in flight, :data:`TARGET` above what the link holds by itself.

    When a chunk is acknowledged, the bytes that were in flight as it left have been delivered since
    then, so their number divided by the time is the rate of the link, or our share of it. The
    window moves toward ``rate × (least round trip + TARGET)``, by the acknowledged part of itself:
    about two thirds of the way in a round trip. (This is the law of FAST TCP with the goal given as
    a delay; as a full link's rate does not depend on the window, it cannot swing.) While chunks
    come back with no delay at all, it doubles in a round trip instead. What was sent into a window
    less than half full says nothing of the link and moves nothing, unless its pace held it back.
    After a pause it begins with what the link is estimated to hold, if that is more.

    A queue that always stands would pass for the link's own delay. So after each :data:`SPAN` in
    which the window was full the next chunk waits until somewhat less is in flight than the link
    itself holds, and meets no queue.
    """

    def __init__(self) -> None:
        #: The window in bytes, but that two chunks always fit.
        self.size = 2.0 * FIRST_CHUNK
        #: Bytes sent and not acknowledged.
        self.in_flight = 0
        #: For each message in flight: the end of its bytes, what was in flight with it, and whether
        #: it was the window that held the next one back, and not that it had been drained.
        self._sent: deque[tuple[int, int, bool]] = deque()
        self._sent_end = 0
        self._acknowledged_end = 0
        self._least = LeastRoundTrip()
        self._rate: float | None = None
        #: Whether ``size`` comes from chunks and not from an estimate.
        self._measured = False
        #: Whether a queue may have stood in the present span.
        self._busy = False
        #: Whether the next chunk is to find no queue, and whether the window is still to be filled
        #: again after one that did.
        self._draining = False
        self._refilling = False
        #: When all that was sent would have left at the pace of the window.
        self._paced_until = 0.0
        #: The least round trip that is told, until there is one of a chunk.
        self._told_trip: float | None = None

    def handle(self, event: Event, now: float) -> None:
        """Take note of what happened on the bulk lane."""
        match event:
            case Sent(lane=Lane.BULK):
                self._has_left(event.nbytes, now)
            case Acknowledged(lane=Lane.BULK):
                self._acknowledged(event, now)
            case LinkEstimate():
                self._estimated(event)
            case Reconnected(lane=Lane.BULK):
                self.in_flight = 0
                self._acknowledged_end = self._sent_end
                self._sent.clear()
                self._draining = False
                self._paced_until = min(now, self._paced_until)

    def fits(self, nbytes: int) -> bool:
        """Whether a chunk of ``nbytes`` may be sent now."""
        return self.in_flight + nbytes <= max(self._limit, 2 * nbytes)

    @property
    def opens_at(self) -> float:
        """When the next chunk may go: one after another, or an idle link would get them all."""
        return self._paced_until - TARGET

    @property
    def chunk(self) -> int:
        """How long a chunk should be: :data:`CHUNK_S` of the link's rate, in bytes."""
        least = self._least.value
        known = [] if self._rate is None else [self._rate]
        if least is not None and self._measured:
            known.append(self.size / (least + TARGET))
        if not known:
            return FIRST_CHUNK
        return int(min(MOST_CHUNK, max(LEAST_CHUNK, CHUNK_S * min(known))))

    @property
    def _limit(self) -> float:
        if not self._draining:
            return self.size
        least = self._least.value or 0.0
        idle = min(PAUSE, PAUSE_SHARE * least)
        return self.size * (least - idle) / (least + TARGET)

    def _estimated(self, event: LinkEstimate) -> None:
        """Before the first chunks come back, the estimate is all that is known."""
        self._rate = event.rate
        self._told_trip = event.least_rtt
        if event.rate is not None and not self._measured:
            least = self._least.value
            round_trip = event.least_rtt if least is None else least
            self._resize(event.rate * (round_trip + TARGET))

    def _has_left(self, nbytes: int, now: float) -> None:
        least = self._least.value or self._told_trip
        if self.in_flight == 0 and least is not None and self._rate is not None:
            self._resize(max(self.size, self._rate * (least + TARGET)))
        if least is not None:
            seconds = nbytes * (least + TARGET) / (PACE * self.size)
            self._paced_until = max(now, self._paced_until) + seconds
        self._sent_end += nbytes
        self.in_flight += nbytes
        self._refilling = self._refilling or self._draining
        self._draining = False
        limited = 2 * self.in_flight >= self.size or self.opens_at > now
        telling = limited and not self._refilling
        self._sent.append((self._sent_end, self.in_flight, telling))
        if self.in_flight + max(2 * nbytes, self.chunk) > self.size:
            self._refilling = False

    def _acknowledged(self, event: Acknowledged, now: float) -> None:
        self._acknowledged_end = min(self._sent_end, self._acknowledged_end + event.nbytes)
        self.in_flight = self._sent_end - self._acknowledged_end
        with_it, telling = 0, False
        while self._sent and self._sent[0][0] <= self._acknowledged_end:
            _, with_it, telling = self._sent.popleft()
        if self._least.add(event.elapsed, now):
            self._draining, self._busy = self._busy, False
        if telling:
            self._busy = True
            self._adjust(event, with_it)

    def _adjust(self, event: Acknowledged, with_it: int) -> None:
        least = self._least.value
        assert least is not None
        self._measured = True
        if event.elapsed <= least + QUIET:
            self._resize(self.size + event.nbytes)
            return
        goal = with_it * (least + TARGET) / event.elapsed
        gain = min(1.0, event.nbytes / max(self.size, with_it))
        self._resize(self.size + gain * (goal - self.size))

    def _resize(self, size: float) -> None:
        self.size = min(max(size, 2.0 * LEAST_CHUNK), MOST_WINDOW)
