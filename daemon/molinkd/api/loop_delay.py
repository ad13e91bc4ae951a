"""Measures the delay of an event loop."""

import asyncio
from collections.abc import Callable

#: Seconds between two samples.
SAMPLE_INTERVAL_S = 0.02


class LoopDelaySampler:
    """Samples the delay of the running event loop while answers are streamed.

    All streams of an endpoint share a loop, so a blocked loop delays all of them.
    """

    def __init__(self, observe: Callable[[float], None], is_needed: Callable[[], bool]) -> None:
        """``observe`` receives delays in seconds; sampling stops when ``is_needed`` is false."""
        self._observe = observe
        self._is_needed = is_needed
        self._is_sampling = False

    def start_sampling(self) -> None:
        """Start sampling unless it is running."""
        if not self._is_sampling:
            self._is_sampling = True
            self._schedule_sample(asyncio.get_running_loop())

    def _schedule_sample(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + SAMPLE_INTERVAL_S
        loop.call_at(due, self._take_sample, loop, due)

    def _take_sample(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._observe(max(0.0, loop.time() - due))
        self._is_sampling = self._is_needed()
        if self._is_sampling:
            self._schedule_sample(loop)
