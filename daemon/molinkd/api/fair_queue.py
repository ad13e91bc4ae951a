"""A queue that serves clients round-robin, so that none can starve the others."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from molink.errors import Overloaded

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Queues items per client and serves clients round-robin. Sans-IO."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        #: Clients with items, the next one first.
        self._clients: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def add_item(self, client: str, item: T) -> T | None:
        """Add an item. If the queue is full, returns the item that it displaced.

        The displaced item is the last one of the client with the most items, if that has at least
        two more than ``client``.

        Raises:
            Overloaded: the queue is full and ``client`` has its fair share.
        """
        displaced = self._displace_item(client) if len(self) >= self._max_items else None
        self._clients.setdefault(client, deque()).append(item)
        return displaced

    def discard_item(self, client: str, item: T) -> None:
        """Remove an item if it is still queued."""
        items = self._clients.get(client)
        if items is None or item not in items:
            return
        items.remove(item)
        if not items:
            del self._clients[client]

    def pop_item(self) -> T | None:
        """Return the next item; ``None`` if the queue is empty."""
        if not self._clients:
            return None
        client, items = self._clients.popitem(last=False)
        item = items.popleft()
        if items:
            self._clients[client] = items
        return item

    def _displace_item(self, client: str) -> T:
        most = max(self._clients.values(), key=len, default=deque[T]())
        if len(most) < len(self._clients.get(client, ())) + 2:
            raise queue_full_error()
        return most.pop()


def queue_full_error() -> Overloaded:
    """Return the error for an item that does not fit."""
    return Overloaded("too many prompts are queued; try again", retry_after=1.0)
