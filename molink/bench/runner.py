"""Sends planned requests at their arrival times and collects the samples."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from molink.bench.workload import PlannedRequest


class Clock(Protocol):
    """Seconds on a monotonic scale."""

    def now(self) -> float:
        """Return the current time."""
        ...

    async def sleep_until(self, moment: float) -> None:
        """Return once ``now()`` has reached ``moment``."""
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        """Return the current time."""
        return time.perf_counter()

    async def sleep_until(self, moment: float) -> None:
        """Return once ``now()`` has reached ``moment``."""
        await asyncio.sleep(max(0.0, moment - self.now()))


@dataclass(frozen=True, slots=True)
class Sample:
    """Times in seconds on the run's clock.

    ``piece_times`` are the ascending arrival times of the answer's pieces; ``finished_at`` is when
    the last piece or the finish reason arrived. ``output_tokens`` is the server's ``usage``, or the
    number of pieces without it. A failed request has an ``error`` and is excluded from statistics.
    """

    sent_at: float
    piece_times: tuple[float, ...] = ()
    finished_at: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def first_at(self) -> float:
        """Arrival time of the first piece; the end for an answer without text."""
        return self.piece_times[0] if self.piece_times else self.finished_at

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first_at - self.sent_at

    @property
    def latency(self) -> float:
        """Time to the end of the answer."""
        return self.finished_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; ``None`` below two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.finished_at - self.first_at) / (self.output_tokens - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between successive pieces.

        Several tokens in one piece count as one gap.
        """
        return tuple(b - a for a, b in pairwise(self.piece_times))


#: Sends one request and returns its sample; never raises for a failed request.
Send = Callable[[PlannedRequest], Awaitable[Sample]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The samples of a run in order of completion; ``duration`` in seconds."""

    samples: tuple[Sample, ...]
    duration: float
    interrupted: bool


async def run_plan(
    plan: Sequence[PlannedRequest],
    send: Send,
    *,
    concurrency: int,
    clock: Clock,
    on_sample: Callable[[Sample], None] = lambda _: None,
) -> Measurement:
    """Send ``plan`` in order, each request at its arrival time, at most ``concurrency`` at once.

    A request delayed by ``concurrency`` is timed from the moment it is sent. Cancelling the task
    (Ctrl-C) ends the run early and returns the completed samples as ``interrupted``.
    """
    samples: list[Sample] = []
    slots = asyncio.Semaphore(concurrency)
    started = clock.now()

    async def one(request: PlannedRequest) -> None:
        try:
            sample = await send(request)
        finally:
            slots.release()
        samples.append(sample)
        on_sample(sample)

    interrupted = False
    try:
        async with asyncio.TaskGroup() as group:
            for request in plan:
                await clock.sleep_until(started + request.arrival_s)
                await slots.acquire()
                group.create_task(one(request))
    except asyncio.CancelledError:
        interrupted = True
    return Measurement(tuple(samples), clock.now() - started, interrupted)
