"""Time in which this process ran, for what it may not hold against others.

A process that is stopped, or whose PC sleeps, hears nobody meanwhile. What others have sent waits
in its sockets when it goes on, but its timers are due first. So whoever judges others by their
silence, or itself by how long it has waited, counts only the time in which it could hear.
"""

#: A longer step between two looks at the clock, in seconds, is a standstill; so there is to be a
#: look several times a second.
MAX_STEP = 1.0


class RunningTime:
    """Turns the seconds of a monotonic clock into those that count."""

    def __init__(self, now: float) -> None:
        self._last = now
        #: Seconds that didn't count so far.
        self.skipped_s = 0.0

    def counted_time(self, now: float) -> float:
        """What counts of ``now``. It never goes back, and stays as it was over a standstill."""
        step = now - self._last
        if step > MAX_STEP:
            self.skipped_s += step
        self._last = now
        return now - self.skipped_s
