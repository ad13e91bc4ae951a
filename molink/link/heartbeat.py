"""Heartbeats between stages, without I/O: when to send one, and when the next stage is dead.

libzmq's I/O thread answers its own heartbeats even while Python hangs, so these carry the compute
thread's progress instead.
"""

from collections import deque

import msgspec

from molink.util.timeouts import TIMEOUTS

#: Seconds between heartbeats without live requests. Two may be lost within :data:`TIMEOUT`.
IDLE_INTERVAL = 1.0
#: The same while requests live: TCP reduces its window after about 250 ms without traffic.
BUSY_INTERVAL = 0.1
#: Seconds of silence that mean death while requests live. Also the minimum seconds without progress
#: that do, even if steps are short.
TIMEOUT = TIMEOUTS.stage
#: Seconds of silence that mean death without live requests.
IDLE_TIMEOUT = TIMEOUTS.idle_stage
#: Seconds of silence before reconnecting, with and without live requests. TCP doubles its retry
#: interval: after a cut of 2 s it may retry only 4 s after the start. A new connection retries at
#: once and a second later.
STALL_TIMEOUT = 1.4
IDLE_STALL_TIMEOUT = 2.0
#: Steps without progress that mean death, as a multiple of their predicted duration.
TIMEOUT_FACTOR = 5.0
#: Timeout in seconds before the first heartbeat of a stage, which may still finish a step.
CONNECT_TIMEOUT = TIMEOUTS.new_stage
#: Seconds; longer round trips are not measured, since the stage counts as dead by then.
_MAX_ROUND_TRIP = 60.0
#: Seconds over which the minimum round trip is taken, a dozen heartbeats. Changes of the link are
#: detected within 2 s.
_MIN_WINDOW = 1.25
#: Seconds in which all round trips must agree if a single one is ambiguous; also below 2 s.
_CONSENSUS_WINDOW = 1.6
#: Bound of remembered heartbeats and round trips; several times the usual number.
_MAX_HEARTBEATS = 64
#: Bounds of the bytes in flight with a heartbeat, as a share of the link's capacity per round trip.
#: Below the first, a heartbeat measures the link itself; above the second, the link was full.
_LOW_LOAD = 0.05
_FULL_LOAD = 0.75
#: A sample moves the smoothed round trip by 1/8 of the difference (RFC 6298).
_SMOOTHING = 8
#: Seconds between checks: while the stage is idle and responsive, and otherwise.
_AT_EASE, _ATTENTIVE = IDLE_INTERVAL, 0.5
#: A check that is late by this many seconds reveals a pause of this process, which doesn't count.
_LOCAL_PAUSE = 0.5


class StageProgress(msgspec.Struct, frozen=True):
    """A stage's report to its neighbours.

    ``completed_seq`` is the last ``seq`` that its compute thread has completed, ``num_queued``
    counts volumes that wait or run, and ``predicted_s`` is the expected duration of the running
    step.
    """

    completed_seq: int
    num_queued: int
    has_requests: bool
    predicted_s: float = 0.0


class HeartbeatClock:
    """Decides when to send the next heartbeat."""

    def __init__(self, now: float) -> None:
        self._last = now - IDLE_INTERVAL

    def next_at(self, has_requests: bool) -> float:
        """When the next heartbeat is due."""
        return self._last + (BUSY_INTERVAL if has_requests else IDLE_INTERVAL)

    def mark_sent(self, now: float) -> None:
        """Record a sent heartbeat."""
        self._last = now


class _HeartbeatTrip(msgspec.Struct, frozen=True):
    at: float
    round_trip_s: float
    #: Seconds, without the known wait behind earlier messages.
    unqueued_s: float
    #: Bytes in flight when it was sent, and the link's rate (bytes/s) when it returned.
    bytes_ahead: int
    rate: float | None


class RoundTripEstimator:
    """Estimates round-trip times in seconds from heartbeat echoes.

    :meth:`min_rtt` is the link's recent minimum without waiting behind the sender's own messages. A
    heartbeat on a full link yields only an upper bound. On a half-full link a late one may be due
    to a lower rate instead, so it counts only if all recent ones agree.
    """

    def __init__(self, start: float | None = None) -> None:
        """``start`` is used until the first measurement."""
        self.smoothed_rtt = 0.0 if start is None else start
        self._minimum = start
        self._measured = False
        #: Heartbeats without an echo: send time, bytes in flight, expected wait.
        self._in_flight: deque[tuple[float, int, float]] = deque(maxlen=_MAX_HEARTBEATS)
        self._trips: deque[_HeartbeatTrip] = deque(maxlen=_MAX_HEARTBEATS)

    def on_sent(self, now: float, bytes_ahead: int, wait: float) -> None:
        """Record a heartbeat, which should wait ``wait`` seconds behind ``bytes_ahead`` bytes."""
        self._in_flight.append((now, bytes_ahead, wait))

    def on_echo(self, sent_at: float, rate: float | None, now: float) -> bool:
        """Record the echo of the heartbeat sent at ``sent_at``; ``False`` if unknown or too late.

        ``rate`` is the link's in bytes/s (``None``: unknown).
        """
        away = self._in_flight
        if not away or (away[0][0] != sent_at and all(left != sent_at for left, _, _ in away)):
            return False
        while away[0][0] != sent_at:
            away.popleft()
        _, bytes_ahead, wait = away.popleft()
        seconds = now - sent_at
        if not 0 < seconds < _MAX_ROUND_TRIP:
            return False
        self.smoothed_rtt += (seconds - self.smoothed_rtt) / (_SMOOTHING if self._measured else 1)
        if not self._measured:
            self._measured, self._minimum = True, None
        self._trips.append(
            _HeartbeatTrip(now, seconds, max(seconds - wait, 0.0), bytes_ahead, rate)
        )
        return True

    def add_upper_bound(self, seconds: float, now: float) -> bool:
        """Record an acknowledged message's round trip; return whether it lowers the bound."""
        known = min((trip.round_trip_s for trip in self._trips), default=_MAX_ROUND_TRIP)
        lowers = 0 < seconds < known
        if lowers:
            self._trips.append(_HeartbeatTrip(now, seconds, 0.0, 0, 0.0))
        return lowers

    def min_rtt(self, now: float, rate: float | None) -> float | None:
        """The recent minimum; ``None`` if unknown."""
        while len(self._trips) > 1 and self._trips[0].at < now - _CONSENSUS_WINDOW:
            self._trips.popleft()
        if not self._trips:
            return self._minimum
        since = min(now - _MIN_WINDOW, self._trips[-1].at)
        alone = longest = _MAX_ROUND_TRIP
        for trip in self._trips:
            if trip.at >= since:
                if trip.round_trip_s < longest:
                    longest = trip.round_trip_s
                if trip.unqueued_s < alone and _load_share(trip, rate) <= _LOW_LOAD:
                    alone = trip.unqueued_s
        if (
            alone == _MAX_ROUND_TRIP
            and now - self._trips[0].at >= _CONSENSUS_WINDOW - BUSY_INTERVAL
        ):
            shares = [_load_share(trip, rate) for trip in self._trips]
            if max(shares) < _FULL_LOAD:
                alone = min(trip.unqueued_s for trip in self._trips)
        known = self._minimum if alone == _MAX_ROUND_TRIP else alone
        self._minimum = longest if known is None else min(known, longest)
        return self._minimum


def _load_share(trip: _HeartbeatTrip, rate: float | None) -> float:
    """Compute the bytes in flight with a heartbeat as a share of the link's capacity meanwhile.

    Above :data:`_FULL_LOAD`, or if it waited longer than it travelled, the link was full.
    """
    if trip.unqueued_s < _FULL_LOAD * trip.round_trip_s:
        return 1.0
    if not trip.bytes_ahead:
        return 0.0
    if rate is None or trip.rate is None:
        return 0.0
    return trip.bytes_ahead / (min(rate, trip.rate) * trip.round_trip_s)


def timeout_for(predicted_s: float) -> float:
    """Return the seconds without progress that mean death, given a step's ``predicted_s``."""
    return max(TIMEOUT, TIMEOUT_FACTOR * predicted_s)


class LinkLiveness:
    """Detects the death of the next stage: silence, or no progress while it has work.

    Progress is a higher ``completed_seq`` or an empty queue. The stage itself predicts its steps.
    """

    def __init__(self, now: float) -> None:
        self._predicted_s = 0.0
        self._is_reached = False
        self._heartbeat_at = now
        self._progress_at = now
        self._checked_at = now
        self._reconnected_at = now
        self._completed_seq = -1
        self._num_queued = 0
        self._interval = _ATTENTIVE

    def on_heartbeat(
        self, completed_seq: int, num_queued: int, predicted_s: float, now: float
    ) -> None:
        """Record a heartbeat with these fields."""
        # New work has not waited for progress yet.
        if completed_seq > self._completed_seq or num_queued == 0 or self._num_queued == 0:
            self._progress_at = now
        self._is_reached = True
        self._predicted_s = predicted_s
        self._completed_seq = max(completed_seq, self._completed_seq)
        self._num_queued = num_queued
        self._heartbeat_at = now

    @property
    def timeout(self) -> float:
        """Seconds of silence that mean death."""
        if not self._is_reached:
            return CONNECT_TIMEOUT
        return timeout_for(self._predicted_s)

    def next_check(self, now: float) -> float:
        """Latest time of the next check."""
        at_ease = not self.is_quiet(now) and not self._num_queued
        self._interval = _AT_EASE if at_ease else _ATTENTIVE
        dead_at = self._heartbeat_at + self.timeout
        return min(now + self._interval, dead_at) if dead_at > now else now + self._interval

    def is_quiet(self, now: float) -> bool:
        """Whether the stage has been silent long enough that live requests matter."""
        return now - self._heartbeat_at >= STALL_TIMEOUT

    def should_reconnect(self, now: float, has_requests: bool) -> bool:
        """Whether to reconnect now; assumes that the caller does."""
        stall = STALL_TIMEOUT if has_requests else IDLE_STALL_TIMEOUT
        if not self._is_reached or now - max(self._heartbeat_at, self._reconnected_at) < stall:
            return False
        self._reconnected_at = now
        return True

    def death_reason(self, now: float, has_requests: bool) -> str | None:
        """Return why the stage counts as dead, or ``None``; call it at :meth:`next_check`."""
        pause = now - self._checked_at
        self._checked_at = now
        if pause > self._interval + _LOCAL_PAUSE:
            self._heartbeat_at += pause
            self._progress_at += pause
            self._reconnected_at += pause
        silent = now - self._heartbeat_at
        if silent < TIMEOUT and not self._num_queued:
            return None
        if silent >= max(TIMEOUT if has_requests else IDLE_TIMEOUT, self.timeout):
            return f"no heartbeat for {silent:.1f} s"
        # Its progress since its last heartbeat is unknown.
        stuck = self._heartbeat_at - self._progress_at
        if self._num_queued and stuck >= self.timeout:
            return f"{self._num_queued} volumes are queued and none has completed for {stuck:.1f} s"
        return None
