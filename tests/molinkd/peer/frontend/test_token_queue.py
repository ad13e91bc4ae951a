"""Passing tokens from one thread to an event loop in another."""

import asyncio
import threading

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


def test_a_closed_reader_loop_is_ignored() -> None:
    async def open_feed() -> TokenQueue:
        return TokenQueue()

    queue = asyncio.run(open_feed())
    queue.put(make(0))
