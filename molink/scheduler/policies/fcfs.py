"""First come, first served."""

from collections.abc import Sequence

from molink.scheduler.policies.base import SchedulingPolicy, choose_stalled
from molink.scheduler.request_state import RequestState


class Fcfs(SchedulingPolicy):
    """The policy of vLLM and of the papers' baselines, on top of fair shares."""

    def choose_admitted(self, waiting: Sequence[RequestState], now: float) -> RequestState | None:
        """Choose the first request."""
        return waiting[0]

    def order_running(self, requests: Sequence[RequestState], now: float) -> Sequence[RequestState]:
        """Keep the order of return or admission."""
        return requests

    def choose_preempted(
        self, preemptor: RequestState, idle: Sequence[RequestState], num_running: int, now: float
    ) -> RequestState | None:
        """Choose a stalled request or, for a decoding preemptor, the latest admitted one.

        The latter must have been admitted after the preemptor, so that the oldest request makes
        progress.
        """
        stalled = choose_stalled(preemptor, idle, num_running, now)
        if stalled is not None or preemptor.phase == "waiting":
            return stalled
        younger = [state for state in idle if state.id > preemptor.id]
        return max(younger, key=lambda state: state.id, default=None)
