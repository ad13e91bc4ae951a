"""Work that waits its turn: whoever has much of it waits for his own, not others for him."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from molink.errors import Overloaded

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by owner; owners take turns, and each one's items come in order. Sans-IO."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        #: Owners with items, the next one first.
        self._owners: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def put(self, owner: str, item: T) -> T | None:
        """Add an item; returns the one that lost its place to it, if there was none left.

        That is the last one of the owner with most, where that has two more than ``owner``.

        Raises:
            Overloaded: as many wait as may, and ``owner`` has its share of them.
        """
        displaced = self._displaced_by(owner) if len(self) >= self._maximum else None
        self._owners.setdefault(owner, deque()).append(item)
        return displaced

    def discard(self, owner: str, item: T) -> None:
        """An item is wanted no more; it may have been taken."""
        items = self._owners.get(owner)
        if items is None or item not in items:
            return
        items.remove(item)
        if not items:
            del self._owners[owner]

    def take(self) -> T | None:
        """The next item; ``None`` if there is none."""
        if not self._owners:
            return None
        owner, items = self._owners.popitem(last=False)
        item = items.popleft()
        if items:
            self._owners[owner] = items
        return item

    def _displaced_by(self, owner: str) -> T:
        most = max(self._owners.values(), key=len, default=deque[T]())
        if len(most) < len(self._owners.get(owner, ())) + 2:
            raise too_many()
        return most.pop()


def too_many() -> Overloaded:
    """What one is told whose item has no place."""
    return Overloaded("too many prompts wait to be read; try again", retry_after=1.0)
