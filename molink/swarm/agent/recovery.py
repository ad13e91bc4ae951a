"""Measures outages of a pipeline on this PC, by phase.

Each phase starts where the previous one ends, so together they cover the time from the detection of
the outage to the next token of every stream.
"""

from typing import Literal, get_args

#: ``decided``: until this PC has a new assignment, or a ring for its stage. ``files``: until the
#: stage's files are on this PC and its memory is planned. ``process``: until its worker runs and
#: has instructions; ``weights``, ``profile``: until it has loaded and profiled the layers.
#: ``others``: until all other stages have loaded. ``formed``: until the ring is formed.
#: ``replayed``: until every waiting stream has its next token.
RecoveryPhase = Literal[
    "decided", "files", "process", "weights", "profile", "others", "formed", "replayed"
]
RECOVERY_PHASES: tuple[RecoveryPhase, ...] = get_args(RecoveryPhase)


class RecoveryTimer:
    """Seconds of the latest recovery by phase, and sums over all of them."""

    def __init__(self) -> None:
        #: The latest complete recovery.
        self.latest: dict[RecoveryPhase, float] = dict.fromkeys(RECOVERY_PHASES, 0.0)
        self.sums: dict[RecoveryPhase, float] = dict.fromkeys(RECOVERY_PHASES, 0.0)
        self.count = 0
        #: Unix time at which the latest outage was detected.
        self.noticed_at = 0.0
        self._current: dict[RecoveryPhase, float] | None = None
        self._since = 0.0

    def start_outage(self, now: float, wall: float) -> None:
        """Record that the pipeline stopped serving; ``wall`` is unix time."""
        if self._current is None:
            self._current, self._since = dict.fromkeys(RECOVERY_PHASES, 0.0), now
            self.noticed_at = wall

    @property
    def is_active(self) -> bool:
        """Whether an outage is in progress."""
        return self._current is not None

    def end_phase(self, phase: RecoveryPhase, now: float) -> None:
        """End a phase; repetitions of a phase after further failures are added up."""
        if self._current is not None:
            self._current[phase] += now - self._since
            self._since = now

    def record_load(self, weights: float, profile: float, now: float) -> None:
        """End the phases of a worker's start; the worker reports how long loading and profiling
        took.
        """
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
        """Record that all waiting streams have resumed; return a summary if there was an outage."""
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
        """Return counters for ``/metrics``."""
        sums = {f"recovery_{phase}_seconds": seconds for phase, seconds in self.sums.items()}
        return {"recoveries": float(self.count), **sums}

    @property
    def gauges(self) -> dict[str, float]:
        """Return gauges of the latest recovery for ``/metrics``."""
        last = {f"recovery_last_{phase}_seconds": each for phase, each in self.latest.items()}
        return {"recovery_noticed_timestamp_seconds": self.noticed_at, **last}
