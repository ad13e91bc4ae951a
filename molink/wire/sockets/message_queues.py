"""Messages that wait for their handler, bounded for each sender."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

#: What a message costs beside its bytes, in bytes: about what its Python objects take.
_OVERHEAD = 512


class Inbox:
    """The messages of one user: handled one after the other, in order, by a task.

    The task lives only while there is something to do.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[Callable[[], Awaitable[None]], int]] = deque()
        self._task: asyncio.Task[None] | None = None
        #: Bytes of the messages waiting or being handled.
        self.nbytes = 0
        #: How many are waiting or being handled.
        self.count = 0

    def add_work(self, work: Callable[[], Awaitable[None]], nbytes: int) -> bool:
        """Have ``work`` done in its turn; ``False`` if the user has too much waiting already."""
        nbytes += _OVERHEAD
        if self.count >= self._max_messages or self.nbytes + nbytes > self._max_bytes:
            return False
        self.nbytes += nbytes
        self.count += 1
        self._waiting.append((work, nbytes))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())
        return True

    async def close(self) -> None:
        """Drop what waits and end the handler that runs."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                work, nbytes = self._waiting.popleft()
                try:
                    await work()
                finally:
                    self.nbytes -= nbytes
                    self.count -= 1
                # Both hold the message: let it go before the next one is awaited.
                del work
                await asyncio.sleep(0)
        finally:
            self._task = None


class Outbox:
    """Encoded messages that a socket can't take yet, bounded."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[list[object], int]] = deque()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add_message(self, parts: list[object], nbytes: int) -> bool:
        """Keep ``parts``; ``False`` if there is no room."""
        nbytes += _OVERHEAD
        if len(self._waiting) >= self._max_messages or self.nbytes + nbytes > self._max_bytes:
            return False
        self._waiting.append((parts, nbytes))
        self.nbytes += nbytes
        return True

    def peek_message(self) -> list[object]:
        """The oldest message."""
        return self._waiting[0][0]

    def pop_message(self) -> None:
        """The oldest message has been sent."""
        self.nbytes -= self._waiting.popleft()[1]

    def clear(self) -> None:
        """Drop all."""
        self._waiting.clear()
        self.nbytes = 0
