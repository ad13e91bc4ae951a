"""Which request goes first."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from molink.head.job import Job


class SchedulingPolicy(Protocol):
    """Holds the jobs that wait and orders those that could run.

    It decides order only: what fits (blocks, slots, chunk, micro-batches) is decided elsewhere.
    """

    def push(self, job: Job, now: float) -> None:
        """A request has arrived."""
        ...

    def push_back(self, job: Job, now: float) -> None:
        """A job was preempted: it goes on before those that have not begun."""
        ...

    def discard(self, job: Job) -> None:
        """The job no longer waits."""
        ...

    def waiting(self) -> Iterator[Job]:
        """Jobs that wait, first to be admitted first."""
        ...

    def rank(self, runnable: Sequence[Job], now: float) -> Sequence[Job]:
        """Jobs that could take a decode step, first to be run first.

        ``runnable`` is in the order in which their tokens came back. A policy that reorders must
        not leave a job behind for ever.
        """
        ...

    def __len__(self) -> int:
        """How many jobs wait."""
        ...
