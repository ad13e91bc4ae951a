"""CUBIC (RFC 9438) with Linux's additions: HyStart, PRR, and window decay when idle.

HyStart ends slow start before the queue overflows (Ha and Rhee, 2011). Section numbers refer to RFC
9438 unless noted.
"""

from math import ceil, inf

from molink.sim.congestion.base import INITIAL_WINDOW, MIN_TIMEOUT, SEGMENT_BYTES, SegmentsAcked

#: HyStart ignores windows of fewer segments.
_MIN_WINDOW = 16
#: Maximum seconds between acknowledgements of one train.
_TRAIN_GAP = 0.002
#: Number of round-trip samples after which their minimum is used.
_SAMPLES = 8
#: Increase of the round trip that indicates a full link: an eighth of the minimum round trip,
#: within bounds in seconds.
_DELAY_SHARE = 1 / 8
_MIN_DELAY, _MAX_DELAY = 0.004, 0.016


class HyStart:
    """Detects a full link by a long train of acknowledgements or by longer round trips."""

    def __init__(self, paced: bool = False) -> None:
        """With ``paced``, a train may last a whole round trip, since pacing stretches it."""
        self._train = 1.0 if paced else 0.5
        self._minimum = inf
        self._round_end = -1
        self._round_begin = self._last = 0.0
        self._samples = 0
        self._min_of_round = inf

    def is_full(self, acked: SegmentsAcked, window: float) -> bool:
        """Whether slow start should end after an acknowledgement; ``window`` is in bytes."""
        now = acked.now
        self._minimum = min(self._minimum, acked.round_trip)
        if acked.delivered > self._round_end:
            self._round_end = acked.delivered + acked.in_flight
            self._round_begin = self._last = now
            self._samples, self._min_of_round = 0, inf
        if window < _MIN_WINDOW * SEGMENT_BYTES:
            return False
        if now - self._last <= _TRAIN_GAP:
            self._last = now
            if now - self._round_begin > self._minimum * self._train:
                return True
        self._min_of_round = min(self._min_of_round, acked.round_trip)
        self._samples += 1
        more = min(max(_MIN_DELAY, self._minimum * _DELAY_SHARE), _MAX_DELAY)
        return self._samples > _SAMPLES and self._min_of_round > self._minimum + more


#: Growth in segments/s³, and the share of the window kept after a loss (sections 4.1, 4.6).
_GROWTH = 0.4
_DECREASE = 0.7
#: Segments per round trip in the Reno-friendly region (section 4.3).
_RENO = 3 * (1 - _DECREASE) / (1 + _DECREASE)
#: Minimum growth per round trip before the first loss (Linux, tcp_cubic.c).
_FIRST_GROWTH = 1 / 20
#: Pacing rate in windows per round trip, during and after slow start (Linux,
#: tcp_update_pacing_rate).
_SLOW_START_GAIN, _PACING_GAIN = 2.0, 1.2
#: Maximum growth in segments per acknowledged segment (section 4.4).
_MAX_GROWTH = 0.5


class CubicTcp:
    """A window that grows as a cubic function of the time since the last loss.

    While proportional rate reduction (RFC 6937) repairs a loss, ``window`` slightly exceeds the
    bytes in flight. Sending is not paced. Unused windows decay (RFC 2861).
    """

    pacing_rate: float = inf
    paced = False

    def __init__(self) -> None:
        self.window: float = INITIAL_WINDOW
        self.threshold = inf
        self._hystart = HyStart(self.paced)
        self._hystarting = True
        self._round_trip = 0.0
        #: The window before the last loss; 0 before any loss. This and the following windows are in
        #: segments.
        self._w_max = 0.0
        self._origin = self._w_est = 0.0
        #: Start time of the cubic function (``None`` before its start), and the seconds after which
        #: it reaches ``_origin``.
        self._epoch: float | None = None
        self._k = 0.0
        self._recovering = False
        self._flight_size = self._repaired = self._repairs = 0
        self._in_flight = 0
        # Tracks whether the window is used (Linux, tcp_cwnd_validate).
        self._limited = False
        self._max_in_flight = 0
        self._used_until = self._delivered = 0
        self._used = 0
        self._used_at = 0.0

    def on_restart(self, now: float, idle: float) -> None:
        """Halve the window for each idle timeout (RFC 2861); the window doesn't grow in pauses."""
        timeout = self._timeout
        if self._epoch is not None:
            self._epoch += idle
        if idle <= timeout or self._recovering:
            return
        self._raise_threshold()
        while idle > timeout and self.window > INITIAL_WINDOW:
            idle -= timeout
            self.window = max(INITIAL_WINDOW, self.window / 2)
        self._used_at = now
        self._used = 0

    def on_sent(self, now: float, in_flight: int, limited: bool) -> None:
        """Track the used window; after an idle timeout, halve the unused part."""
        self._repairs += max(0, in_flight - self._in_flight)
        self._in_flight = in_flight
        if (
            limited
            or self._delivered >= self._used_until
            or (not self._limited and in_flight > self._max_in_flight)
        ):
            self._limited, self._max_in_flight = limited, in_flight
            self._used_until = self._delivered + in_flight
        if self._is_used:
            self._used, self._used_at = 0, now
            return
        self._used = max(self._used, in_flight)
        if now - self._used_at >= self._timeout and not self._recovering:
            used = max(self._used, INITIAL_WINDOW)
            if used < self.window:
                self._raise_threshold()
                self.window = (self.window + used) / 2
            self._used, self._used_at = 0, now

    @property
    def _is_used(self) -> bool:
        """Whether the window may grow (section 5.8)."""
        slow = self.window < self.threshold
        return self._limited or (slow and self.window < 2 * self._max_in_flight)

    def _raise_threshold(self) -> None:
        """Let a reduced window grow back to three quarters by slow start (RFC 2861)."""
        self.threshold = max(self.threshold, 0.75 * self.window)

    @property
    def _timeout(self) -> float:
        return self._round_trip + MIN_TIMEOUT

    def on_acked(self, acked: SegmentsAcked) -> None:
        self._round_trip = acked.round_trip
        self._delivered = acked.delivered
        self._in_flight = acked.in_flight
        if self._recovering:
            self._repair_loss(acked)
            return
        slow = self.window < self.threshold
        if slow and self._hystarting and self._hystart.is_full(acked, self.window):
            self._hystarting = False
            self.threshold = self.window
            slow = False
        if not self._is_used:
            return
        nbytes: float = acked.nbytes
        if slow:
            grown = min(nbytes, self.threshold - self.window)
            self.window += grown
            nbytes -= grown
        if nbytes:
            self._avoid_congestion(acked.now, nbytes / SEGMENT_BYTES)

    def _avoid_congestion(self, now: float, step_inputs: float) -> None:
        """Grow the window in congestion avoidance (sections 4.2 to 4.5)."""
        window = self.window / SEGMENT_BYTES
        if self._epoch is None:
            self._epoch = now
            self._w_est = window
            self._origin = max(window, self._w_max)
            self._k = ((self._origin - window) / _GROWTH) ** (1 / 3)
        since = now + self._round_trip - self._epoch
        target = self._origin + _GROWTH * (since - self._k) ** 3
        by = max(0.0, target - window) / window
        if self._w_max == 0:
            by = max(by, _FIRST_GROWTH)
        self._w_est += _RENO * step_inputs / window
        by = max(by, (self._w_est - window) / window)
        self.window += min(by, _MAX_GROWTH) * step_inputs * SEGMENT_BYTES

    def on_loss(self, now: float, in_flight: int) -> None:
        """Reduce the window (section 4.6), with fast convergence (section 4.7)."""
        self._recovering = True
        self._flight_size = max(1, int(self.window))
        self._repaired = self._repairs = 0
        self._in_flight = in_flight
        self._reduce_window()

    def _reduce_window(self) -> None:
        window = self.window / SEGMENT_BYTES
        shrinks = window < self._w_max
        self._w_max = window * (1 + _DECREASE) / 2 if shrinks else window
        self.threshold = max(window * _DECREASE, 2.0) * SEGMENT_BYTES
        self._epoch = None

    def _repair_loss(self, acked: SegmentsAcked) -> None:
        """Apply proportional rate reduction; slow start if too little is in flight (RFC 6937)."""
        self._repaired += acked.nbytes
        if acked.in_flight > self.threshold:
            more = ceil(self._repaired * self.threshold / self._flight_size) - self._repairs
        else:
            limit = max(self._repaired - self._repairs, acked.nbytes) + SEGMENT_BYTES
            more = min(int(self.threshold) - acked.in_flight, limit)
        self.window = acked.in_flight + max(0, more)

    def on_recovered(self, now: float) -> None:
        """Continue with the reduced window."""
        self._recovering = False
        self.window = self.threshold

    def on_timeout(self, now: float) -> None:
        """Restart with one segment; slow start ends at the reduced window (section 4.8)."""
        self._reduce_window()
        self._w_max = 0.0
        self._recovering = False
        self.window = SEGMENT_BYTES
        self._hystarting, self._hystart = True, HyStart(self.paced)


class PacedCubicTcp(CubicTcp):
    """CUBIC as Linux paces it (:mod:`molink.wire.sockets.tcp_info`).

    Used for bulk channels, and for decode channels that began with BBR and remain paced.
    """

    paced = True

    def __init__(self, round_trip: float) -> None:
        """``round_trip`` is the handshake's, in seconds."""
        super().__init__()
        self._smoothed_round_trip = round_trip
        self._set_pacing_rate()

    def on_acked(self, acked: SegmentsAcked) -> None:
        """Grow the window and adjust the pacing rate."""
        super().on_acked(acked)
        self._smoothed_round_trip += (acked.round_trip - self._smoothed_round_trip) / 8
        self._set_pacing_rate()

    def _set_pacing_rate(self) -> None:
        gain = _SLOW_START_GAIN if self.window < self.threshold / 2 else _PACING_GAIN
        self.pacing_rate = gain * max(self.window, self._in_flight) / self._smoothed_round_trip
