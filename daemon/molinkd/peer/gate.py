"""Has the slices of a transfer wait for their turn (:mod:`molink.swarm.artifacts.rate_limit`)."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress

from molink.swarm.artifacts.rate_limit import TransferRateLimiter


class SliceLimiter:
    """One transfer from one source."""

    def __init__(self, floor: float) -> None:
        """``floor``: bytes per second that are asked for however slowly they come."""
        self._pacer = TransferRateLimiter(floor)
        self._lock = asyncio.Lock()
        self._received = asyncio.Event()

    @property
    def slice_bytes(self) -> int:
        """Bytes of the slices that are to be asked for."""
        return self._pacer.slice_bytes

    @asynccontextmanager
    async def limit_slice(self, nbytes: int) -> AsyncIterator[None]:
        """One slice, from the moment when it may be asked for until it has come."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            while (wait := self._pacer.wait_time(clock())) != 0:
                self._received.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._received.wait()
            begun = clock()
            self._pacer.on_request(begun)
        try:
            yield
        except BaseException:
            self._pacer.on_failure()
            self._received.set()
            raise
        now = clock()
        self._pacer.on_slice(nbytes, now - begun, now)
        self._received.set()


async def run_together(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines together; the first error ends the others and is raised as it is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
