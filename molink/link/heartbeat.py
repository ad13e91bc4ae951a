"""Signs of life between stages, without I/O: when to heartbeat, and when the next stage is dead.

libzmq's own heartbeat is answered by its I/O thread while Python hangs, so a stage shows its
compute thread's progress instead.
"""

from collections import deque

import msgspec

#: Seconds between heartbeats while no request lives: two may be lost within :data:`PATIENCE`.
IDLE_INTERVAL = 1.0
#: The same while requests live: TCP forgets its window after about 250 ms without traffic.
BUSY_INTERVAL = 0.1
#: The least time without progress that is death, in seconds, however short the steps are; and
#: the time without a sign of life, while requests live.
TIMEOUT = 3.0
#: The same while none does: heartbeats are then a second apart.
IDLE_TIMEOUT = 4.0
#: Seconds of silence after which the connections are made anew, while requests live and while none
#: does: after a cut of 2 s TCP may try again only 4 s after it began, since it doubles its pauses.
#: A new connection tries at once, and a second later.
STALL_TIMEOUT = 1.4
IDLE_STALL_TIMEOUT = 2.0
#: Predicted durations of a step without progress that are death: predictions are off by less.
TIMEOUT_FACTOR = 5.0
#: The patience with a stage that has not been reached yet, in seconds: it may have a step to
#: finish.
CONNECT_TIMEOUT = 60.0
#: What an echo says beyond this is no measurement, in seconds: by then the stage counts as dead.
_MAX_ROUND_TRIP = 60.0
#: The least round trip is that of so many seconds, a dozen heartbeats: a link that changes is known
#: anew within 2 s.
_MIN_WINDOW = 1.25
#: Trips of so many seconds have to agree where each by itself may mean something else; 2 s again.
_CONSENSUS_WINDOW = 1.6
#: Heartbeats and trips that are kept at most: several times what comes in that time.
_MAX_HEARTBEATS = 64
#: What is under way beside a heartbeat, as a share of what the link can deliver in its round trip:
#: beside little it tells what the link's own is, whatever the rate; with much the link was full.
_LOW_LOAD = 0.05
_FULL_LOAD = 0.75
#: A trip moves the smoothed one by one part in so many of their difference (RFC 6298).
_SMOOTHING = 8
#: Seconds between two looks: while it is heard of and has nothing to do, and else.
_AT_EASE, _ATTENTIVE = IDLE_INTERVAL, 0.5
#: A look that comes so many seconds late is our own pause: time in which nobody looked doesn't
#: count.
_LOCAL_PAUSE = 0.5


class StageProgress(msgspec.Struct, frozen=True):
    """What a stage tells its neighbours of itself.

    ``completed_seq`` is the last seq its compute thread has completed, ``num_queued`` how many
    volumes wait for it or are being run, ``has_requests`` whether any request lives,
    ``predicted_s`` how long the step that runs should take, in seconds.
    """

    completed_seq: int
    num_queued: int
    has_requests: bool
    predicted_s: float = 0.0


class HeartbeatClock:
    """When to send the next heartbeat."""

    def __init__(self, now: float) -> None:
        self._last = now - IDLE_INTERVAL

    def next_at(self, has_requests: bool) -> float:
        """When it is due; ``has_requests`` while requests live."""
        return self._last + (BUSY_INTERVAL if has_requests else IDLE_INTERVAL)

    def mark_sent(self, now: float) -> None:
        """One has been sent."""
        self._last = now


class _HeartbeatTrip(msgspec.Struct, frozen=True):
    at: float
    round_trip_s: float
    #: Without the time it waited behind what had been sent just before, as far as is known.
    unqueued_s: float
    #: Bytes that were under way as it left, and the link's rate as it was known when it was back.
    bytes_ahead: int
    rate: float | None


class RoundTripEstimator:
    """Seconds there and back, from the echoes of heartbeats.

    ``min_rtt`` is the link's own: the least of late, without the wait behind our own messages. A
    heartbeat on a link that was full all the while says only that the link's own is not longer. One
    on a link that seems half empty may have met a lower rate instead: it counts if all did of late,
    by when the rate is known.
    """

    def __init__(self, start: float | None = None) -> None:
        """``start`` is believed until something is measured."""
        self.smoothed_rtt = 0.0 if start is None else start
        self._minimum = start
        self._measured = False
        #: Heartbeats that have not come back: when they left, bytes under way then, and their wait.
        self._in_flight: deque[tuple[float, int, float]] = deque(maxlen=_MAX_HEARTBEATS)
        self._trips: deque[_HeartbeatTrip] = deque(maxlen=_MAX_HEARTBEATS)

    def on_sent(self, now: float, bytes_ahead: int, wait: float) -> None:
        """A heartbeat leaves.

        ``ahead`` bytes were sent before it and not acknowledged; it should wait ``wait`` seconds
        for them.
        """
        self._in_flight.append((now, bytes_ahead, wait))

    def on_echo(self, sent_at: float, rate: float | None, now: float) -> bool:
        """The heartbeat that left at ``sent_at`` is back; ``False`` if none did, or it is too late.

        ``rate`` is the link's in bytes/s, ``None`` if unknown.
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
        """Something else has arrived, and its acknowledgement come back, within ``seconds``.

        Returns whether that is news.
        """
        known = min((trip.round_trip_s for trip in self._trips), default=_MAX_ROUND_TRIP)
        news = 0 < seconds < known
        if news:
            self._trips.append(_HeartbeatTrip(now, seconds, 0.0, 0, 0.0))
        return news

    def min_rtt(self, now: float, rate: float | None) -> float | None:
        """The least round trip of late; ``rate`` is as above. ``None`` = unknown."""
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
    """How much was under way beside a heartbeat, as a share of what the link can deliver meanwhile.

    Above :data:`_FULL_LOAD`, or where it waited for longer than it travelled, the link was full.
    """
    if trip.unqueued_s < _FULL_LOAD * trip.round_trip_s:
        return 1.0
    if not trip.bytes_ahead:
        return 0.0
    if rate is None or trip.rate is None:
        return 0.0
    return trip.bytes_ahead / (min(rate, trip.rate) * trip.round_trip_s)


def timeout_for(predicted_s: float) -> float:
    """Seconds without progress that are death, for a step that should take ``predicted`` ones."""
    return max(TIMEOUT, TIMEOUT_FACTOR * predicted_s)


class LinkLiveness:
    """Whether the next stage is alive: it heartbeats, and it gets on while it has work.

    Progress is a risen ``completed`` seq or an empty queue. How long its step should take, the
    stage says itself.
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
        """The stage has completed seq ``completed`` and ``queued`` volumes wait for it.

        ``predicted`` is how long the step that runs there should take, in seconds.
        """
        # Work that has just come in has waited for nothing yet.
        if completed_seq > self._completed_seq or num_queued == 0 or self._num_queued == 0:
            self._progress_at = now
        self._is_reached = True
        self._predicted_s = predicted_s
        self._completed_seq = max(completed_seq, self._completed_seq)
        self._num_queued = num_queued
        self._heartbeat_at = now

    @property
    def timeout(self) -> float:
        """Seconds without a sign of life that are death."""
        if not self._is_reached:
            return CONNECT_TIMEOUT
        return timeout_for(self._predicted_s)

    def next_check(self, now: float) -> float:
        """When to look again at the latest."""
        at_ease = not self.is_quiet(now) and not self._num_queued
        self._interval = _AT_EASE if at_ease else _ATTENTIVE
        return now + self._interval

    def is_quiet(self, now: float) -> bool:
        """Whether it has been silent for so long that it matters whether requests live."""
        return now - self._heartbeat_at >= STALL_TIMEOUT

    def should_reconnect(self, now: float, has_requests: bool) -> bool:
        """Whether to make the connections anew, which is then taken for done.

        ``busy`` while requests live.
        """
        stall = STALL_TIMEOUT if has_requests else IDLE_STALL_TIMEOUT
        if not self._is_reached or now - max(self._heartbeat_at, self._reconnected_at) < stall:
            return False
        self._reconnected_at = now
        return True

    def death_reason(self, now: float, has_requests: bool) -> str | None:
        """Why the stage counts as dead, or ``None``. To be asked by :meth:`next_check`.

        ``busy`` while requests live.
        """
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
            return f"no sign of life for {silent:.1f} s"
        # Nothing is known of its progress since it was last heard of.
        stuck = self._heartbeat_at - self._progress_at
        if self._num_queued and stuck >= self.timeout:
            return f"{self._num_queued} volumes wait and none was completed for {stuck:.1f} s"
        return None
