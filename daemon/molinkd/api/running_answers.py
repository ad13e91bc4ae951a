"""The answers that are given now, and how they end with the endpoint."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from molink.errors import Unavailable

_SHUTDOWN_MESSAGE = (
    "molink is ending on this PC; ask again once it runs, or on another PC of the swarm"
)


class RunningAnswers:
    """Answers are generated inside :meth:`track_answer`; when the endpoint ends, they may go on a
    while."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._all_ended = asyncio.Event()
        self._is_shutting_down = False

    @contextlib.asynccontextmanager
    async def track_answer(self) -> AsyncIterator[None]:
        """An answer runs meanwhile.

        Raises:
            Unavailable: the endpoint ends, and no time is left.
        """
        if self._is_shutting_down:
            raise Unavailable(_SHUTDOWN_MESSAGE)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
                    if not self._scopes:
                        self._all_ended.set()
        except TimeoutError:
            if not scope.expired():
                raise
            raise Unavailable(_SHUTDOWN_MESSAGE) from None

    async def shut_down(self, seconds: float) -> None:
        """Begin no answers from now on; end those that still run after so many seconds."""
        self._is_shutting_down = True
        if self._scopes:
            self._all_ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), seconds)
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())
