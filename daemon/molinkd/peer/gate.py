"""Has the slices of a transfer wait for their turn (:mod:`molink.swarm.artifacts.pacing`)."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress

from molink.swarm.artifacts.pacing import Pacer


class Gate:
    """One transfer from one source."""

    def __init__(self, floor: float) -> None:
        """``floor``: bytes per second that are asked for however slowly they come."""
        self._pacer = Pacer(floor)
        self._turn = asyncio.Lock()
        self._came = asyncio.Event()

    @property
    def size(self) -> int:
        """Bytes of the slices that are to be asked for."""
        return self._pacer.slice

    @asynccontextmanager
    async def slice(self, nbytes: int) -> AsyncIterator[None]:
        """One slice, from the moment when it may be asked for until it has come."""
        clock = asyncio.get_running_loop().time
        async with self._turn:
            while (wait := self._pacer.wait(clock())) != 0:
                self._came.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._came.wait()
            begun = clock()
            self._pacer.asked(begun)
        try:
            yield
        except BaseException:
            self._pacer.failed()
            self._came.set()
            raise
        now = clock()
        self._pacer.came(nbytes, now - begun, now)
        self._came.set()


async def together(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines together; the first error ends the others and is raised as it is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
