"""First come, first served."""

from collections.abc import Collection, Sequence

from molink.scheduler.policies.base import PreemptionDecision, SchedulingPolicy, choose_stalled
from molink.scheduler.request_state import RequestState


class Fcfs(SchedulingPolicy):
    """The policy of vLLM and of the papers' baselines, on top of fair shares."""

    def choose_admitted(
        self, waiting: Sequence[RequestState], admitted: Collection[RequestState], now: float
    ) -> RequestState | None:
        """The first request."""
        return waiting[0]

    def order_running(self, requests: Sequence[RequestState], now: float) -> Sequence[RequestState]:
        """In order of return or admission."""
        return requests

    def choose_preempted(
        self,
        preemptor: RequestState,
        idle_requests: Sequence[RequestState],
        admitted: Collection[RequestState],
        now: float,
    ) -> PreemptionDecision | None:
        """A stalled request; for a decoding preemptor, otherwise the latest admitted.

        It must have been admitted after the preemptor, so that the oldest request makes progress.
        """
        idle = choose_stalled(preemptor, idle_requests, admitted, now)
        if idle is not None or preemptor.phase == "waiting":
            return PreemptionDecision(idle) if idle is not None else None
        younger = [state for state in idle_requests if state.id > preemptor.id]
        latest = max(younger, key=lambda state: state.id, default=None)
        return PreemptionDecision(latest) if latest is not None else None
