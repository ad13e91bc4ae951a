"""Bounded queues of received and of unsent messages."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

#: Assumed bytes of a message's Python objects.
_OVERHEAD = 512


class Inbox:
    """Messages of one peer, handled one by one in order by a task.

    The task lives only while there is work.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[Callable[[], Awaitable[None]], int]] = deque()
        self._task: asyncio.Task[None] | None = None
        #: Bytes of messages that are waiting or being handled.
        self.nbytes = 0
        #: Number of messages that are waiting or being handled.
        self.count = 0

    def add_work(self, work: Callable[[], Awaitable[None]], nbytes: int) -> bool:
        """Queue ``work``; ``False`` if the inbox is full."""
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
        """Drop waiting messages and cancel the running handler."""
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
                # Both refer to the message; release it before the next one is awaited.
                del work
                await asyncio.sleep(0)
        finally:
            self._task = None


class Outbox:
    """Encoded messages that a socket can't take yet."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[list[object], int]] = deque()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add_message(self, parts: list[object], nbytes: int) -> bool:
        """Queue ``parts``; ``False`` if the outbox is full."""
        nbytes += _OVERHEAD
        if len(self._waiting) >= self._max_messages or self.nbytes + nbytes > self._max_bytes:
            return False
        self._waiting.append((parts, nbytes))
        self.nbytes += nbytes
        return True

    def peek_message(self) -> list[object]:
        """Return the oldest message."""
        return self._waiting[0][0]

    def pop_message(self) -> None:
        """Remove the oldest message."""
        self.nbytes -= self._waiting.popleft()[1]

    def drop_messages(self) -> None:
        """Drop all messages."""
        self._waiting.clear()
        self.nbytes = 0
