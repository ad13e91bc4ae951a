"""How late an event loop does what is due."""

import asyncio
from collections.abc import Callable

#: Seconds between two looks.
SAMPLE_INTERVAL_S = 0.02


class LoopDelaySampler:
    """Looks at the running event loop while there is something to look at.

    All streams of an endpoint share a loop: whatever keeps it busy delays every one of them.
    """

    def __init__(self, observe: Callable[[float], None], is_needed: Callable[[], bool]) -> None:
        """``observe`` is told how many seconds late each look was; ``is_needed``: whether to go
        on."""
        self._observe = observe
        self._is_needed = is_needed
        self._is_sampling = False

    def start_sampling(self) -> None:
        """Begin to look, where nobody does; ends once it isn't needed any more."""
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
