"""Durations of a change's phases, as the coordinator sees them.

A change is a recovery or a better placement. A PC's own interruptions are in
:mod:`molink.swarm.agent.recovery`.
"""

from typing import Literal

#: ``decided``: stages are assigned. ``loaded``: all have their weights. ``formed``: the ring is up.
Phase = Literal["decided", "loaded", "formed"]


class PhaseTimes:
    """The last change, from its detection until the ring is up."""

    def __init__(self) -> None:
        self._reason = ""
        self._noticed_at: float | None = None
        self._reached_at: dict[Phase, float] = {}

    def begin_change(self, reason: str, now: float) -> None:
        """Begin a change, or restart the phases of an unfinished one."""
        if self._noticed_at is None or "formed" in self._reached_at:
            self._reason, self._noticed_at = reason, now
        self._reached_at = {}

    def record_phase(self, phase: Phase, now: float) -> None:
        """A phase has ended."""
        self._reached_at.setdefault(phase, now)

    def to_status(self) -> dict[str, str | float]:
        """Content for ``molink status --json``: seconds since detection."""
        if self._noticed_at is None:
            return {}
        began = self._noticed_at
        seconds = {phase: round(at - began, 3) for phase, at in self._reached_at.items()}
        return {"reason": self._reason} | seconds
