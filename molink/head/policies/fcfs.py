"""First come, first served."""

from collections import Counter
from collections.abc import Collection, Sequence

from molink.head.job import Job
from molink.head.policies.base import Preemption, SchedulingPolicy


class Fcfs(SchedulingPolicy):
    """The policy of vLLM and of the papers' baselines; slots are shared between owners."""

    def next_admitted(
        self, waiting: Sequence[Job], admitted: Collection[Job], now: float
    ) -> Job | None:
        """The first one of the owner with the fewest admitted jobs."""
        running = Counter(job.request.owner for job in admitted)
        return min(waiting, key=lambda job: running[job.request.owner])

    def running_order(self, jobs: Sequence[Job], now: float) -> Sequence[Job]:
        """As they came back, or were admitted."""
        return jobs

    def victim(
        self, needy: Job, at_rest: Sequence[Job], admitted: Collection[Job], now: float
    ) -> Preemption | None:
        """For a job that decodes: one that waits for its client, else the latest admitted.

        That one must have been admitted after ``needy``, so the oldest always goes on. For a job
        that waits: the one that has waited longest for its client, if the client has abandoned it
        or if nobody who is admitted can go on before his client does.
        """
        stalled = [job for job in at_rest if job.stalled]
        if needy.state == "waiting":
            longest = min(stalled, key=lambda job: job.stalled_at, default=None)
            if longest is None:
                return None
            gives_way = longest.abandoned(now) or len(stalled) == len(admitted)
            return Preemption(longest) if gives_way else None
        younger = stalled or [job for job in at_rest if job.id > needy.id]
        latest = max(younger, key=lambda job: job.id, default=None)
        return Preemption(latest) if latest is not None else None
