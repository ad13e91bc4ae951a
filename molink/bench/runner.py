"""Sends planned requests at their arrival times and collects the samples."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from molink.bench.report import Sample
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

    A request that ``concurrency`` delays is timed from the moment it is sent. Cancelling the task
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
