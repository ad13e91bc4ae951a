"""The answers that are given now, and how they end with the endpoint."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from molink.errors import Unavailable

_ENDING = "molink is ending on this PC; ask again once it runs, or on another PC of the swarm"


class RunningAnswers:
    """Answers are generated inside :meth:`one`; when the endpoint ends, they may go on a while."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._none = asyncio.Event()
        self._ending = False

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """An answer runs meanwhile.

        Raises:
            Unavailable: the endpoint ends, and no time is left.
        """
        if self._ending:
            raise Unavailable(_ENDING)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
                    if not self._scopes:
                        self._none.set()
        except TimeoutError:
            if not scope.expired():
                raise
            raise Unavailable(_ENDING) from None

    async def finish(self, seconds: float) -> None:
        """Begin no answers from now on; end those that still run after so many seconds."""
        self._ending = True
        if self._scopes:
            self._none.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._none.wait(), seconds)
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())
