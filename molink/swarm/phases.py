"""How long each phase of a change took: of a recovery after a loss, or of a better placement.

As the coordinator sees it, from the beginning of the last change; what a PC itself spends the time
of interruptions on, and sums of that, is in :mod:`molink.swarm.agent.recovery`.
"""

from typing import Literal

#: ``decided``: the stages are handed out. ``loaded``: all have their weights. ``formed``: the ring
#: stands.
Phase = Literal["decided", "loaded", "formed"]


class Phases:
    """The last change, from its being noticed until the ring stands."""

    def __init__(self) -> None:
        self._reason = ""
        self._noticed: float | None = None
        self._reached: dict[Phase, float] = {}

    def begin(self, reason: str, now: float) -> None:
        """Something is noticed. A change that has not come to its end begins anew, but goes on."""
        if self._noticed is None or "formed" in self._reached:
            self._reason, self._noticed = reason, now
        self._reached = {}

    def reach(self, phase: Phase, now: float) -> None:
        """A phase has ended."""
        self._reached.setdefault(phase, now)

    def shown(self) -> dict[str, str | float]:
        """What ``molink status --json`` shows: seconds since it was noticed."""
        if self._noticed is None:
            return {}
        began = self._noticed
        seconds = {phase: round(at - began, 3) for phase, at in self._reached.items()}
        return {"reason": self._reason} | seconds
