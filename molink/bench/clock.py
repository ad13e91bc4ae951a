"""The clock of a run, as a protocol, so that tests can turn it by hand."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic scale."""

    def now(self) -> float:
        """The time."""
        ...

    async def sleep_until(self, moment: float) -> None:
        """Return once ``now()`` has reached ``moment``."""
        ...


class MonotonicClock:
    """The PC's own."""

    def now(self) -> float:
        """The time."""
        return time.perf_counter()

    async def sleep_until(self, moment: float) -> None:
        """Return once ``now()`` has reached ``moment``."""
        await asyncio.sleep(max(0.0, moment - self.now()))
