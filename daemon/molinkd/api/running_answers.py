"""Tracks running answers and ends them at shutdown."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from molink.errors import Unavailable

_SHUTDOWN_MESSAGE = (
    "molink is shutting down on this PC; retry later, or use another PC of the swarm"
)


class RunningAnswers:
    """Answers run inside :meth:`track_answer`; at shutdown they have a grace period."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._all_ended = asyncio.Event()
        self._is_shutting_down = False

    @contextlib.asynccontextmanager
    async def track_answer(self) -> AsyncIterator[None]:
        """Track an answer while the context is open.

        Raises:
            Unavailable: the endpoint is shutting down.
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
        """Reject new answers, and end those still running after ``seconds``."""
        self._is_shutting_down = True
        if self._scopes:
            self._all_ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), seconds)
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())
