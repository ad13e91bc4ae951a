"""A clock that skips time in which this process did not run.

A stopped process or a sleeping PC hears nothing. Messages that peers sent meanwhile wait in its
sockets, but its timers fire first. So timeouts of peers' silence, or of its own waiting, use this
clock.
"""

#: Seconds between two readings above which the process did not run in between. So the clock must be
#: read several times a second.
MAX_STEP = 1.0


class RunningTime:
    """Converts a monotonic clock's seconds into running time."""

    def __init__(self, now: float) -> None:
        self._last = now
        #: Total seconds skipped.
        self.skipped_s = 0.0

    def counted_time(self, now: float) -> float:
        """Return the running time at ``now``, which never decreases and excludes standstills."""
        step = now - self._last
        if step > MAX_STEP:
            self.skipped_s += step
        self._last = now
        return now - self.skipped_s
