"""Detects an unresponsive worker by pings, one at a time. Sans-IO; times in monotonic seconds."""

from molink.util.timeouts import TIMEOUTS

#: Seconds from an answer to the next ping.
PROBE_PERIOD = 1.0
#: Seconds after which an unanswered ping means that the worker is dead.
PROBE_TIMEOUT = TIMEOUTS.worker
#: The same, for a worker that is about to be reused after a failure.
VERIFY_TIMEOUT = TIMEOUTS.suspected_worker


class LivenessProbe:
    """Pings to one worker, and its answers."""

    def __init__(self, now: float) -> None:
        self._answered_at = now
        self._pinged_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether to send the next ping."""
        return self._pinged_at is None and now - self._answered_at >= PROBE_PERIOD

    def start_probe(self, now: float) -> bool:
        """Record a ping; ``False`` if one is unanswered."""
        if self._pinged_at is not None:
            return False
        self._pinged_at = now
        return True

    def on_answer(self, now: float) -> None:
        """Record an answer."""
        self._answered_at, self._pinged_at = now, None

    def unanswered_time(self, now: float) -> float:
        """Return the seconds since the unanswered ping; 0 if there is none."""
        return 0.0 if self._pinged_at is None else now - self._pinged_at
