"""Whether a worker answers its daemon: a question at a time, and how long it has been open.

A plain object. Times are seconds of a monotonic clock.
"""

#: Between an answer and the next question.
PERIOD = 1.0
#: An open question is death after that, …
PATIENCE = 4.0
#: … and after that for a worker that is to be used again, since something has just failed.
HURRY = 1.5


class Pulse:
    """Questions to one worker, and its answers."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._asked_at: float | None = None

    def due(self, now: float) -> bool:
        """Whether it is time for a question."""
        return self._asked_at is None and now - self._heard_at >= PERIOD

    def ask(self, now: float) -> bool:
        """Ask now; whether there was no open question yet."""
        if self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def answered(self, now: float) -> None:
        """It lives."""
        self._heard_at, self._asked_at = now, None

    def silent(self, now: float) -> float:
        """Seconds since the question that is open; 0 if none is."""
        return 0.0 if self._asked_at is None else now - self._asked_at
