"""What policies have in common that rank jobs."""

from abc import abstractmethod
from collections.abc import Collection, Sequence

from molink.facts.ring_times import RingTimes
from molink.scheduler.policies.base import (
    PreemptionDecision,
    RestoreCost,
    SchedulingPolicy,
    choose_stalled,
)
from molink.scheduler.request_state import RequestState

#: Level, when it came to that level, and as which of all jobs it arrived: the least goes first. No
#: two jobs have the same.
Rank = tuple[float, float, int]


class RankedPolicy(SchedulingPolicy):
    """Goes by the rank of a job; at admission, within a level, clients have equal shares."""

    def __init__(self) -> None:
        #: What stages and links take, as far as it is known.
        self.ring_times = RingTimes((), (), 0)
        #: What copies take until one that gave way is where it was, where there are any.
        self.restore_cost: RestoreCost = lambda state: None

    def set_times(self, times: RingTimes) -> None:
        """Predictions go by these from now on."""
        self.ring_times = times

    def set_restore_cost(self, seconds: RestoreCost) -> None:
        """As :class:`SchedulingPolicy` says."""
        self.restore_cost = seconds

    @abstractmethod
    def rank_request(self, state: RequestState, now: float) -> Rank:
        """The place of ``job`` among all jobs."""

    def can_be_preempted(self, state: RequestState) -> bool:
        """Whether ``job`` can be preempted for one that waits."""
        return True

    def can_preempt(self, preemptor: RequestState, other: RequestState, now: float) -> bool:
        """Whether ``needy``, which waits, goes so far before ``other`` that this gives way."""
        return self.rank_request(preemptor, now)[0] < self.rank_request(other, now)[0]

    def choose_admitted(
        self, waiting: Sequence[RequestState], admitted: Collection[RequestState], now: float
    ) -> RequestState | None:
        """Of the best level the first one of the client whose turn it is."""
        ranks = {state: self.rank_request(state, now) for state in waiting}
        best = min(level for level, _, _ in ranks.values())
        level = [state for state in waiting if ranks[state][0] == best]
        theirs = [state for state in level if state.client_key == level[0].client_key]
        return min(theirs, key=lambda state: (state.request.priority, ranks[state]))

    def order_running(self, requests: Sequence[RequestState], now: float) -> Sequence[RequestState]:
        """By rank."""
        return sorted(requests, key=lambda state: self.rank_request(state, now))

    def choose_preempted(
        self,
        preemptor: RequestState,
        idle_requests: Sequence[RequestState],
        admitted: Collection[RequestState],
        now: float,
    ) -> PreemptionDecision | None:
        """One that waits for its client, else the last one behind ``needy``.

        For a job that waits it has to be of a worse level, and one that :meth:`can_be_preempted`:
        of two equal ones the one that has blocks goes on.
        """
        idle = choose_stalled(preemptor, idle_requests, admitted, now)
        if idle is not None:
            return PreemptionDecision(idle)
        if preemptor.phase == "waiting":
            idle_requests = [state for state in idle_requests if self.can_be_preempted(state)]
        last = max(idle_requests, key=lambda state: self.rank_request(state, now), default=None)
        if last is None:
            return None
        if preemptor.phase == "waiting":
            behind = self.can_preempt(preemptor, last, now)
        else:
            behind = self.rank_request(preemptor, now) < self.rank_request(last, now)
        return PreemptionDecision(last) if behind else None
