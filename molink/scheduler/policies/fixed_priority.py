"""Priorities by the length of the prompt, for good: FastServe's other strawman (§4.1)."""

from molink.scheduler.policies.mlfq import QueuePosition
from molink.scheduler.policies.ranked import Rank
from molink.scheduler.policies.skip_join_mlfq import SkipJoinMlfq
from molink.scheduler.request_state import RequestState


class FixedPriority(SkipJoinMlfq):
    """As skip-join MLFQ, but that a job stays in the queue that it has joined.

    It knows nothing of how long answers are, and a long prompt waits for as long as shorter ones
    keep coming.
    """

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """It consumes nothing."""

    def on_issued(self, state: RequestState, now: float) -> None:
        """It is not promoted either."""

    def _promoted_at(self, place: QueuePosition) -> float | None:
        """Never."""
        return None

    def can_be_preempted(self, state: RequestState) -> bool:
        """To any with a shorter prompt, whatever that costs."""
        return True

    def rank_request(self, state: RequestState, now: float) -> Rank:
        """By queue; within one, who came first."""
        place = self._positions[state]
        return place.level, 0.0, place.arrival_number
