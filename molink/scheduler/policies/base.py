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

from molink.facts.ringtimes import RingTimes
from molink.scheduler.job import Job
from molink.scheduler.policies.lengths import AnswerLengths

#: Seconds of copies until a job that has given way, or gives way now, is where it was; ``None``: it
#: has no copy in host memory, or would have none, and is computed anew.
Restoring = Callable[[Job], float | None]


@dataclass(frozen=True, slots=True)
class Preemption:
    """An admitted job that is to give way.

    Its blocks are released. What becomes of their contents is not the policy's to decide
    (:mod:`molink.facts.preemption`).
    """

    job: Job


class SchedulingPolicy(Protocol):
    """Decides whose turn it is. Implementations inherit from it, and take the events they need.

    The same question may be asked several times, so an answer changes nothing: only events do.
    """

    #: For how many jobs that wait others may give way in one iteration. Where that is one, no
    #: further job gives way for blocks before those of others that did have come back.
    places_at_once: int = 1

    # --- events ---------------------------------------------------------------------------------

    def set_times(self, times: RingTimes) -> None:
        """What stages and links have been measured to take; unknown profiles say nothing."""
        return

    def set_room(self, tokens: int, places: int) -> None:
        """KV blocks have room for so many tokens; so many jobs can be admitted at a time."""
        return

    def set_restoring(self, seconds: Restoring) -> None:
        """Jobs that give way may be kept in host memory: what that costs, in place of computing."""
        return

    def set_answers(self, answers: AnswerLengths) -> None:
        """Where to learn how long answers are; heads of earlier epochs may have learned there."""
        return

    def arrived(self, job: Job, now: float) -> None:
        """A request has arrived and waits; its preemption later is no arrival."""
        return

    def issued(self, job: Job, now: float) -> None:
        """An iteration of the job begins: rows of it are issued.

        Further ones of a prompt may be issued before the first are back.
        """
        return

    def ran(self, job: Job, seconds: float, now: float) -> None:
        """An iteration of the job has ended: its rows are back, ``seconds`` after they were issued.

        Its sampled token, if there is one, is not among its tokens yet.
        """
        return

    def answered(self, job: Job) -> None:
        """The job's answer is whole: neither cancelled nor failed, it is over next."""
        return

    def over(self, job: Job, now: float) -> None:
        """The job is finished, cancelled, failed or refused after all: forget it."""
        return

    def queues(self) -> Sequence[int]:
        """How many jobs are in each of its queues, the best first; for people."""
        return ()

    # --- questions ------------------------------------------------------------------------------

    def next_admitted(
        self, waiting: Sequence[Job], admitted: Collection[Job], now: float
    ) -> Job | None:
        """Which job is admitted next; ``None`` keeps free what is free.

        ``waiting`` are one or more jobs, those first whose client's turn it is
        (:mod:`molink.scheduler.shares`), and of a client by priority: those that were preempted,
        the last one first, then the others as they arrived. ``admitted`` are all that have blocks,
        as they were admitted. It is asked again after each admission.
        """
        ...

    def running_order(self, jobs: Sequence[Job], now: float) -> Sequence[Job]:
        """``jobs``, first to be run first; those that are left out rest in this iteration.

        No job may rest for ever. ``jobs`` are either those that decode or those with prompt rows to
        be issued. Of the former those with nothing in flight come first, in the order in which
        their tokens came back; those in flight keep their place in the answer. The latter are in
        the order in which they were admitted, and the last of them may be the one that waits to be
        admitted next (its ``state`` tells): where it comes before others, it is admitted first.
        """
        ...

    def next_turns(self, jobs: Collection[Job], batch: int, now: float) -> Mapping[Job, float]:
        """Seconds until each of ``jobs`` should run next, while ``batch`` jobs run at a time.

        FastServe's *estimated next scheduled time* (ENST, §4.2). Where all that have blocks run in
        every iteration, it is 0 for each of them.
        """
        return dict.fromkeys(jobs, 0.0)

    def victim(
        self, needy: Job, at_rest: Sequence[Job], admitted: Collection[Job], now: float
    ) -> Preemption | None:
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
