"""How long each phase of a change took: of a recovery after a loss, or of a better placement.

As the coordinator sees it, from the beginning of the last change; what a PC itself spends the time
of interruptions on, and sums of that, is in :mod:`molink.swarm.agent.recovery`.
"""

from typing import Literal

#: ``decided``: the stages are handed out. ``loaded``: all have their weights. ``formed``: the ring
#: stands.
Phase = Literal["decided", "loaded", "formed"]


class PhaseTimes:
    """The last change, from its being noticed until the ring stands."""

    def __init__(self) -> None:
        self._reason = ""
        self._noticed_at: float | None = None
        self._reached_at: dict[Phase, float] = {}

    def begin_change(self, reason: str, now: float) -> None:
        """Something is noticed. A change that has not come to its end begins anew, but goes on."""
        if self._noticed_at is None or "formed" in self._reached_at:
            self._reason, self._noticed_at = reason, now
        self._reached_at = {}

    def record_phase(self, phase: Phase, now: float) -> None:
        """A phase has ended."""
        self._reached_at.setdefault(phase, now)

    def to_status(self) -> dict[str, str | float]:
        """What ``molink status --json`` shows: seconds since it was noticed."""
        if self._noticed_at is None:
            return {}
        began = self._noticed_at
        seconds = {phase: round(at - began, 3) for phase, at in self._reached_at.items()}
        return {"reason": self._reason} | seconds
