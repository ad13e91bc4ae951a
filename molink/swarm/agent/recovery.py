"""How long a pipeline's interruptions last on this PC, by phase.

A plain object. Each phase begins where the one before it has ended, so that together they are the
whole time from noticing that the pipeline serves no more to the next token of every stream.
"""

from typing import Literal

#: ``decided``: until this PC has a new assignment, or a ring for the stage that it has.
#: ``files``: until the stage's files are there and its memory is planned. ``process``: until its
#: worker runs and has read what to load; ``weights``, ``profile``: until it has loaded and measured
#: them. ``others``: until all other stages have loaded too. ``formed``: until the ring is there.
#: ``replayed``: until every stream that waited has its next token.
RecoveryPhase = Literal[
    "decided", "files", "process", "weights", "profile", "others", "formed", "replayed"
]
RECOVERY_PHASES: tuple[RecoveryPhase, ...] = (
    "decided",
    "files",
    "process",
    "weights",
    "profile",
    "others",
    "formed",
    "replayed",
)


class RecoveryTimer:
    """Times of the latest interruption, and sums over all of them. Times in seconds."""

    def __init__(self) -> None:
        #: Of the latest interruption that is over.
        self.latest: dict[RecoveryPhase, float] = dict.fromkeys(RECOVERY_PHASES, 0.0)
        #: Over all interruptions.
        self.sums: dict[RecoveryPhase, float] = dict.fromkeys(RECOVERY_PHASES, 0.0)
        self.count = 0
        #: When the latest was noticed, by the clock on the wall.
        self.noticed_at = 0.0
        self._current: dict[RecoveryPhase, float] | None = None
        self._since = 0.0

    def start_outage(self, now: float, wall: float) -> None:
        """The pipeline serves no more; ``wall`` is the time of day as seconds since 1970."""
        if self._current is None:
            self._current, self._since = dict.fromkeys(RECOVERY_PHASES, 0.0), now
            self.noticed_at = wall

    @property
    def is_active(self) -> bool:
        """Whether the pipeline was noticed to serve no more, and does not serve again yet."""
        return self._current is not None

    def end_phase(self, phase: RecoveryPhase, now: float) -> None:
        """A phase is over. One that comes again, after a failure on the way, is added up."""
        if self._current is not None:
            self._current[phase] += now - self._since
            self._since = now

    def record_load(self, weights: float, profile: float, now: float) -> None:
        """A worker was started and has loaded; it says how long two parts of that took."""
        if self._current is None:
            return
        taken = now - self._since
        profile = min(profile, taken)
        weights = min(weights, taken - profile)
        self._current["process"] += taken - weights - profile
        self._current["weights"] += weights
        self._current["profile"] += profile
        self._since = now

    def finish_recovery(self, now: float) -> str | None:
        """Every stream that waited goes on; says how long it took, if it had been noticed."""
        if self._current is None:
            return None
        self.end_phase("replayed", now)
        self.latest, self._current = self._current, None
        self.count += 1
        for phase, seconds in self.latest.items():
            self.sums[phase] += seconds
        parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.latest.items())
        return f"served again after {sum(self.latest.values()):.2f} s: {parts}"

    @property
    def counters(self) -> dict[str, float]:
        """As ``/metrics`` names them."""
        sums = {f"recovery_{phase}_seconds": seconds for phase, seconds in self.sums.items()}
        return {"recoveries": float(self.count), **sums}

    @property
    def gauges(self) -> dict[str, float]:
        """Of the latest one, as ``/metrics`` names them."""
        last = {f"recovery_last_{phase}_seconds": each for phase, each in self.latest.items()}
        return {"recovery_noticed_timestamp_seconds": self.noticed_at, **last}
