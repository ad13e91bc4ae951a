"""Calls from the API's event loop to the daemon's."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from molink.errors import Unavailable

T = TypeVar("T")


async def call_on_loop(
    loop: asyncio.AbstractEventLoop,
    make: Callable[[], Awaitable[T]],
    timeout_s: float,
    late: str,
) -> T:
    """Await ``make()`` on ``loop`` and return its result.

    Raises:
        Unavailable: the loop is closed; or, with the text ``late``, there is no result after
            ``timeout_s`` seconds.
    """

    async def call() -> T:
        return await make()

    coroutine = call()
    try:
        pending = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:  # the daemon's loop is closed
        coroutine.close()
        raise Unavailable("molink is shutting down on this PC") from None
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(pending)
    except TimeoutError:
        raise Unavailable(late) from None
