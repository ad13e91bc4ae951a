"""What policies have in common that rank jobs."""

from abc import abstractmethod
from collections.abc import Collection, Sequence

from molink.facts.ringtimes import RingTimes
from molink.scheduler.job import Job
from molink.scheduler.policies.base import Preemption, Restoring, SchedulingPolicy
from molink.scheduler.policies.clients import waits_for_client

#: Level, when it came to that level, and as which of all jobs it arrived: the least goes first. No
#: two jobs have the same.
Rank = tuple[float, float, int]


class Ranked(SchedulingPolicy):
    """Goes by the rank of a job; at admission, within a level, clients have equal shares."""

    def __init__(self) -> None:
        #: What stages and links take, as far as it is known.
        self.times = RingTimes((), (), 0)
        #: What copies take until one that gave way is where it was, where there are any.
        self.restoring: Restoring = lambda job: None

    def set_times(self, times: RingTimes) -> None:
        """Predictions go by these from now on."""
        self.times = times

    def set_restoring(self, seconds: Restoring) -> None:
        """As :class:`SchedulingPolicy` says."""
        self.restoring = seconds

    @abstractmethod
    def rank(self, job: Job, now: float) -> Rank:
        """The place of ``job`` among all jobs."""

    def may_give_way(self, job: Job) -> bool:
        """Whether ``job`` can be preempted for one that waits."""
        return True

    def goes_before(self, needy: Job, other: Job, now: float) -> bool:
        """Whether ``needy``, which waits, goes so far before ``other`` that this gives way."""
        return self.rank(needy, now)[0] < self.rank(other, now)[0]

    def next_admitted(
        self, waiting: Sequence[Job], admitted: Collection[Job], now: float
    ) -> Job | None:
        """Of the best level the first one of the client whose turn it is."""
        ranks = {job: self.rank(job, now) for job in waiting}
        best = min(level for level, _, _ in ranks.values())
        level = [job for job in waiting if ranks[job][0] == best]
        theirs = [job for job in level if job.request.whose == level[0].request.whose]
        return min(theirs, key=lambda job: (job.request.priority, ranks[job]))

    def running_order(self, jobs: Sequence[Job], now: float) -> Sequence[Job]:
        """By rank."""
        return sorted(jobs, key=lambda job: self.rank(job, now))

    def victim(
        self, needy: Job, at_rest: Sequence[Job], admitted: Collection[Job], now: float
    ) -> Preemption | None:
        """One that waits for its client, else the last one behind ``needy``.

        For a job that waits it has to be of a worse level, and one that :meth:`may_give_way`: of
        two equal ones the one that has blocks goes on.
        """
        idle = waits_for_client(needy, at_rest, admitted, now)
        if idle is not None:
            return Preemption(idle)
        if needy.state == "waiting":
            at_rest = [job for job in at_rest if self.may_give_way(job)]
        last = max(at_rest, key=lambda job: self.rank(job, now), default=None)
        if last is None:
            return None
        if needy.state == "waiting":
            behind = self.goes_before(needy, last, now)
        else:
            behind = self.rank(needy, now) < self.rank(last, now)
        return Preemption(last) if behind else None
