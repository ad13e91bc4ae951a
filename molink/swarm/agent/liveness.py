"""Whether a worker answers its daemon: a question at a time, and how long it has been open.

A plain object. Times are seconds of a monotonic clock.
"""

#: Between an answer and the next question.
PROBE_PERIOD = 1.0
#: An open question is death after that, …
PROBE_TIMEOUT = 4.0
#: … and after that for a worker that is to be used again, since something has just failed.
VERIFY_TIMEOUT = 1.5


class LivenessProbe:
    """Questions to one worker, and its answers."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._asked_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether it is time for a question."""
        return self._asked_at is None and now - self._heard_at >= PROBE_PERIOD

    def start_probe(self, now: float) -> bool:
        """Ask now; whether there was no open question yet."""
        if self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def on_answer(self, now: float) -> None:
        """It lives."""
        self._heard_at, self._asked_at = now, None

    def unanswered_time(self, now: float) -> float:
        """Seconds since the question that is open; 0 if none is."""
        return 0.0 if self._asked_at is None else now - self._asked_at
