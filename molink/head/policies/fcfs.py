"""First come, first served."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from molink.head.job import Job


class Fcfs:
    """The policy of vLLM and of the papers' baselines."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Job, None] = OrderedDict()

    def push(self, job: Job, now: float) -> None:
        """To the end of the queue."""
        self._queue[job] = None

    def push_back(self, job: Job, now: float) -> None:
        """To the front of the queue."""
        self._queue[job] = None
        self._queue.move_to_end(job, last=False)

    def discard(self, job: Job) -> None:
        """Out of the queue, if it is there."""
        self._queue.pop(job, None)

    def waiting(self) -> Iterator[Job]:
        """In order of arrival, preempted ones first."""
        return iter(self._queue)

    def rank(self, runnable: Sequence[Job], now: float) -> Sequence[Job]:
        """As they came back."""
        return runnable

    def __len__(self) -> int:
        return len(self._queue)
