"""The clock of what a daemon may not hold against others: it stands still while the daemon does."""

import asyncio
from collections.abc import Callable
from typing import Any

from molink.swarm.running_time import RunningTime

#: Seconds between two looks.
POLL_INTERVAL_S = 0.25


class RunningClock:
    """Seconds in which this daemon ran; of an event loop, for calls on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._time = RunningTime(loop.time())
        self._timer = loop.call_later(POLL_INTERVAL_S, self._check)

    def time(self) -> float:
        """Now."""
        return self._time.counted_time(self._loop.time())

    def call_at(
        self, when: float, callback: Callable[..., object], *arguments: Any
    ) -> asyncio.TimerHandle:
        """Call it at ``when``; too early if this daemon stands still before, so it has to look."""
        return self._loop.call_at(when + self._time.skipped_s, callback, *arguments)

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _check(self) -> None:
        self.time()
        self._timer = self._loop.call_later(POLL_INTERVAL_S, self._check)
