"""Passes tokens from the daemon's event loop to the API's."""

import asyncio
import contextlib
import threading
from collections import deque

from molink.errors import MolinkError
from molink.swarm.frontend.generated_token import GeneratedToken

Item = GeneratedToken | MolinkError


class TokenQueue:
    """A queue with one reader. A batch of tokens wakes the reader's loop once.

    Its length is bounded by the request's credit window.
    """

    def __init__(self) -> None:
        """Must be created on the reader's event loop."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._filled = asyncio.Event()

    def put(self, item: Item) -> None:
        """Add an item, from any thread."""
        with self._lock:
            first = not self._items
            self._items.append(item)
        if first:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed
                self._loop.call_soon_threadsafe(self._filled.set)

    async def get_all(self) -> list[Item]:
        """Wait for items and return all of them."""
        await self._filled.wait()
        with self._lock:
            items = list(self._items)
            self._items.clear()
            self._filled.clear()
        return items
