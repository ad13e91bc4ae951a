"""The clock of a benchmark run, as a protocol so that tests can control it."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic scale."""

    def now(self) -> float:
        """Return the current time."""
        ...

    async def sleep_until(self, moment: float) -> None:
        """Return once ``now()`` has reached ``moment``."""
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        """Return the current time."""
        return time.perf_counter()

    async def sleep_until(self, moment: float) -> None:
        """Return once ``now()`` has reached ``moment``."""
        await asyncio.sleep(max(0.0, moment - self.now()))
