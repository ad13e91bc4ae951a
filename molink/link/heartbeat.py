"""Signs of life between stages, without I/O: when to beat, and when the next stage is dead.

libzmq's own heartbeat is answered by its I/O thread while Python hangs, so a stage shows its
compute thread's progress instead.
"""

from dataclasses import dataclass

IDLE_INTERVAL = 1.0
#: While requests live: TCP forgets its window after about 250 ms without traffic.
BUSY_INTERVAL = 0.1
#: The least time without a sign of life that is death.
PATIENCE = 3.0
#: Predicted durations without progress that are death.
PATIENCE_FACTOR = 5.0
#: The patience with a stage that has not been reached yet: it may have a step to finish.
FIRST_PATIENCE = 60.0
#: What an echo says beyond this is no measurement.
_LONGEST_ROUND_TRIP = 60.0
#: A longer pause between two looks is our own: time in which nobody looked doesn't count.
_OWN_PAUSE = 1.0


class BeatClock:
    """When to send the next beat."""

    def __init__(self, now: float) -> None:
        self._last = now - IDLE_INTERVAL

    def next_at(self, busy: bool) -> float:
        """When it is due; ``busy`` while requests live."""
        return self._last + (BUSY_INTERVAL if busy else IDLE_INTERVAL)

    def beat(self, now: float) -> None:
        """One has been sent."""
        self._last = now


@dataclass(slots=True)
class RoundTrip:
    """Seconds there and back, from the echoes of beats."""

    smooth: float = 0.0
    least: float = 0.0

    def measured(self, seconds: float) -> None:
        """A beat has come back after ``seconds``."""
        if not 0 < seconds < _LONGEST_ROUND_TRIP:
            return
        self.smooth = seconds if self.smooth == 0 else self.smooth + (seconds - self.smooth) / 8
        self.least = seconds if self.least == 0 else min(self.least, seconds)


class Liveness:
    """Whether the next stage is alive: it beats, and it gets on while it has work.

    Progress is a risen ``completed`` tick or an empty queue. How long its step should take, the
    stage says itself.
    """

    def __init__(self, now: float) -> None:
        self._predicted = 0.0
        self._reached = False
        self._beat_at = now
        self._progress_at = now
        self._looked_at = now
        self._completed = -1
        self._queued = 0

    def beat(self, completed: int, queued: int, predicted: float, now: float) -> None:
        """The stage has completed tick ``completed`` and ``queued`` volumes wait for it.

        ``predicted`` is how long the step that runs there should take, in seconds.
        """
        # Work that has just come in has waited for nothing yet.
        if completed > self._completed or queued == 0 or self._queued == 0:
            self._progress_at = now
        self._reached = True
        self._predicted = predicted
        self._completed = max(completed, self._completed)
        self._queued = queued
        self._beat_at = now

    @property
    def patience(self) -> float:
        """Seconds without a sign of life that are death."""
        if not self._reached:
            return FIRST_PATIENCE
        return max(PATIENCE, PATIENCE_FACTOR * self._predicted)

    def death(self, now: float) -> str | None:
        """Why the stage counts as dead, or ``None``. To be asked at least twice a second."""
        pause = now - self._looked_at
        self._looked_at = now
        if pause > _OWN_PAUSE:
            self._beat_at += pause
            self._progress_at += pause
        silent = now - self._beat_at
        if silent >= self.patience:
            return f"no sign of life for {silent:.1f} s"
        stuck = now - self._progress_at
        if self._queued and stuck >= self.patience:
            return f"{self._queued} volumes wait and none was completed for {stuck:.1f} s"
        return None
