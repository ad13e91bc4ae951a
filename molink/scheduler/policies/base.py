"""What a scheduling policy decides: whose turn it is.

A head asks: who is admitted next, in what order jobs run, who is preempted, and how long it will be
until each job's turn comes. The policy decides between jobs only. What fits (blocks, slots, rows of
a chunk, micro-batches) and which jobs can go on at all is decided elsewhere: it is asked about
those that can.

To decide, it hears of a job's arrival, of the begin and end of each of its iterations, and of its
end; and what iterations should take. It may read everything of a job and changes nothing of it. All
times are in seconds of one clock.

A job that rests between two iterations, since others go first, keeps its blocks: it is *paused*,
and goes on at no cost. Only when a job lacks a block, or the place to be admitted, is another one
preempted for it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.facts.ring_times import RingTimes
from molink.scheduler.policies.answer_lengths import AnswerLengths
from molink.scheduler.request_state import RequestState

#: Seconds of copies until a job that has given way, or gives way now, is where it was; ``None``: it
#: has no copy in host memory, or would have none, and is computed anew.
RestoreCost = Callable[[RequestState], float | None]


@dataclass(frozen=True, slots=True)
class PreemptionDecision:
    """An admitted job that is to give way.

    Its blocks are released. What becomes of their contents is not the policy's to decide
    (:mod:`molink.facts.settings`).
    """

    state: RequestState


class SchedulingPolicy(Protocol):
    """Decides whose turn it is. Implementations inherit from it, and take the events they need.

    The same question may be asked several times, so an answer changes nothing: only events do.
    """

    #: For how many jobs that wait others may give way in one iteration. Where that is one, no
    #: further job gives way for blocks before those of others that did have come back.
    max_preemptors: int = 1

    # --- events ---------------------------------------------------------------------------------

    def set_times(self, times: RingTimes) -> None:
        """What stages and links have been measured to take; unknown profiles say nothing."""
        return

    def set_capacity(self, tokens: int, places: int) -> None:
        """KV blocks have room for so many tokens; so many jobs can be admitted at a time."""
        return

    def set_restore_cost(self, seconds: RestoreCost) -> None:
        """Jobs that give way may be kept in host memory: what that costs, in place of computing."""
        return

    def set_answer_lengths(self, answers: AnswerLengths) -> None:
        """Where to learn how long answers are; heads of earlier epochs may have learned there."""
        return

    def on_arrived(self, state: RequestState, now: float) -> None:
        """A request has arrived and waits; its preemption later is no arrival."""
        return

    def on_issued(self, state: RequestState, now: float) -> None:
        """An iteration of the job begins: rows of it are issued.

        Further ones of a prompt may be issued before the first are back.
        """
        return

    def on_rows_returned(self, state: RequestState, seconds: float, now: float) -> None:
        """An iteration of the job has ended: its rows are back, ``seconds`` after they were issued.

        Its sampled token, if there is one, is not among its tokens yet.
        """
        return

    def on_answered(self, state: RequestState) -> None:
        """The job's answer is whole: neither cancelled nor failed, it is over next."""
        return

    def on_removed(self, state: RequestState, now: float) -> None:
        """The job is finished, cancelled, failed or refused after all: forget it."""
        return

    def queue_lengths(self) -> Sequence[int]:
        """How many jobs are in each of its queues, the best first; for people."""
        return ()

    # --- questions ------------------------------------------------------------------------------

    def choose_admitted(
        self, waiting: Sequence[RequestState], admitted: Collection[RequestState], now: float
    ) -> RequestState | None:
        """Which job is admitted next; ``None`` keeps free what is free.

        ``waiting`` are one or more jobs, those first whose client's turn it is
        (:mod:`molink.scheduler.fair_shares`), and of a client by priority: those that were
        preempted, the last one first, then the others as they arrived. ``admitted`` are all that
        have blocks, as they were admitted. It is asked again after each admission.
        """
        ...

    def order_running(self, requests: Sequence[RequestState], now: float) -> Sequence[RequestState]:
        """``jobs``, first to be run first; those that are left out rest in this iteration.

        No job may rest for ever. ``jobs`` are either those that decode or those with prompt rows to
        be issued. Of the former those with nothing in flight come first, in the order in which
        their tokens came back; those in flight keep their place in the answer. The latter are in
        the order in which they were admitted, and the last of them may be the one that waits to be
        admitted next (its ``state`` tells): where it comes before others, it is admitted first.
        """
        ...

    def estimate_next_scheduled(
        self, requests: Collection[RequestState], batch: int, now: float
    ) -> Mapping[RequestState, float]:
        """Seconds until each of ``jobs`` should run next, while ``batch`` jobs run at a time.

        FastServe's *estimated next scheduled time* (ENST, §4.2). Where all that have blocks run in
        every iteration, it is 0 for each of them.
        """
        return dict.fromkeys(requests, 0.0)

    def choose_preempted(
        self,
        preemptor: RequestState,
        idle_requests: Sequence[RequestState],
        admitted: Collection[RequestState],
        now: float,
    ) -> PreemptionDecision | None:
        """Which of ``at_rest`` gives way to ``needy``; ``None`` lets ``needy`` wait.

        ``needy`` is a job that decodes and lacks a block, or the one that waits to be admitted next
        (its ``state`` tells) and lacks a slot or blocks. ``at_rest`` are admitted jobs other than
        ``needy`` with no rows in flight; if they don't suffice it is asked again, with those that
        could give way once their rows are back. ``admitted`` are all that have blocks, less those
        that were named before.

        There must be an order of jobs such that none is preempted for one behind it: then the first
        one always makes progress. While a job lacks a block, nobody is admitted, and those that
        would give way to it issue no prompt rows.
        """
        ...


def choose_stalled(
    preemptor: RequestState,
    idle_requests: Sequence[RequestState],
    admitted: Collection[RequestState],
    now: float,
) -> RequestState | None:
    """Which of ``at_rest`` gives way to ``needy`` because it waits for its client, if any.

    To a job that decodes, the latest admitted. To one that waits, the one that has waited longest,
    if the client has abandoned it or if nobody who is admitted can go on before his client does.
    """
    stalled = [state for state in idle_requests if state.is_stalled]
    if preemptor.phase != "waiting":
        return max(stalled, key=lambda state: state.id, default=None)
    longest = min(stalled, key=lambda state: state.stalled_at, default=None)
    if longest is None:
        return None
    return longest if longest.is_abandoned(now) or len(stalled) == len(admitted) else None
