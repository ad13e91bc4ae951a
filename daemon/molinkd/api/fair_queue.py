"""Work that waits its turn: whoever has much of it waits for his own, not others for him."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from molink.errors import Overloaded

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by owner; owners take turns, and each one's items come in order. Sans-IO."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        #: Owners with items, the next one first.
        self._clients: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def add_item(self, client: str, item: T) -> T | None:
        """Add an item; returns the one that lost its place to it, if there was none left.

        That is the last one of the owner with most, where that has two more than ``owner``.

        Raises:
            Overloaded: as many wait as may, and ``owner`` has its share of them.
        """
        displaced = self._displace_item(client) if len(self) >= self._max_items else None
        self._clients.setdefault(client, deque()).append(item)
        return displaced

    def discard_item(self, client: str, item: T) -> None:
        """An item is wanted no more; it may have been taken."""
        items = self._clients.get(client)
        if items is None or item not in items:
            return
        items.remove(item)
        if not items:
            del self._clients[client]

    def pop_item(self) -> T | None:
        """The next item; ``None`` if there is none."""
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
    """What one is told whose item has no place."""
    return Overloaded("too many prompts wait to be read; try again", retry_after=1.0)
