"""BBR, version 1: draft-cardwell-iccrg-bbr-congestion-control-00 and Linux's tcp_bbr.c.

Section numbers refer to the draft. Two parts of Linux's implementation are omitted: the estimate of
aggregated acknowledgements and the detection of policers.
"""

from collections import deque
from enum import Enum
from math import inf, log

from molink.sim.congestion.base import INITIAL_WINDOW, SEGMENT_BYTES, SegmentsAcked

#: Gain that doubles the delivery rate in each round trip (section 4.3.2.1).
HIGH_GAIN = 2 / log(2)
#: Pacing gains of ProbeBW's phases, each about a minimum round trip long (section 4.3.4.3).
_CYCLE = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
#: The draft starts in a random phase except the second. The simulation always starts in the third,
#: so that runs are repeatable.
_FIRST_PHASE = 2
#: Bytes in flight in ProbeBW, in bandwidth-delay products.
_WINDOW_GAIN = 2.0
#: Number of round trips that the maximum filter of rates covers (section 4.1.1.3).
_RATE_ROUNDS = 10
#: The pipe is full after this many rounds in which the rate did not grow by this factor (section
#: 4.3.2.2).
_FULL_ROUNDS, _FULL_GROWTH = 3, 1.25
#: Seconds for which a minimum round trip is valid, and that ProbeRTT lasts (sections 4.1.2.3,
#: 4.3.5).
ROUND_TRIP_S, PROBE_S = 10.0, 0.2
#: Bytes of the window in ProbeRTT, and of the smallest window in other states.
MIN_WINDOW = 4 * SEGMENT_BYTES
#: Pacing stays slightly below the rate, so that the queue drains (Linux).
_MARGIN = 0.99
#: Number of bursts that the window admits in addition, for batching on both ends (Linux).
_BURSTS = 3


class BbrMode(Enum):
    """States of section 4.3."""

    STARTUP = "startup"
    DRAIN = "drain"
    PROBE_BW = "probe bandwidth"
    PROBE_RTT = "probe round trip"


def burst_bytes(rate: float) -> int:
    """Return the bytes of a burst at ``rate`` bytes/s: one millisecond's, at least two segments."""
    return max(2 * SEGMENT_BYTES, int(min(rate * 0.001, 65536)))


class _MaxFilter:
    """The maximum rate of the last round trips."""

    def __init__(self) -> None:
        self._rates: deque[tuple[int, float]] = deque()

    @property
    def maximum(self) -> float:
        return self._rates[0][1] if self._rates else 0.0

    def add_sample(self, number: int, rate: float) -> None:
        while self._rates and self._rates[-1][1] <= rate:
            self._rates.pop()
        self._rates.append((number, rate))
        while self._rates[0][0] <= number - _RATE_ROUNDS:
            self._rates.popleft()


class BbrTcp:
    """Paces by the maximum delivery rate, with two bandwidth-delay products in flight.

    A connection that never has much to send stays in STARTUP, since no round trip fills the link.
    Its estimated rate is that of its busiest round trip, and it paces at 2.89 times that rate.
    """

    def __init__(self, round_trip: float) -> None:
        """``round_trip`` is the handshake's duration in seconds."""
        self.window: float = INITIAL_WINDOW
        self.pacing_rate = HIGH_GAIN * INITIAL_WINDOW / round_trip
        self.mode = BbrMode.STARTUP
        self._rates = _MaxFilter()
        self._round = self._round_end = 0
        self._is_full = False
        self._full_rate, self._full_rounds = 0.0, 0
        self._phase, self._phase_at = _FIRST_PHASE, 0.0
        self._min_round_trip, self._min_round_trip_at = inf, 0.0
        self._probed_at: float | None = None
        self._probe_round_end = 0
        self._restarted = False
        self._prior_window = 0.0
        self._delivered = self._in_flight = 0
        self._conserving = self._recovering = False
        #: Ignore the rates of bytes that were sent before this many bytes were delivered.
        self._ignored = 0

    @property
    def rate(self) -> float:
        """The estimated rate of the link, in bytes/s."""
        return self._rates.maximum

    def on_restart(self, now: float, idle: float) -> None:
        """After a pause, pace at the estimated rate (section 4.3.4.4)."""
        self._restarted = True
        if self.mode is BbrMode.PROBE_BW:
            self._set_pacing_rate(1.0)
        elif self.mode is BbrMode.PROBE_RTT:
            self._end_probe(now)

    def on_sent(self, now: float, in_flight: int, limited: bool) -> None:
        """Do nothing."""

    def on_acked(self, acked: SegmentsAcked) -> None:
        """Update the model of the path, then the window and the pacing rate (section 3.4)."""
        self._delivered, self._in_flight = acked.delivered, acked.in_flight
        begins = acked.delivered_before >= self._round_end
        if begins:
            self._round += 1
            self._round_end = acked.delivered
            self._conserving = False
        app_limited = acked.app_limited or acked.delivered_before < self._ignored
        if acked.rate and (not app_limited or acked.rate >= self.rate):
            self._rates.add_sample(self._round, acked.rate)
        self._advance_cycle(acked)
        if begins and not app_limited:
            self._check_full_pipe()
        self._check_drain(acked)
        self._probe_round_trip(acked, begins)
        self._set_pacing_rate(self._gain)
        self._set_window(acked)

    def on_loss(self, now: float, in_flight: int) -> None:
        """Conserve packets for a round trip (section 4.2.3.4)."""
        self._save_window()
        self._recovering = self._conserving = True
        self._round_end = self._delivered
        self.window = max(in_flight, MIN_WINDOW)

    def on_recovered(self, now: float) -> None:
        """Restore the window."""
        self._recovering = self._conserving = False
        self.window = max(self.window, self._prior_window)

    def on_timeout(self, now: float) -> None:
        """Restart with one segment."""
        self._save_window()
        self._recovering = self._conserving = False
        self._full_rate = 0.0
        self.window = SEGMENT_BYTES

    def _check_full_pipe(self) -> None:
        if self._is_full:
            return
        if self.rate >= self._full_rate * _FULL_GROWTH:
            self._full_rate, self._full_rounds = self.rate, 0
            return
        self._full_rounds += 1
        self._is_full = self._full_rounds >= _FULL_ROUNDS

    def _advance_cycle(self, acked: SegmentsAcked) -> None:
        """Enter the next phase of ProbeBW if the current one is over (section 4.3.4.3)."""
        if self.mode is not BbrMode.PROBE_BW:
            return
        before = acked.in_flight + acked.nbytes
        gain = _CYCLE[self._phase]
        over = acked.now - self._phase_at > self._min_round_trip
        if gain > 1:
            over = over and (acked.lost > 0 or before >= self._target_window(gain))
        elif gain < 1:
            over = over or before <= self._target_window(1.0)
        if over:
            self._phase = (self._phase + 1) % len(_CYCLE)
            self._phase_at = acked.now

    def _check_drain(self, acked: SegmentsAcked) -> None:
        if self.mode is BbrMode.STARTUP and self._is_full:
            self.mode = BbrMode.DRAIN
        if self.mode is BbrMode.DRAIN and acked.in_flight <= self._target_window(1.0):
            self._probe_rate(acked.now)

    def _probe_rate(self, now: float) -> None:
        self.mode = BbrMode.PROBE_BW
        self._phase, self._phase_at = _FIRST_PHASE, now

    def _probe_round_trip(self, acked: SegmentsAcked, begins: bool) -> None:
        """Track the minimum round trip; enter ProbeRTT once it is too old (section 4.3.5)."""
        now = acked.now
        is_old = now > self._min_round_trip_at + ROUND_TRIP_S
        if acked.round_trip < self._min_round_trip or is_old:
            self._min_round_trip, self._min_round_trip_at = acked.round_trip, now
        if is_old and not self._restarted and self.mode is not BbrMode.PROBE_RTT:
            self.mode = BbrMode.PROBE_RTT
            self._save_window()
            self._probed_at = None
        if self.mode is BbrMode.PROBE_RTT:
            self._ignored = acked.delivered + acked.in_flight
            if self._probed_at is not None:
                if acked.delivered_before >= self._probe_round_end:
                    self._end_probe(now)
            elif acked.in_flight <= MIN_WINDOW:
                self._probed_at = now
                self._probe_round_end = acked.delivered
        self._restarted = False

    def _end_probe(self, now: float) -> None:
        if self._probed_at is None or now < self._probed_at + PROBE_S:
            return
        self._min_round_trip_at = now
        self.window = max(self.window, self._prior_window)
        if self._is_full:
            self._probe_rate(now)
        else:
            self.mode = BbrMode.STARTUP

    @property
    def _gain(self) -> float:
        match self.mode:
            case BbrMode.STARTUP:
                return HIGH_GAIN
            case BbrMode.DRAIN:
                return 1 / HIGH_GAIN
            case BbrMode.PROBE_BW:
                return _CYCLE[self._phase]
        return 1.0

    def _set_pacing_rate(self, gain: float) -> None:
        """Set the pacing rate; until the pipe is full, never decrease it (section 4.2.1)."""
        pacing_rate = gain * self.rate * _MARGIN
        if self.rate and (self._is_full or pacing_rate > self.pacing_rate):
            self.pacing_rate = pacing_rate

    def _target_window(self, gain: float) -> float:
        """Return the target of bytes in flight: gain times BDP, plus bursts (section 4.2.3.2)."""
        if self._min_round_trip == inf:
            return INITIAL_WINDOW
        extra = _BURSTS * burst_bytes(self.pacing_rate)
        if self.mode is BbrMode.PROBE_BW and self._phase == 0:
            extra += 2 * SEGMENT_BYTES
        return gain * self.rate * self._min_round_trip + extra

    def _set_window(self, acked: SegmentsAcked) -> None:
        """Update the window (section 4.2.3)."""
        if acked.lost:
            self.window = max(self.window - acked.lost, SEGMENT_BYTES)
        if self._conserving:
            self.window = max(self.window, acked.in_flight + acked.nbytes)
        else:
            startup = self.mode in (BbrMode.STARTUP, BbrMode.DRAIN)
            target = self._target_window(HIGH_GAIN if startup else _WINDOW_GAIN)
            if self._is_full:
                self.window = min(self.window + acked.nbytes, target)
            elif self.window < target or acked.delivered < INITIAL_WINDOW:
                self.window += acked.nbytes
            self.window = max(self.window, MIN_WINDOW)
        if self.mode is BbrMode.PROBE_RTT:
            self.window = min(self.window, MIN_WINDOW)

    def _save_window(self) -> None:
        if self._recovering or self.mode is BbrMode.PROBE_RTT:
            self._prior_window = max(self._prior_window, self.window)
        else:
            self._prior_window = self.window
