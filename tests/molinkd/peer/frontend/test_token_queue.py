"""Passing tokens from one thread to an event loop in another."""

import asyncio
import threading

import pytest

from molink.swarm.frontend.generated_token import GeneratedToken
from molinkd.peer.frontend.swarm_backend import TokenQueue


def make(position: int) -> GeneratedToken:
    return GeneratedToken(position, position, 0.0, (), None)


async def test_tokens_arrive_in_order_with_few_wake_ups() -> None:
    queue, wakes, seen = TokenQueue(), 0, []

    def fill() -> None:
        for position in range(2000):
            queue.put(make(position))

    thread = threading.Thread(target=fill)
    thread.start()
    while len(seen) < 2000:
        seen += await queue.get_all()
        wakes += 1
    thread.join()
    assert [token.position for token in seen] == list(range(2000))


async def test_a_batch_of_tokens_costs_one_wake_up() -> None:
    queue = TokenQueue()
    for position in range(10):
        queue.put(make(position))
    assert len(await queue.get_all()) == 10
    waiting = asyncio.create_task(queue.get_all())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.put(make(10))
    assert len(await waiting) == 1


def test_a_closed_reader_loop_does_not_disturb_other_readers() -> None:
    async def open_queue() -> tuple[TokenQueue, asyncio.AbstractEventLoop]:
        return TokenQueue(), asyncio.get_running_loop()

    closed, loop = asyncio.run(open_queue())
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon_threadsafe(print)

    async def read_other() -> list[int]:
        other = TokenQueue()
        for position in range(2):
            closed.put(make(position))
            other.put(make(position))
        return [token.position for token in await other.get_all()]

    assert asyncio.run(read_other()) == [0, 1]
