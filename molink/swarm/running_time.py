"""A clock that skips time in which this process did not run.

A stopped process or a sleeping PC hears nothing. What peers sent meanwhile waits in its sockets,
but its timers fire first. Timeouts on peers' silence, or on its own waiting, use this clock
instead.
"""

#: If two readings are further apart than this, in seconds, the process did not run in between. So
#: the clock must be read several times a second.
MAX_STEP = 1.0


class RunningTime:
    """Converts a monotonic clock's seconds into running time."""

    def __init__(self, now: float) -> None:
        self._last = now
        #: Seconds skipped so far.
        self.skipped_s = 0.0

    def counted_time(self, now: float) -> float:
        """Running time at ``now``; never decreases, and stands still over a standstill."""
        step = now - self._last
        if step > MAX_STEP:
            self.skipped_s += step
        self._last = now
        return now - self.skipped_s
