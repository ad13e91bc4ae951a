"""Tokens from one thread to an event loop in another."""

import asyncio
import threading

from molink.swarm.frontend.generation import GeneratedToken
from molinkd.peer.feed import Feed


def make(position: int) -> GeneratedToken:
    return GeneratedToken(position, position, 0.0, (), None)


async def test_everything_arrives_in_order_with_few_wake_ups() -> None:
    feed, wakes, seen = Feed(), 0, []

    def fill() -> None:
        for position in range(2000):
            feed.put(make(position))

    thread = threading.Thread(target=fill)
    thread.start()
    while len(seen) < 2000:
        seen += await feed.take()
        wakes += 1
    thread.join()
    assert [token.position for token in seen] == list(range(2000))


async def test_many_tokens_cost_one_wake_up() -> None:
    feed = Feed()
    for position in range(10):
        feed.put(make(position))
    assert len(await feed.take()) == 10
    waiting = asyncio.create_task(feed.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.put(make(10))
    assert len(await waiting) == 1


def test_a_reader_whose_loop_has_closed_is_no_error() -> None:
    async def open_feed() -> Feed:
        return Feed()

    feed = asyncio.run(open_feed())
    feed.put(make(0))
