"""Reports that go once round the ring, each from the stage that it is of to the one before it."""

import math

#: Seconds between two reports that are passed on of one stage, on average.
MIN_INTERVAL = 0.2
#: Reports of one stage that may come at once, when a link that was cut delivers again.
MAX_BURST = 32


class ReportForwarder:
    """Which reports of other stages are passed on here."""

    def __init__(self, stage: int, stages: int) -> None:
        self._stage = stage
        self._stages = stages
        self._next = (stage + 1) % stages
        #: By stage: when reports passed on so far would have been due, one each :data:`HASTE`.
        self._due_at = [-math.inf] * stages

    def should_forward(self, stage: int, now: float) -> bool:
        """Whether the next stage has not seen this report of ``stage``, and it is not one of a
        flood."""
        earliest = now - MAX_BURST * MIN_INTERVAL
        due_at = max(self._due_at[stage], earliest) + MIN_INTERVAL
        if stage == self._next or due_at > now:
            return False
        self._due_at[stage] = due_at
        return True

    def _is_other_stage(self, stage: int) -> bool:
        """Whether there is such a stage, other than this one."""
        return stage < self._stages and stage != self._stage
