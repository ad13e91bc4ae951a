"""Base class of policies that rank requests."""

from abc import abstractmethod
from collections.abc import Sequence

from molink.facts.ring_times import RingTimes
from molink.scheduler.policies.base import RestoreCost, SchedulingPolicy, choose_stalled
from molink.scheduler.request_state import RequestState

#: Level, time of joining the level, arrival number; the lowest rank runs first. Ranks are unique.
Rank = tuple[float, float, int]


class RankedPolicy(SchedulingPolicy):
    """Orders requests by rank; within a level, clients are admitted by fair shares."""

    def __init__(self) -> None:
        #: Measured stage and link times.
        self.ring_times = RingTimes((), (), 0)
        #: Returns the seconds to restore a preempted request by copies.
        self.restore_cost: RestoreCost = lambda state: None

    def set_times(self, times: RingTimes) -> None:
        self.ring_times = times

    def set_restore_cost(self, seconds: RestoreCost) -> None:
        self.restore_cost = seconds

    @abstractmethod
    def rank_request(self, state: RequestState, now: float) -> Rank:
        """Return the rank of a request."""

    def can_be_preempted(self, state: RequestState) -> bool:
        """Whether a request can be preempted for a waiting one."""
        return True

    def can_preempt(self, preemptor: RequestState, other: RequestState, now: float) -> bool:
        """Whether the waiting ``preemptor`` outranks ``other`` enough to preempt it."""
        return self.rank_request(preemptor, now)[0] < self.rank_request(other, now)[0]

    def choose_admitted(self, waiting: Sequence[RequestState], now: float) -> RequestState | None:
        """Choose the best request of the first client on the best level."""
        ranks = {state: self.rank_request(state, now) for state in waiting}
        best = min(level for level, _, _ in ranks.values())
        level = [state for state in waiting if ranks[state][0] == best]
        requests = [state for state in level if state.client_key == level[0].client_key]
        return min(requests, key=lambda state: (state.request.priority, ranks[state]))

    def order_running(self, requests: Sequence[RequestState], now: float) -> Sequence[RequestState]:
        return sorted(requests, key=lambda state: self.rank_request(state, now))

    def choose_preempted(
        self, preemptor: RequestState, idle: Sequence[RequestState], num_running: int, now: float
    ) -> RequestState | None:
        """Choose a stalled request, or the last-ranked one behind ``preemptor``.

        For a waiting preemptor, it must be on a worse level and :meth:`can_be_preempted`.
        """
        stalled = choose_stalled(preemptor, idle, num_running, now)
        if stalled is not None:
            return stalled
        if preemptor.phase == "waiting":
            idle = [state for state in idle if self.can_be_preempted(state)]
        last = max(idle, key=lambda state: self.rank_request(state, now), default=None)
        if last is None:
            return None
        if preemptor.phase == "waiting":
            behind = self.can_preempt(preemptor, last, now)
        else:
            behind = self.rank_request(preemptor, now) < self.rank_request(last, now)
        return last if behind else None
