import asyncio
import heapq
import itertools

from molink.bench.report import Sample, summarize
from molink.bench.runner import run_plan
from molink.bench.workload import PlannedRequest


class VirtualClock:
    """Jumps to the next due sleeper when nothing else can run."""

    def __init__(self) -> None:
        self._now = 100.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self._now

    async def sleep_until(self, moment: float) -> None:
        if moment <= self._now:
            return
        event = asyncio.Event()
        heapq.heappush(self._sleepers, (moment, next(self._numbers), event))
        await event.wait()

    async def turn(self) -> None:
        """Advance the clock endlessly; before each step all runnable tasks run."""
        while True:
            for _ in range(50):
                await asyncio.sleep(0)
            if self._sleepers:
                self._now, _, event = heapq.heappop(self._sleepers)
                event.set()


class FakeServer:
    """Answers each request with its tokens at a scripted rate and counts concurrent requests."""

    def __init__(self, clock: VirtualClock, first: float, each: float) -> None:
        self._clock = clock
        self._first = first
        self._each = each
        self._running = 0
        self.maximum = 0
        self.sent: list[tuple[int, float]] = []

    async def send(self, request: PlannedRequest) -> Sample:
        sent = self._clock.now()
        self.sent.append((request.index, sent - 100.0))
        self._running += 1
        self.maximum = max(self.maximum, self._running)
        try:
            texts = [sent + self._first + i * self._each for i in range(request.output_tokens)]
            for moment in texts:
                await self._clock.sleep_until(moment)
        finally:
            self._running -= 1
        return Sample(sent, tuple(texts), texts[-1], request.input_tokens, request.output_tokens)


def plan(*times: float, tokens: int = 5) -> list[PlannedRequest]:
    return [PlannedRequest(index, at, 8, tokens) for index, at in enumerate(times)]


async def test_requests_are_sent_on_time_and_timed_exactly() -> None:
    clock = VirtualClock()
    server = FakeServer(clock, first=0.5, each=0.125)
    turning = asyncio.create_task(clock.turn())
    seen: list[Sample] = []
    measured = await run_plan(
        plan(0.0, 0.25, 4.0), server.send, concurrency=8, clock=clock, on_sample=seen.append
    )
    turning.cancel()
    assert server.sent == [(0, 0.0), (1, 0.25), (2, 4.0)]
    assert server.maximum == 2
    assert list(measured.samples) == seen
    assert (measured.duration, measured.interrupted) == (5.0, False)
    report = summarize(measured.samples, measured.duration, policy="x")
    assert (report.completed, report.output_tokens_per_s) == (3, 3.0)
    for summary, value in (
        (report.ttft_s, 0.5),
        (report.tpot_s, 0.125),
        (report.itl_s, 0.125),
        (report.latency_s, 1.0),
    ):
        assert (summary.mean, summary.p50, summary.p90, summary.p99) == (value,) * 4


async def test_concurrency_delays_requests_in_order() -> None:
    clock = VirtualClock()
    server = FakeServer(clock, first=1.0, each=0.0)
    turning = asyncio.create_task(clock.turn())
    measured = await run_plan(
        plan(0.0, 0.0, 0.0, 0.0, 0.0, tokens=1), server.send, concurrency=2, clock=clock
    )
    turning.cancel()
    assert server.maximum == 2
    assert server.sent == [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    # Waiting for a slot is not the server's latency.
    assert {sample.latency for sample in measured.samples} == {1.0}


async def test_an_interrupted_run_keeps_its_samples() -> None:
    clock = VirtualClock()
    server = FakeServer(clock, first=1.0, each=0.0)
    turning = asyncio.create_task(clock.turn())
    second_done = asyncio.Event()

    def count(sample: Sample) -> None:
        if sample.sent_at > 100.0:
            second_done.set()

    running = asyncio.create_task(
        run_plan(
            plan(0.0, 0.5, 1.25, 90.0, tokens=1),
            server.send,
            concurrency=8,
            clock=clock,
            on_sample=count,
        )
    )
    await second_done.wait()
    running.cancel()
    measured = await running
    turning.cancel()
    assert measured.interrupted
    assert len(measured.samples) == 2
    assert measured.duration == 1.5
