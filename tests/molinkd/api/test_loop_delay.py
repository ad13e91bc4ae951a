"""How late a loop is: found while it matters, and no longer."""

import asyncio
import time

from molinkd.api.loop_delay import SAMPLE_INTERVAL_S, LoopDelaySampler


async def test_a_loop_that_is_kept_busy_is_late() -> None:
    found: asyncio.Queue[float] = asyncio.Queue()
    delay = LoopDelaySampler(found.put_nowait, lambda: found.qsize() < 2)
    delay.start_sampling()
    delay.start_sampling()
    time.sleep(SAMPLE_INTERVAL_S + 0.05)  # noqa: ASYNC251 - what is to be noticed
    assert await found.get() >= 0.05
    assert await found.get() >= 0


async def test_it_ends_when_it_is_not_needed_and_begins_again() -> None:
    found: asyncio.Queue[float] = asyncio.Queue()
    delay = LoopDelaySampler(found.put_nowait, lambda: False)
    for _ in range(2):
        delay.start_sampling()
        await found.get()
        await asyncio.sleep(3 * SAMPLE_INTERVAL_S)
        assert found.empty()
