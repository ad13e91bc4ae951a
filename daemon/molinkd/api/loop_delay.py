"""How late an event loop does what is due."""

import asyncio
from collections.abc import Callable

#: Seconds between two looks.
LOOK_S = 0.02


class LoopDelay:
    """Looks at the running event loop while there is something to look at.

    All streams of an endpoint share a loop: whatever keeps it busy delays every one of them.
    """

    def __init__(self, observe: Callable[[float], None], needed: Callable[[], bool]) -> None:
        """``observe`` is told how many seconds late each look was; ``needed``: whether to go on."""
        self._observe = observe
        self._needed = needed
        self._looking = False

    def watch(self) -> None:
        """Begin to look, where nobody does; ends once it isn't needed any more."""
        if not self._looking:
            self._looking = True
            self._next(asyncio.get_running_loop())

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + LOOK_S
        loop.call_at(due, self._look, loop, due)

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self._observe(max(0.0, loop.time() - due))
        self._looking = self._needed()
        if self._looking:
            self._next(loop)
