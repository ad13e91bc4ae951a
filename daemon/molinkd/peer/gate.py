"""Delays the slices of a transfer (:mod:`molink.swarm.artifacts.rate_limit`)."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress

from molink.swarm.artifacts.rate_limit import TransferRateLimiter


class SliceLimiter:
    """Rate limiter of one transfer from one source."""

    def __init__(self, floor: float) -> None:
        """``floor`` is the minimum request rate in bytes/s."""
        self._pacer = TransferRateLimiter(floor)
        self._lock = asyncio.Lock()
        self._received = asyncio.Event()

    @property
    def slice_bytes(self) -> int:
        """Bytes per slice."""
        return self._pacer.slice_bytes

    @asynccontextmanager
    async def limit_slice(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until a slice may be requested, and time it until it has arrived."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            while (wait := self._pacer.wait_time(clock())) != 0:
                self._received.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._received.wait()
            started = clock()
            self._pacer.on_request(started)
        try:
            yield
        except BaseException:
            self._pacer.on_failure()
            self._received.set()
            raise
        now = clock()
        self._pacer.on_slice(nbytes, now - started, now)
        self._received.set()


async def run_together(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines concurrently; the first error cancels the others and is raised unchanged."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
