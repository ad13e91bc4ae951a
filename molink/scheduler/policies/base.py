"""The interface of scheduling policies.

The scheduler asks a policy which request to admit next, in what order requests run, which to
preempt, and when each will be scheduled. The policy only orders requests. The scheduler handles
slots, blocks, chunk rows and micro-batches, and passes only requests that can be chosen.

The policy is notified of arrivals, of the begin and end of each iteration and of each request's
end, and of expected times. It may read a request's state but not change it. All times are in
seconds of one clock.

A request that skips an iteration keeps its blocks and continues at no cost. Requests are preempted
only if another lacks a block or a slot.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from molink.facts.ring_times import RingTimes
from molink.scheduler.policies.answer_lengths import AnswerLengths
from molink.scheduler.request_state import RequestState

#: Returns the seconds to copy a preempted request's KV back from host memory, or to swap it out and
#: in if it is preempted now; ``None`` if it is recomputed instead.
RestoreCost = Callable[[RequestState], float | None]


class SchedulingPolicy(Protocol):
    """Orders requests. Implementations inherit from it and override what they need.

    Queries may be repeated, so they must not change the policy's state; only events may.
    """

    #: Maximum waiting requests for which others may be preempted in one iteration. If 1, no further
    #: request is preempted for blocks while released blocks are in flight.
    max_preemptors: int = 1

    def set_times(self, times: RingTimes) -> None:
        """Update measured stage and link times. Stages without a profile add no time."""
        return

    def set_capacity(self, tokens: int, max_num_seqs: int) -> None:
        """Set the KV capacity in tokens, and the maximum number of running requests."""
        return

    def set_restore_cost(self, seconds: RestoreCost) -> None:
        """Set the cost of restoring requests from host memory instead of recomputing them."""
        return

    def set_answer_lengths(self, answers: AnswerLengths) -> None:
        """Share the answer lengths that earlier epochs have learned."""
        return

    def on_arrived(self, state: RequestState, now: float) -> None:
        """A request arrived and is waiting; preemptions are not arrivals."""
        return

    def on_issued(self, state: RequestState, now: float) -> None:
        """Rows of the request were issued. Several chunks of a prompt may be in flight."""
        return

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """Rows came back, ``seconds`` after their issue.

        The sampled token, if any, is not yet appended.
        """
        return

    def on_answered(self, state: RequestState) -> None:
        """The answer is complete; removal follows."""
        return

    def on_removed(self, state: RequestState, now: float) -> None:
        """The request finished, failed, expired or was cancelled."""
        return

    def queue_lengths(self) -> Sequence[int]:
        """Lengths of the policy's queues for display, best queue first."""
        return ()

    def choose_admitted(self, waiting: Sequence[RequestState], now: float) -> RequestState | None:
        """Choose the request to admit next; ``None`` leaves slots free.

        ``waiting`` is not empty. It is sorted by fair shares (:mod:`molink.scheduler.fair_shares`),
        then by priority within a client; preempted requests come first, the latest of them leading,
        then the others in order of arrival. Called again after each admission.
        """
        ...

    def order_running(self, requests: Sequence[RequestState], now: float) -> Sequence[RequestState]:
        """Sort ``requests`` by execution order; requests left out skip this iteration.

        No request may be skipped forever. ``requests`` either all decode or all have prompt rows to
        issue. Decoding requests without rows in flight come first, in the order in which their
        tokens came back; those in flight keep their rank in the result. Prefilling requests come in
        order of admission. The last of them may be the next waiting request (see its ``phase``),
        which is admitted if it is sorted before others.
        """
        ...

    def estimate_next_scheduled(
        self, requests: Collection[RequestState], batch: int, now: float
    ) -> Mapping[RequestState, float]:
        """Estimate the seconds until each of ``requests`` runs next, ``batch`` at a time.

        FastServe's *estimated next scheduled time* (ENST, §4.2); 0 if all running requests take
        part in every iteration.
        """
        return dict.fromkeys(requests, 0.0)

    def choose_preempted(
        self, preemptor: RequestState, idle: Sequence[RequestState], num_running: int, now: float
    ) -> RequestState | None:
        """Choose the idle request to preempt for ``preemptor``; ``None`` makes it wait.

        ``preemptor`` decodes and lacks a block, or is the next waiting request (see its ``phase``)
        and lacks a slot or blocks. ``idle`` are other running requests without rows in flight; if
        they don't suffice, the method is called again with requests whose rows are still in flight.
        ``num_running`` excludes requests already selected.

        Preemption must follow a total order, so that the first request always makes progress. While
        a request lacks a block, none is admitted, and requests that it could preempt issue no
        prompt rows.
        """
        ...


def choose_stalled(
    preemptor: RequestState, idle: Sequence[RequestState], num_running: int, now: float
) -> RequestState | None:
    """Choose an idle request that waits for its client's credit, if any, to preempt.

    For a decoding preemptor, it is the latest admitted one. For a waiting preemptor, it is the
    longest stalled one, provided that its client has abandoned it or that all running requests are
    stalled.
    """
    stalled = [state for state in idle if state.is_stalled]
    if preemptor.phase != "waiting":
        return max(stalled, key=lambda state: state.id, default=None)
    longest = min(stalled, key=lambda state: state.stalled_at, default=None)
    if longest is None:
        return None
    return longest if longest.is_abandoned(now) or len(stalled) == num_running else None
