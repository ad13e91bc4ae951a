"""First come, first served."""

from collections.abc import Collection, Sequence

from molink.scheduler.job import Job
from molink.scheduler.policies.base import Preemption, SchedulingPolicy
from molink.scheduler.policies.clients import waits_for_client


class Fcfs(SchedulingPolicy):
    """The policy of vLLM and of the papers' baselines, but that clients have equal shares."""

    def next_admitted(
        self, waiting: Sequence[Job], admitted: Collection[Job], now: float
    ) -> Job | None:
        """The first one of the client whose turn it is."""
        return waiting[0]

    def running_order(self, jobs: Sequence[Job], now: float) -> Sequence[Job]:
        """As they came back, or were admitted."""
        return jobs

    def victim(
        self, needy: Job, at_rest: Sequence[Job], admitted: Collection[Job], now: float
    ) -> Preemption | None:
        """One that waits for its client; to a job that decodes, else the latest admitted.

        That one must have been admitted after ``needy``, so the oldest always goes on.
        """
        idle = waits_for_client(needy, at_rest, admitted, now)
        if idle is not None or needy.state == "waiting":
            return Preemption(idle) if idle is not None else None
        younger = [job for job in at_rest if job.id > needy.id]
        latest = max(younger, key=lambda job: job.id, default=None)
        return Preemption(latest) if latest is not None else None
