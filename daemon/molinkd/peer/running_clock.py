"""A clock that stops while this daemon is suspended, so that timeouts don't blame others."""

import asyncio
from collections.abc import Callable
from typing import Any

from molink.swarm.running_time import RunningTime

#: Interval of detecting a suspension, in seconds.
POLL_INTERVAL_S = 0.25


class RunningClock:
    """Seconds that this daemon has run, for timers on an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._time = RunningTime(loop.time())
        self._timer = loop.call_later(POLL_INTERVAL_S, self._check)

    def time(self) -> float:
        """Seconds on this clock."""
        return self._time.counted_time(self._loop.time())

    def call_at(
        self, when: float, callback: Callable[..., object], *arguments: Any
    ) -> asyncio.TimerHandle:
        """Schedule a call at ``when``.

        It is early if the daemon is suspended before, so the callback must check the time.
        """
        return self._loop.call_at(when + self._time.skipped_s, callback, *arguments)

    def close(self) -> None:
        """Stop."""
        self._timer.cancel()

    def _check(self) -> None:
        self.time()
        self._timer = self._loop.call_later(POLL_INTERVAL_S, self._check)
