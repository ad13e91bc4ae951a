"""Delay of a loop, sampled only while needed."""

import asyncio
import time

from molinkd.api.loop_delay import SAMPLE_INTERVAL_S, LoopDelaySampler


async def test_a_blocked_loop_is_late() -> None:
    found: asyncio.Queue[float] = asyncio.Queue()
    delay = LoopDelaySampler(found.put_nowait, lambda: found.qsize() < 2)
    delay.start_sampling()
    delay.start_sampling()
    time.sleep(SAMPLE_INTERVAL_S + 0.05)  # noqa: ASYNC251 - what is to be noticed
    assert await found.get() >= 0.05
    assert await found.get() >= 0


async def test_sampling_stops_when_unneeded_and_restarts() -> None:
    found: asyncio.Queue[float] = asyncio.Queue()
    delay = LoopDelaySampler(found.put_nowait, lambda: False)
    for _ in range(2):
        delay.start_sampling()
        await found.get()
        await asyncio.sleep(3 * SAMPLE_INTERVAL_S)
        assert found.empty()
