"""One TCP connection: what leaves when, what is lost, and what has arrived in order."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from molink.sim.agenda import Agenda
from molink.sim.congestion.base import MIN_TIMEOUT, SEGMENT, Controller, SegmentsAcked
from molink.sim.congestion.bbr import burst_of
from molink.sim.uplink import Uplink

#: Bytes that leave and are acknowledged together: two segments (RFC 1122, section 4.2.3.2).
_PAIR = 2 * SEGMENT

#: Told of a message that has arrived: when its first byte left, its last one passed the uplink, and
#: all of it was there.
Passed = Callable[[float, float, float], None]


@dataclass(slots=True)
class _Pair:
    """Bytes of the stream that travel together, and what was so when they left (last)."""

    begin: int
    nbytes: int
    sent_at: float = 0.0
    passed_at: float = 0.0
    arrived: bool = False
    acknowledged: bool = False
    # For the delivery rate.
    delivered: int = 0
    delivered_at: float = 0.0
    first_sent_at: float = 0.0
    app_limited: bool = False


@dataclass(slots=True)
class _TcpMessage:
    begin: int
    end: int
    passed: Passed
    sent_at: float = 0.0


class TcpConnection:
    """Sends messages over an uplink and a latency as its congestion control lets it.

    Acknowledgements are selective (RFC 2018) and nothing is reordered on the way, so what left
    before something that has arrived is lost if it hasn't (RFC 8985). If everything in flight was
    dropped, the last of it is sent again after two round trips (a tail loss probe), then all of it.
    ``reply_s`` tells the seconds that an acknowledgement takes from here; ``on_room`` is called
    whenever bytes have left.
    """

    def __init__(
        self,
        agenda: Agenda,
        uplink: Uplink,
        latency: float,
        controller: Controller,
        reply_s: Callable[[], float],
        on_room: Callable[[], None],
    ) -> None:
        self.controller = controller
        self._agenda, self._uplink, self._latency = agenda, uplink, latency
        self._reply_s, self._on_room = reply_s, on_room
        #: Bytes written and never sent, and where in the stream they begin.
        self.unsent = 0
        self._next = 0
        #: Messages of which nothing has left, and those that have not arrived.
        self._waiting: deque[_TcpMessage] = deque()
        self._messages: deque[_TcpMessage] = deque()
        #: What was sent, in the order of the stream: from the first that has not arrived on, and
        #: from the first that was not acknowledged on.
        self._awaited: deque[_Pair] = deque()
        self._open: deque[_Pair] = deque()
        #: In the order in which they left (last): neither acknowledged nor known to be lost.
        self._flight: deque[_Pair] = deque()
        self._in_flight = 0
        #: Those of the flight that were not dropped.
        self._coming = 0
        self._lost: deque[_Pair] = deque()
        #: Recovery ends when everything before it has arrived; ``None`` outside of one.
        self._recovery_end: int | None = None
        #: When the last acknowledgement that is on its way will be here.
        self._reply_at = 0.0
        self._smoothed = 2 * latency
        self._sent_at = 0.0
        self._probing = False
        # Pacing.
        self._paced_at = 0.0
        self._wakes_at = inf
        # The delivery rate.
        self.delivered = 0
        self._delivered_at = self._first_sent_at = 0.0
        self._app_limited_until = 0

    def write(self, nbytes: int, passed: Passed) -> None:
        """Append a message to the stream."""
        now = self._agenda.now
        if not self.unsent and not self._lost and self._in_flight < self.controller.window:
            self._app_limited_until = self.delivered + self._in_flight or 1
            if not self._in_flight:
                self.controller.starts(now, now - self._sent_at)
                self._first_sent_at = self._delivered_at = now
        begin = self._next + self.unsent
        self._waiting.append(_TcpMessage(begin, begin + nbytes, passed))
        self.unsent += nbytes
        self._send()

    @property
    def in_flight(self) -> int:
        """Bytes on the way."""
        return self._in_flight

    # --- sending ---------------------------------------------------------------------------------

    def _send(self) -> None:
        """Let leave what may: what is lost first."""
        now, controller = self._agenda.now, self.controller
        limited = False
        before = self.unsent
        burst = burst_of(controller.pacing) if controller.pacing < inf else 0
        while self._lost or self.unsent:
            if controller.pacing < inf and (self._paced_at > now or burst <= 0):
                self._wake_at(self._paced_at)
                break
            pair = self._take(int(controller.window) - self._in_flight)
            if pair is None:
                limited = True
                break
            self._leave(pair, now)
            burst -= pair.nbytes
        controller.sent(now, self._in_flight, limited)
        self._watch()
        if self.unsent < before:
            self._on_room()

    def _take(self, room: int) -> _Pair | None:
        """What leaves next, if the window has room for it."""
        if self._lost:
            if room < self._lost[0].nbytes and self._in_flight:
                return None
            return self._lost.popleft()
        if room < min(self.unsent, SEGMENT):
            return None
        nbytes = min(self.unsent, _PAIR if room >= _PAIR else SEGMENT)
        pair = _Pair(self._next, nbytes)
        self.unsent -= nbytes
        self._next += nbytes
        self._awaited.append(pair)
        self._open.append(pair)
        while self._waiting and self._waiting[0].begin < self._next:
            message = self._waiting.popleft()
            message.sent_at = self._agenda.now
            self._messages.append(message)
        return pair

    def _leave(self, pair: _Pair, now: float) -> None:
        pair.sent_at = self._sent_at = now
        pair.delivered, pair.delivered_at = self.delivered, self._delivered_at
        pair.first_sent_at = self._first_sent_at
        pair.app_limited = self._app_limited_until > 0
        self._flight.append(pair)
        self._in_flight += pair.nbytes
        if self.controller.pacing < inf:
            self._pace(pair.nbytes, now)
        passes = self._uplink.put(pair.nbytes, now)
        if passes is not None:
            self._coming += 1
            pair.passed_at = passes
            self._agenda.at(passes + self._latency, self._arrive, pair)

    def _pace(self, nbytes: int, now: float) -> None:
        """When the next may leave: half as long after the first of a burst (Linux)."""
        gap = nbytes / self.controller.pacing
        if (late := now - self._paced_at) > 0:
            gap -= min(gap / 2, late)
            self._paced_at = now
        self._paced_at += gap

    def _wake_at(self, at: float) -> None:
        if at < self._wakes_at:
            self._wakes_at = at
            self._agenda.at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        if at == self._wakes_at:
            self._wakes_at = inf
            self._send()

    # --- at the other end ------------------------------------------------------------------------

    def _arrive(self, pair: _Pair) -> None:
        pair.arrived = True
        awaited, messages, now = self._awaited, self._messages, self._agenda.now
        while awaited and awaited[0].arrived:
            awaited.popleft()
        there = awaited[0].begin if awaited else self._next
        while messages and messages[0].end <= there:
            message = messages.popleft()
            message.passed(message.sent_at, pair.passed_at, now)
        # Those that wait in one queue come at the same time, but for the rounding of sums.
        self._reply_at = max(self._reply_at, now + self._reply_s())
        self._agenda.at(self._reply_at, self._acknowledged, pair)

    # --- acknowledgements and losses -------------------------------------------------------------

    def _acknowledged(self, pair: _Pair) -> None:
        flight, now = self._flight, self._agenda.now
        lost = 0
        while flight[0] is not pair:
            lost += self._lose(flight.popleft())
        flight.popleft()
        pair.acknowledged = True
        while self._open and self._open[0].acknowledged:
            self._open.popleft()
        self._coming -= 1
        self._in_flight -= pair.nbytes
        self.delivered += pair.nbytes
        self._delivered_at = now
        round_trip = round(now - pair.sent_at, 6)  # clocks count microseconds
        self._smoothed += (round_trip - self._smoothed) / 8
        what = SegmentsAcked(
            now,
            pair.nbytes,
            round_trip,
            self.delivered,
            pair.delivered,
            self._rate(pair),
            pair.app_limited,
            self._in_flight,
            lost,
        )
        if self.delivered > self._app_limited_until:
            self._app_limited_until = 0
        oldest = self._open[0].begin if self._open else self._next
        if self._recovery_end is not None and oldest >= self._recovery_end:
            self._recovery_end = None
            self.controller.recovered(now)
        # If only the last was lost, its probe alone says so (RFC 8985, section 7.4).
        if (lost or self._probing) and self._recovery_end is None:
            self._recovery_end = self._next
            self.controller.lost(now, self._in_flight)
        self._probing = False
        self.controller.acknowledged(what)
        self._send()

    def _lose(self, pair: _Pair) -> int:
        """It is known to be lost; how many bytes that are."""
        self._in_flight -= pair.nbytes
        self._lost.append(pair)
        return pair.nbytes

    def _rate(self, pair: _Pair) -> float:
        """The delivery rate (draft-cheng-iccrg-delivery-rate-estimation-00, section 3.3)."""
        sent = pair.sent_at - pair.first_sent_at
        acknowledged = self._delivered_at - pair.delivered_at
        self._first_sent_at = pair.sent_at
        took = max(sent, acknowledged)
        # Less than a round trip is no time for an acknowledgement: rounding, or bytes sent again.
        if took < 2 * self._latency - 1e-9:
            return 0.0
        return (self.delivered - pair.delivered) / took

    def _watch(self) -> None:
        """If no acknowledgement can come, try again after a while."""
        if self._flight and not self._coming:
            wait = self._smoothed + MIN_TIMEOUT if self._probing else 2 * self._smoothed
            self._agenda.at(self._sent_at + wait, self._stalled, self._sent_at)

    def _stalled(self, since: float) -> None:
        if self._coming or not self._flight or since != self._sent_at:
            return
        now = self._agenda.now
        if not self._probing:
            self._probing = True
            pair = self._flight.pop()
            self._in_flight -= pair.nbytes
            self._leave(pair, now)
            self._watch()
            return
        while self._flight:
            self._lose(self._flight.popleft())
        self._recovery_end = None
        self.controller.timed_out(now)
        self._send()
