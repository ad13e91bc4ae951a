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

    def put(self, owner: str, item: T) -> None:
        """Add an item.

        Raises:
            Overloaded: as many wait as may.
        """
        if len(self) >= self._maximum:
            raise Overloaded("too many prompts wait to be read; try again", retry_after=1.0)
        self._owners.setdefault(owner, deque()).append(item)

    def take(self) -> T | None:
        """The next item; ``None`` if there is none."""
        if not self._owners:
            return None
        owner, items = self._owners.popitem(last=False)
        item = items.popleft()
        if items:
            self._owners[owner] = items
        return item
