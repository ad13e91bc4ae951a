"""A simulated TCP connection: sending, loss and in-order delivery."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from molink.sim.congestion.base import (
    MIN_TIMEOUT,
    SEGMENT_BYTES,
    CongestionController,
    SegmentsAcked,
)
from molink.sim.congestion.bbr import burst_bytes
from molink.sim.event_queue import EventQueue
from molink.sim.pc import Uplink

#: Bytes that are sent and acknowledged at once: two segments (RFC 1122, section 4.2.3.2).
_PAIR_BYTES = 2 * SEGMENT_BYTES

#: Called when a message has arrived, with the times when its first byte was sent, when its last
#: byte had passed the uplink, and when the whole message had arrived.
OnPassed = Callable[[float, float, float], None]


@dataclass(slots=True)
class _SegmentPair:
    """Consecutive bytes of the stream, and the connection's state when they were last sent."""

    offset: int
    nbytes: int
    sent_at: float = 0.0
    passed_at: float = 0.0
    has_arrived: bool = False
    is_acked: bool = False
    # State of the delivery rate at the time of sending.
    delivered: int = 0
    delivered_at: float = 0.0
    first_sent_at: float = 0.0
    is_app_limited: bool = False


@dataclass(slots=True)
class _TcpMessage:
    begin: int
    end: int
    passed: OnPassed
    sent_at: float = 0.0


class TcpConnection:
    """Sends messages over an uplink and a latency with congestion control.

    Acknowledgements are selective (RFC 2018) and nothing is reordered, so unacknowledged bytes that
    were sent before acknowledged ones are lost (RFC 8985). If all bytes in flight were dropped, the
    last segments are sent again after two round trips (a tail loss probe), and then all of them.
    ``reply_s`` returns the seconds that an acknowledgement takes; ``on_room`` is called after bytes
    have been sent.
    """

    def __init__(
        self,
        event_queue: EventQueue,
        uplink: Uplink,
        latency: float,
        controller: CongestionController,
        reply_s: Callable[[], float],
        on_room: Callable[[], None],
    ) -> None:
        self.controller = controller
        self._event_queue, self._uplink, self._latency = event_queue, uplink, latency
        self._reply_s, self._on_room = reply_s, on_room
        #: Number of bytes written but not sent, and the stream offset of the first.
        self.unsent = 0
        self._next = 0
        #: Messages not sent yet, and messages sent at least in part that have not arrived.
        self._waiting: deque[_TcpMessage] = deque()
        self._messages: deque[_TcpMessage] = deque()
        #: Segments in stream order, from the first that has not arrived, and from the first that is
        #: not acknowledged.
        self._awaited: deque[_SegmentPair] = deque()
        self._open: deque[_SegmentPair] = deque()
        #: Segments that are neither acknowledged nor known to be lost, in order of sending.
        self._flight: deque[_SegmentPair] = deque()
        self._in_flight = 0
        #: Number of segments in flight that were not dropped.
        self._num_undropped = 0
        self._lost: deque[_SegmentPair] = deque()
        #: Stream offset up to which bytes must arrive to end the recovery; ``None`` outside of
        #: recovery.
        self._recovery_end: int | None = None
        #: When the last acknowledgement that is under way arrives.
        self._reply_at = 0.0
        self._smoothed_round_trip = 2 * latency
        self._sent_at = 0.0
        self._is_probing = False
        # Pacing.
        self._paced_at = 0.0
        self._wakes_at = inf
        # The delivery rate.
        self.delivered = 0
        self._delivered_at = self._first_sent_at = 0.0
        self._app_limited_until = 0

    def write_message(self, nbytes: int, passed: OnPassed) -> None:
        """Append a message to the stream."""
        now = self._event_queue.now
        if not self.unsent and not self._lost and self._in_flight < self.controller.window:
            self._app_limited_until = self.delivered + self._in_flight or 1
            if not self._in_flight:
                self.controller.on_restart(now, now - self._sent_at)
                self._first_sent_at = self._delivered_at = now
        begin = self._next + self.unsent
        self._waiting.append(_TcpMessage(begin, begin + nbytes, passed))
        self.unsent += nbytes
        self._send_pending()

    @property
    def in_flight(self) -> int:
        """Bytes in flight."""
        return self._in_flight

    def _send_pending(self) -> None:
        """Send as much as window and pacing allow, lost segments first."""
        now, controller = self._event_queue.now, self.controller
        limited = False
        before = self.unsent
        burst = burst_bytes(controller.pacing_rate) if controller.pacing_rate < inf else 0
        while self._lost or self.unsent:
            if controller.pacing_rate < inf and (self._paced_at > now or burst <= 0):
                self._wake_at(self._paced_at)
                break
            pair = self._next_segments(int(controller.window) - self._in_flight)
            if pair is None:
                limited = True
                break
            self._transmit_segments(pair, now)
            burst -= pair.nbytes
        controller.on_sent(now, self._in_flight, limited)
        self._arm_timer()
        if self.unsent < before:
            self._on_room()

    def _next_segments(self, room: int) -> _SegmentPair | None:
        """Return the next segments to send; ``None`` if the window has no room."""
        if self._lost:
            if room < self._lost[0].nbytes and self._in_flight:
                return None
            return self._lost.popleft()
        if room < min(self.unsent, SEGMENT_BYTES):
            return None
        nbytes = min(self.unsent, _PAIR_BYTES if room >= _PAIR_BYTES else SEGMENT_BYTES)
        pair = _SegmentPair(self._next, nbytes)
        self.unsent -= nbytes
        self._next += nbytes
        self._awaited.append(pair)
        self._open.append(pair)
        while self._waiting and self._waiting[0].begin < self._next:
            message = self._waiting.popleft()
            message.sent_at = self._event_queue.now
            self._messages.append(message)
        return pair

    def _transmit_segments(self, pair: _SegmentPair, now: float) -> None:
        pair.sent_at = self._sent_at = now
        pair.delivered, pair.delivered_at = self.delivered, self._delivered_at
        pair.first_sent_at = self._first_sent_at
        pair.is_app_limited = self._app_limited_until > 0
        self._flight.append(pair)
        self._in_flight += pair.nbytes
        if self.controller.pacing_rate < inf:
            self._advance_pacing(pair.nbytes, now)
        passes = self._uplink.enqueue_or_drop(pair.nbytes, now)
        if passes is not None:
            self._num_undropped += 1
            pair.passed_at = passes
            self._event_queue.schedule_at(passes + self._latency, self._on_arrival, pair)

    def _advance_pacing(self, nbytes: int, now: float) -> None:
        """Compute when to transmit next; after a pause, shorten the gap by up to half (Linux)."""
        gap = nbytes / self.controller.pacing_rate
        if (late := now - self._paced_at) > 0:
            gap -= min(gap / 2, late)
            self._paced_at = now
        self._paced_at += gap

    def _wake_at(self, at: float) -> None:
        if at < self._wakes_at:
            self._wakes_at = at
            self._event_queue.schedule_at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        if at == self._wakes_at:
            self._wakes_at = inf
            self._send_pending()

    def _on_arrival(self, pair: _SegmentPair) -> None:
        pair.has_arrived = True
        awaited, messages, now = self._awaited, self._messages, self._event_queue.now
        while awaited and awaited[0].has_arrived:
            awaited.popleft()
        received = awaited[0].offset if awaited else self._next
        while messages and messages[0].end <= received:
            message = messages.popleft()
            message.passed(message.sent_at, pair.passed_at, now)
        # Acknowledgements leave one queue in order; ``max`` hides rounding errors.
        self._reply_at = max(self._reply_at, now + self._reply_s())
        self._event_queue.schedule_at(self._reply_at, self._on_acked, pair)

    def _on_acked(self, pair: _SegmentPair) -> None:
        flight, now = self._flight, self._event_queue.now
        lost = 0
        while flight[0] is not pair:
            lost += self._mark_lost(flight.popleft())
        flight.popleft()
        pair.is_acked = True
        while self._open and self._open[0].is_acked:
            self._open.popleft()
        self._num_undropped -= 1
        self._in_flight -= pair.nbytes
        self.delivered += pair.nbytes
        self._delivered_at = now
        round_trip = round(now - pair.sent_at, 6)  # real clocks count microseconds
        self._smoothed_round_trip += (round_trip - self._smoothed_round_trip) / 8
        acked = SegmentsAcked(
            now,
            pair.nbytes,
            round_trip,
            self.delivered,
            pair.delivered,
            self._delivery_rate(pair),
            pair.is_app_limited,
            self._in_flight,
            lost,
        )
        if self.delivered > self._app_limited_until:
            self._app_limited_until = 0
        oldest = self._open[0].offset if self._open else self._next
        if self._recovery_end is not None and oldest >= self._recovery_end:
            self._recovery_end = None
            self.controller.on_recovered(now)
        # If only the last segments were lost, the acknowledged probe is the only sign of it (RFC
        # 8985, section 7.4).
        if (lost or self._is_probing) and self._recovery_end is None:
            self._recovery_end = self._next
            self.controller.on_loss(now, self._in_flight)
        self._is_probing = False
        self.controller.on_acked(acked)
        self._send_pending()

    def _mark_lost(self, pair: _SegmentPair) -> int:
        """Mark segments as lost; return their bytes."""
        self._in_flight -= pair.nbytes
        self._lost.append(pair)
        return pair.nbytes

    def _delivery_rate(self, pair: _SegmentPair) -> float:
        """Return the delivery rate (draft-cheng-iccrg-delivery-rate-estimation-00, section 3.3)."""
        sent = pair.sent_at - pair.first_sent_at
        acknowledged = self._delivered_at - pair.delivered_at
        self._first_sent_at = pair.sent_at
        took = max(sent, acknowledged)
        # An acknowledgement takes at least a round trip. A shorter time results from rounding or a
        # retransmission.
        if took < 2 * self._latency - 1e-9:
            return 0.0
        return (self.delivered - pair.delivered) / took

    def _arm_timer(self) -> None:
        """Schedule a probe or a timeout if no acknowledgement can come."""
        if self._flight and not self._num_undropped:
            wait = (
                self._smoothed_round_trip + MIN_TIMEOUT
                if self._is_probing
                else 2 * self._smoothed_round_trip
            )
            self._event_queue.schedule_at(self._sent_at + wait, self._on_stall, self._sent_at)

    def _on_stall(self, since: float) -> None:
        if self._num_undropped or not self._flight or since != self._sent_at:
            return
        now = self._event_queue.now
        if not self._is_probing:
            self._is_probing = True
            pair = self._flight.pop()
            self._in_flight -= pair.nbytes
            self._transmit_segments(pair, now)
            self._arm_timer()
            return
        while self._flight:
            self._mark_lost(self._flight.popleft())
        self._recovery_end = None
        self.controller.on_timeout(now)
        self._send_pending()
