"""Priorities by the length of the prompt, for good: FastServe's other strawman (§4.1)."""

from molink.scheduler.job import Job
from molink.scheduler.policies.mlfq import QueuePosition
from molink.scheduler.policies.ranked import Rank
from molink.scheduler.policies.skip_join_mlfq import SkipJoinMlfq


class FixedPriority(SkipJoinMlfq):
    """As skip-join MLFQ, but that a job stays in the queue that it has joined.

    It knows nothing of how long answers are, and a long prompt waits for as long as shorter ones
    keep coming.
    """

    def ran(self, job: Job, seconds: float, now: float) -> None:
        """It consumes nothing."""

    def issued(self, job: Job, now: float) -> None:
        """It is not promoted either."""

    def _promoted_at(self, place: QueuePosition) -> float | None:
        """Never."""
        return None

    def may_give_way(self, job: Job) -> bool:
        """To any with a shorter prompt, whatever that costs."""
        return True

    def rank(self, job: Job, now: float) -> Rank:
        """By queue; within one, who came first."""
        place = self._places[job]
        return place.level, 0.0, place.number
